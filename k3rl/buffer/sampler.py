"""The buffer that the controller sees: groups go in, batches of groups come out, and nothing is lost in between."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from k3rl.buffer.ledger import Attempt, Ledger, Seal, SealResult
from k3rl.buffer.store import PayloadError, Store
from k3rl.trajectory import Trajectory, TrajectoryKey

logger = logging.getLogger(__name__)

SignalTest = Callable[[Sequence[Trajectory]], str | None]
"""Reason why a group teaches nothing (``all_same``, ``all_fail``), or None when it does."""


class Buffer:
    """Ledger and payloads of one run, below ``folder`` (``ledger.sqlite`` and ``trajectories/``). It has one writer.

    A group that is older than ``max_staleness``, teaches nothing or is damaged is dropped whole, with its reason, in
    the same transaction that leases the batch. Batches are in order of ordinal: the oldest first.
    """

    def __init__(self, folder: str | Path, *, max_staleness: int, no_signal: SignalTest | None = None) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.store = Store(folder / "trajectories")
        self.store.remove_leftovers()
        self.max_staleness = max_staleness
        self.no_signal = no_signal

    def add_group(self, trajectories: Sequence[Trajectory]) -> list[SealResult]:
        """Make issued trajectories (of any groups) durable: one payload file, then the seals, in one transaction.

        Samples of a group may come in several calls; the group is ready when none of its samples is still out.
        """
        places = self.store.write(trajectories)
        return self.ledger.seal(
            [
                Seal(key=key, uri=uri, digest=digest, policy_step=trajectory.oldest_step)
                for (key, uri, digest), trajectory in zip(places, trajectories, strict=True)
            ]
        )

    def take(self, num_groups: int, learner_step: int) -> list[list[Trajectory]]:
        """Lease up to ``num_groups`` of the oldest ready groups for the update after ``learner_step``.

        ``learner_step`` is the step of the weights that the learner holds, so the lease is for ``learner_step + 1``.
        Staleness is ``learner_step`` minus the oldest sampled token's step: up to ``max_staleness`` is allowed, more is
        dropped("stale"). A group sampled by weights newer than the learner's (a future that a rollback discarded) is
        dropped("future"). Fewer groups come back when fewer are ready.
        """
        step = learner_step + 1
        batch: list[list[Trajectory]] = []
        with self.ledger.transaction():
            for group in self.ready_groups():
                if len(batch) == num_groups:
                    break
                keys = [attempt.key for attempt in group]
                reason, trajectories = self._age_reason(group, learner_step), []
                if reason is None:
                    reason, trajectories = self._read(group)
                if reason is None:
                    self.ledger.lease(keys, step)
                    batch.append(trajectories)
                else:
                    self.ledger.drop(keys, reason, step)
        return batch

    def ready_groups(self) -> list[list[Attempt]]:
        """Sealed attempts by group, in order of ordinal, of the groups that wait for no other sample.

        A sample is waited for while its only attempts are issued, or lost and not issued again. To go on without
        a straggler, drop it with another reason.
        """
        sealed = self.ledger.attempts(states=("sealed",))
        alive = {(a.key.ordinal, a.key.sample) for a in sealed}
        out = [*self.ledger.attempts(states=("issued",)), *self.ledger.reissuable(("lost",))]
        waiting = {a.key.ordinal for a in out if (a.key.ordinal, a.key.sample) not in alive}
        groups = itertools.groupby(sealed, key=lambda attempt: attempt.key.ordinal)
        return [list(attempts) for ordinal, attempts in groups if ordinal not in waiting]

    def sealed(self, ordinals: Collection[int]) -> list[Trajectory]:
        """Trajectories of the ready groups among ``ordinals``, in order of key, damaged ones left out; for metrics."""
        groups = [group for group in self.ready_groups() if group[0].key.ordinal in ordinals]
        return [trajectory for group in groups for trajectory in self._read(group)[1]]

    def digests(self, keys: Sequence[TrajectoryKey]) -> list[str]:
        """Payload digest of each key, empty for one that has no payload."""
        attempts = (self.ledger.get(key) for key in keys)
        return ["" if attempt is None else attempt.digest or "" for attempt in attempts]

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

    def _read(self, group: Sequence[Attempt]) -> tuple[str | None, list[Trajectory]]:
        """Trajectories of a group in order of sample, or the reason why it cannot be trained on."""
        wanted = [attempt.key for attempt in group]
        found: dict[object, Trajectory] = {}
        try:
            for uri, digest in sorted({(attempt.uri or "", attempt.digest or "") for attempt in group}):
                found |= {trajectory.key: trajectory for trajectory in self.store.read(uri, digest)}
        except PayloadError as error:
            logger.warning("group %d is dropped: %s", wanted[0].ordinal, error)
            return "damaged", []
        trajectories = [found[key] for key in wanted]
        return (self.no_signal(trajectories) if self.no_signal else None), trajectories
