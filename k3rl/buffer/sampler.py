"""The buffer that the controller sees: summaries go in, batches come out, and nothing is lost in between."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from k3rl.buffer.ledger import Attempt, Ledger, SealResult
from k3rl.buffer.store import PayloadError, Store
from k3rl.errors import LedgerError
from k3rl.trajectory import Summary

logger = logging.getLogger(__name__)

SignalTest = Callable[[Sequence[Summary]], str | None]
"""Reason why a group teaches nothing (``all_same``, ``all_absent``, ``too_small``), or None when it does."""


class Buffer:
    """Ledger and payloads of one run, below ``folder`` (``ledger.sqlite`` and ``trajectories/``). It has one driver.

    A group that is older than ``max_staleness``, teaches nothing or is damaged is dropped whole, with its reason, in
    the same transaction that leases the batch.
    """

    def __init__(self, folder: str | Path, *, max_staleness: int, no_signal: SignalTest | None = None) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.store = Store(folder / "trajectories")
        self.max_staleness = max_staleness
        self.no_signal = no_signal

    def seal(self, summaries: Sequence[Summary]) -> list[SealResult]:
        """Record attempts whose payloads are durable, in one transaction."""
        return self.ledger.seal(summaries)

    def take(self, ordinals: Sequence[int], learner_step: int) -> list[list[Summary]]:
        """Lease the sealed groups among ``ordinals`` for the update after ``learner_step``, in order of ordinal.

        ``learner_step`` is the step of the weights that the learner holds, so the lease is for ``learner_step + 1``.
        Staleness is ``learner_step`` minus the oldest sampled token's step: up to ``max_staleness`` is allowed, more is
        dropped("stale"). A group sampled by weights newer than the learner's (a future that a rollback discarded) is
        dropped("future"). LedgerError when a sample of theirs is still out: seal it or give it up first.
        """
        step = learner_step + 1
        batch: list[list[Summary]] = []
        with self.ledger.transaction():
            running = [str(a.key) for o in ordinals for a in self.ledger.attempts(states=("issued",), ordinal=o)]
            if running:
                # Without its stragglers a group would have another baseline than the one it was issued for.
                raise LedgerError(f"{len(running)} attempts of this batch are still out: {', '.join(running[:5])}")
            sealed = [a for ordinal in ordinals for a in self.ledger.attempts(states=("sealed",), ordinal=ordinal)]
            for _, attempts in itertools.groupby(sealed, key=lambda a: a.key.ordinal):
                group = list(attempts)
                keys, summaries = [a.key for a in group], [a.summary for a in group if a.summary is not None]
                reason = self._age_reason(group, learner_step) or self._damage_reason(summaries)
                if reason is None and self.no_signal is not None:
                    reason = self.no_signal(summaries)
                if reason is None:
                    self.ledger.lease(keys, step)
                    batch.append(summaries)
                else:
                    self.ledger.drop(keys, reason, step)
        return batch

    def summaries(self, ordinals: Sequence[int]) -> list[Summary]:
        """What is sealed of the groups ``ordinals``, in order of key."""
        attempts = (a for ordinal in ordinals for a in self.ledger.attempts(states=("sealed",), ordinal=ordinal))
        return [a.summary for a in attempts if a.summary is not None]

    def close(self) -> None:
        """Close the ledger."""
        self.ledger.close()

    def _age_reason(self, group: Sequence[Attempt], learner_step: int) -> str | None:
        steps = [attempt.policy_step for attempt in group if attempt.policy_step is not None]
        if not steps:
            return None
        if max(steps) > learner_step:
            return "future"
        return "stale" if learner_step - min(steps) > self.max_staleness else None

    def _damage_reason(self, summaries: Sequence[Summary]) -> str | None:
        try:
            for place in sorted({(s.uri, s.digest) for s in summaries}):
                self.store.verify(*place)
        except PayloadError as error:
            logger.warning("group %d is dropped: %s", summaries[0].key.ordinal, error)
            return "damaged"
        return None
