"""What goes into the one forward pass, and what comes out.

Letters: T tokens of the packed batch, N sequences, D model width, L mixture-of-experts layers, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3rl.model.cache import Cache


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """N packed sequences, never padded. Sequence n owns rows ``cu_seqlens[n] : cu_seqlens[n + 1]``, perhaps none."""

    ids: torch.Tensor  # [T] int64
    cu_seqlens: torch.Tensor  # [N + 1] int64, starts at 0, ends at T
    routes: torch.Tensor | None = None  # [T, L, k] int64; expert ids to replay, -1 in rows to be routed afresh

    @staticmethod
    def pack(sequences: Sequence[torch.Tensor], routes: Sequence[torch.Tensor] | None = None) -> TokenBatch:
        """Pack id tensors ``[n_i]`` (and their routes ``[n_i, L, k]``) one after the other."""
        lengths = torch.tensor([0] + [len(s) for s in sequences], device=sequences[0].device)
        return TokenBatch(
            ids=torch.cat(list(sequences)),
            cu_seqlens=lengths.cumsum(0),
            routes=None if routes is None else torch.cat(list(routes)),
        )

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> torch.Tensor:
        """New tokens of each sequence, [N] int64."""
        return self.cu_seqlens.diff()


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Result of the forward pass over T packed tokens."""

    hidden: torch.Tensor  # [T, D], after the final norm: what the output head and the value head read
    cache: Cache | None  # covers everything up to and including these tokens; None when none was given
    routes: torch.Tensor | None  # [T, L, k] int64 expert ids that were used; None for a model without experts
    stats: dict[str, torch.Tensor] = field(default_factory=dict)
    """Detached sums over the tokens, in training mode: ``moe_load`` [L, E], ``moe_routing_entropy`` [L], ``tokens``."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Per-token quantities of the scaled logits (logits / temperature), all [M] float32."""

    logprob: torch.Tensor
    entropy: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyCapabilities:
    """What a policy can do; a configuration that needs more is refused by name."""

    chunk: bool
    """forward accepts and returns a cache through which gradients pass."""
    routes: bool
    """forward replays recorded expert routes."""
    value: bool
    """the policy has a value head."""
