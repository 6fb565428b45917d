"""The engine protocol: token ids in, sampled token ids with their logprobs out. Two implementations: K3 and vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import torch

    from k3rl.trajectory import PolicyVersion, StopReason


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCapabilities:
    """What an engine can do; a configuration that needs what is missing is refused by name."""

    seeded: bool
    fork: bool
    routes: bool
    exact: bool
    inflight_update: bool
    preemption: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One turn to sample."""

    token_ids: Sequence[int]
    """The whole context."""
    max_tokens: int
    temperature: float
    """0 means greedy."""
    stop_ids: frozenset[int]
    seed: int
    handle: int | None = None
    """Where an earlier completion left off. A hint: it may spare recomputing, and changes nothing else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What was sampled for a request. The stop token, if that is why it ended, is the last of ``token_ids``."""

    request: int
    token_ids: np.ndarray  # [n] int32
    logprobs: np.ndarray  # [n] float32
    versions: tuple[PolicyVersion, ...]  # n of them
    stop_reason: StopReason
    handle: int
    """Continue from here, then release it."""
    routes: np.ndarray | None = None
    """Expert ids [m, L, k] uint16 of the positions from ``routes_start`` on that the model read for this request, each
    as first read: the sampled ones but the last, and of the context at least what no earlier completion has told. None
    for a model without experts."""
    routes_start: int = 0


class Engine(Protocol):
    """Samples many requests at once.

    A handle stands for a context whose computation is kept. Correctness never depends on it: one that is unknown, was
    released, is in use, belongs to other weights or does not fit the context costs a recomputation and nothing else.
    """

    capabilities: EngineCapabilities

    def submit(self, request: Request) -> int:
        """Queue a request and return its number; EngineError when it could not be sampled whatever happens."""
        ...

    def step(self) -> list[Completion]:
        """Advance every queued request by a token; return those that ended."""
        ...

    def abort(self, request: int) -> None:
        """Forget a request, whatever it has sampled; nothing happens when it is over."""
        ...

    def fork(self, handle: int) -> int:
        """Return a second handle of the same context."""
        ...

    def release(self, handle: int) -> None:
        """Forget a handle; nothing happens when it is not known."""
        ...

    def update_weights(self, version: PolicyVersion, tensors: Mapping[str, torch.Tensor]) -> None:
        """Sample from new weights from now on, or raise WeightSyncError and keep the old ones.

        With ``inflight_update`` requests may be under way: they go on from what they have sampled.
        """
        ...
