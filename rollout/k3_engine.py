"""The K3 engine: continuous batching over the model's own cache.

All live contexts are rows of one stacked cache. A step feeds each active row what it has not seen (a new observation,
or the token it sampled last) in one ragged forward, so prefill and decode share steps. Rows of new requests are added,
and those of released handles dropped, before the next forward.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from k3rl.errors import EngineError, WeightSyncError
from k3rl.kernels.sampling import sample_tokens
from k3rl.model.batch import TokenBatch
from k3rl.model.cache import Cache, ValueCache
from k3rl.model.moe import rounded_experts
from k3rl.model.transformer import K3Model
from k3rl.rollout.engine import Completion, EngineCapabilities, Request
from k3rl.weights.base import weights_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k3rl.config import ModelConfig
    from k3rl.trajectory import PolicyVersion


@dataclass(slots=True)
class _Row:
    """One live context: a row of the stacked cache, at the same index as in the engine's list."""

    handle: int
    context: list[int]  # everything the cache covers
    active: _Active | None = None


@dataclass(slots=True)
class _Active:
    """A request in progress on a row."""

    number: int
    request: Request
    pending: list[int]  # not fed yet
    uniforms: np.ndarray  # [max_tokens] float64, drawn at submission: sampling does not depend on the batch
    routes_start: int
    routes_end: int  # positions up to here have told their routes
    routes: list[np.ndarray] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)


class K3Engine:
    """Samples from a :class:`K3Model` in this process."""

    capabilities = EngineCapabilities(
        seeded=True, fork=True, routes=True, exact=False, inflight_update=True, preemption=False
    )

    def __init__(self, config: ModelConfig, version: PolicyVersion, tensors: Mapping[str, torch.Tensor]) -> None:
        self._config = config
        # Experts are rounded when weights arrive, not in every forward.
        self._model = K3Model(replace(config, expert_format="plain")).eval().requires_grad_(False)
        self._version = version
        self._rows: list[_Row] = []
        self._cache: Cache = ValueCache.empty(config, 0)  # the first rows; those added since the last step are missing
        self._handles = itertools.count()
        self._numbers = itertools.count()
        self._released: set[int] = set()
        self.update_weights(version, tensors)

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def num_contexts(self) -> int:
        """Contexts that are kept: those of requests under way and of handles that were not released."""
        return sum(row.handle not in self._released for row in self._rows)

    def submit(self, request: Request) -> int:
        """Queue a request and return its number."""
        if not len(request.token_ids):
            raise EngineError("a request needs at least one token of context")
        if request.max_tokens < 1:
            raise EngineError(f"max_tokens must be at least 1, got {request.max_tokens}")
        if not 0 <= request.temperature < math.inf:
            raise EngineError(f"temperature must be 0 or a positive number, got {request.temperature}")
        # Checked here, where it costs this request only: in the forward it would cost the whole batch.
        if min(request.token_ids) < 0 or max(request.token_ids) >= self._config.vocab_size:
            raise EngineError(f"a token id is outside of the vocabulary of {self._config.vocab_size}")
        given = list(request.token_ids)
        row = self._idle_row(request.handle)
        if row is None or len(row.context) >= len(given) or row.context != given[: len(row.context)]:
            row = _Row(handle=next(self._handles), context=[])
            self._rows.append(row)
        known = len(row.context)
        row.active = _Active(
            number=next(self._numbers),
            request=request,
            pending=given[known:],
            uniforms=np.random.Generator(np.random.Philox(key=request.seed)).random(request.max_tokens),
            routes_start=known,
            routes_end=known,
        )
        return row.active.number

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """Advance every active row by one token."""
        self._settle()
        active = [(row, row.active) for row in self._rows if row.active is not None]
        if not active:
            return []
        last_rows = self._feed()
        temperatures = torch.tensor([a.request.temperature for _, a in active])
        uniforms = torch.tensor([a.uniforms[len(a.token_ids)] for _, a in active], dtype=torch.float64)
        ids, logprobs = sample_tokens(last_rows, self._model.lm_head.weight, uniforms, temperatures)
        if not torch.isfinite(logprobs).all():
            # These requests are over: their contexts must neither be continued nor keep better weights out.
            for row, _ in active:
                self._release(row)
            raise EngineError(f"weights {self._version} give a log-probability that is not finite")
        return [
            completion
            for (row, a), token, logprob in zip(active, ids.tolist(), logprobs.tolist(), strict=True)
            if (completion := self._record(row, a, token, logprob)) is not None
        ]

    def abort(self, request: int) -> None:
        """Forget a request, whatever it has sampled."""
        for row in self._rows:
            if row.active is not None and row.active.number == request:
                self._release(row)

    def fork(self, handle: int) -> int:
        """Return a second handle of the same context, at the cost of one row of state."""
        self._settle()
        row, copy = self._idle_row(handle), next(self._handles)
        if row is not None:
            order = [*range(len(self._rows)), self._rows.index(row)]
            self._cache = self._cache.select(torch.tensor(order))
            self._rows.append(_Row(handle=copy, context=list(row.context)))
        return copy

    def release(self, handle: int) -> None:
        """Forget a handle; its row is dropped before the next forward."""
        for row in self._rows:
            if row.handle == handle:
                self._release(row)

    def update_weights(self, version: PolicyVersion, tensors: Mapping[str, torch.Tensor]) -> None:
        """Check and take new weights. All of them or none: a wrong set leaves the old version serving.

        What other weights computed is forgotten. Requests under way keep what they sampled, each token with its
        version, and read their contexts again.
        """
        own = self._model.state_dict()
        problems = [f"missing {n}" for n in own if n not in tensors]
        problems += [f"unexpected {n}" for n in tensors if n not in own]
        problems += [
            f"{n} is {tuple(t.shape)} {t.dtype}, not {tuple(own[n].shape)} {own[n].dtype}"
            for n, t in tensors.items()
            if n in own and (t.shape != own[n].shape or t.dtype != own[n].dtype)
        ]
        if not problems and weights_digest(tensors) != version.digest:
            problems = [f"the tensors' digest is not {version.digest}"]
        if not problems and self._config.expert_format == "mxfp4":
            try:
                tensors = rounded_experts(tensors)
            except ValueError as error:
                problems = [str(error)]
        if problems:
            raise WeightSyncError(f"version {version.step} refused, {self._version.step} stays: {'; '.join(problems)}")
        self._model.load_state_dict(dict(tensors))
        if version.digest != self._version.digest:
            self._rows = [row for row in self._rows if row.active is not None]
            for row in self._rows:
                if row.active is not None:
                    row.active.pending = [*row.active.request.token_ids, *row.active.token_ids]
                    row.context = []
            self._cache = ValueCache.empty(self._config, 0)
        self._version = version

    def _idle_row(self, handle: int | None) -> _Row | None:
        for row in self._rows:
            if row.handle == handle and row.active is None and handle not in self._released:
                return row
        return None

    def _release(self, row: _Row) -> None:
        row.active = None
        self._released.add(row.handle)

    def _settle(self) -> None:
        """Make the cache's rows those of the list: drop what was released, add what is new."""
        if self._released:
            keep = [i for i, row in enumerate(self._rows) if row.handle not in self._released]
            cached = [i for i in keep if i < self._cache.num_sequences]
            self._cache = self._cache.select(torch.tensor(cached, dtype=torch.int64))
            self._rows = [self._rows[i] for i in keep]
            self._released = set()
        if len(self._rows) > self._cache.num_sequences:
            self._cache = self._cache.extend(len(self._rows) - self._cache.num_sequences)

    def _feed(self) -> torch.Tensor:
        """Run the forward over all pending tokens; return the hidden row [M, D] after each active row's last token."""
        pending = [row.active.pending if row.active else [] for row in self._rows]
        batch = TokenBatch.pack([torch.tensor(p, dtype=torch.int64) for p in pending])
        out = self._model(batch, self._cache)
        assert out.cache is not None
        self._cache = out.cache
        routes = None if out.routes is None else out.routes.numpy().astype(np.uint16)
        ends = []
        for row, (start, end) in zip(self._rows, itertools.pairwise(batch.cu_seqlens.tolist()), strict=True):
            if row.active is None:
                continue
            ends.append(end - 1)
            told = max(row.active.routes_end - len(row.context), 0)
            row.context += row.active.pending
            row.active.pending = []
            row.active.routes_end = max(row.active.routes_end, len(row.context))
            if routes is not None:
                row.active.routes.append(routes[min(start + told, end) : end])
        return out.hidden[torch.tensor(ends)]

    def _record(self, row: _Row, active: _Active, token: int, logprob: float) -> Completion | None:
        active.token_ids.append(token)
        active.logprobs.append(logprob)
        active.versions.append(self._version)
        if token in active.request.stop_ids:
            reason = "stop"
        elif len(active.token_ids) == active.request.max_tokens:
            reason = "length"
        else:
            active.pending = [token]
            return None
        row.active = None
        return Completion(
            request=active.number,
            token_ids=np.asarray(active.token_ids, dtype=np.int32),
            logprobs=np.asarray(active.logprobs, dtype=np.float32),
            versions=tuple(active.versions),
            stop_reason=reason,
            handle=row.handle,
            routes=np.concatenate(active.routes) if active.routes else None,
            routes_start=active.routes_start,
        )
