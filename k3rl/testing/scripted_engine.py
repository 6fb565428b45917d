"""An engine that says what a test tells it to."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from k3rl.rollout.engine import Completion, EngineCapabilities, Request
from k3rl.trajectory import PolicyVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

SCRIPTED = PolicyVersion(incarnation=0, step=0, digest="scripted")


class ScriptedEngine:
    """Answers each request with the ids that ``script`` gives for it, cut at its stop id and at ``max_tokens``.

    The logprob of the n-th token of a turn is -n, and its routes are its position in the context. As in a real engine,
    the last sampled token has not been fed when a turn ends. A script that ends without a stop id is a test's mistake.
    A ``forgetful`` engine never recognises a handle and reads every context again.
    """

    capabilities = EngineCapabilities(
        seeded=True, fork=True, routes=True, exact=True, inflight_update=False, preemption=False
    )

    def __init__(
        self, script: Callable[[Request], Sequence[int]], *, has_routes: bool = True, forgetful: bool = False
    ) -> None:
        self._script = script
        self._has_routes = has_routes
        self._forgetful = forgetful
        self._queue: list[tuple[int, Request]] = []
        self._contexts: dict[int, int] = {}
        self._numbers = itertools.count()
        self._handles = itertools.count()
        self.requests: list[Request] = []
        """Every request so far, each with a context of its own."""
        self.version = SCRIPTED

    @property
    def live_handles(self) -> set[int]:
        """Handles that were not released."""
        return set(self._contexts)

    @property
    def num_queued(self) -> int:
        """Requests that are not over."""
        return len(self._queue)

    def submit(self, request: Request) -> int:
        """Queue a request."""
        number = next(self._numbers)
        kept = Request(
            token_ids=tuple(request.token_ids),
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            stop_ids=request.stop_ids,
            seed=request.seed,
            handle=request.handle,
        )
        self.requests.append(kept)
        self._queue.append((number, kept))
        return number

    def step(self) -> list[Completion]:
        """Complete every queued request."""
        done, self._queue = [self._complete(number, request) for number, request in self._queue], []
        return done

    def abort(self, request: int) -> None:
        """Forget a request."""
        self._queue = [(number, queued) for number, queued in self._queue if number != request]

    def fork(self, handle: int) -> int:
        """Return a second handle of the same context."""
        copy = next(self._handles)
        if handle in self._contexts:
            self._contexts[copy] = self._contexts[handle]
        return copy

    def release(self, handle: int) -> None:
        """Forget a handle."""
        self._contexts.pop(handle, None)

    def update_weights(self, version: PolicyVersion, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take a new version; there are no weights."""
        self.version = version

    def _complete(self, number: int, request: Request) -> Completion:
        ids: list[int] = []
        for token in self._script(request):
            ids.append(int(token))
            if token in request.stop_ids or len(ids) == request.max_tokens:
                break
        stopped = bool(ids) and ids[-1] in request.stop_ids
        assert stopped or len(ids) == request.max_tokens, "the script ended before the turn did"
        known = -1 if request.handle is None or self._forgetful else request.handle
        start = self._contexts.get(known, 0)
        handle = known if known in self._contexts else next(self._handles)
        self._contexts[handle] = end = len(request.token_ids) + len(ids) - 1
        return Completion(
            request=number,
            token_ids=np.asarray(ids, dtype=np.int32),
            logprobs=-np.arange(len(ids), dtype=np.float32),
            versions=(self.version,) * len(ids),
            stop_reason="stop" if stopped else "length",
            handle=handle,
            routes=np.arange(start, end, dtype=np.uint16).reshape(-1, 1, 1) if self._has_routes else None,
            routes_start=start,
        )
