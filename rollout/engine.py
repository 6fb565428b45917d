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
    """One turn to sample. ``token_ids`` is the whole context; ``handle`` is a hint that spares recomputing it."""

    token_ids: Sequence[int]
    max_tokens: int
    temperature: float
    """0 means greedy."""
    stop_ids: frozenset[int]
    seed: int
    handle: int | None = None


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


class Engine(Protocol):
    """Samples many requests at once."""

    capabilities: EngineCapabilities

    def submit(self, request: Request) -> int:
        """Queue a request and return its number."""
        ...

    def step(self) -> list[Completion]:
        """Advance every queued request by a token; return those that ended."""
        ...

    def fork(self, handle: int) -> int:
        """Return a second handle of the same context."""
        ...

    def release(self, handle: int) -> None:
        """Forget a handle; unknown ones are an EngineError."""
        ...

    def routes(self, handle: int) -> np.ndarray | None:
        """Expert ids [tokens computed so far, L, k] uint16 along the context; None for a model without experts."""
        ...

    def update_weights(self, version: PolicyVersion, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take new weights, or raise WeightSyncError and keep the old ones."""
        ...
