"""All that the learner knows of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from k3rl.model.batch import ForwardOutput, TokenBatch, TokenLogprobs
    from k3rl.model.cache import Cache


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyCapabilities:
    """What a policy can do; a configuration that needs more is refused by name."""

    chunk: bool
    """forward accepts and returns a cache through which gradients pass."""
    routes: bool
    """forward replays recorded expert routes."""
    value: bool
    """the policy has a value head."""


class Policy(Protocol):
    """A trainable autoregressive model. K3 is one, a Hugging Face model another, a toy in the tests a third."""

    capabilities: PolicyCapabilities

    def __call__(self, batch: TokenBatch, cache: Cache | None = None) -> ForwardOutput: ...

    def token_logprobs(self, hidden_MD: torch.Tensor, targets_M: torch.Tensor, temperature: float) -> TokenLogprobs:
        """Log-probability of ``targets_M`` under softmax(head(hidden) / temperature), entropy and log-sum-exp."""
        ...

    def values(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Value estimates [M] float32; never scaled by temperature. Raises when there is no value head."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything the engine needs, by name: parameters and persistent buffers."""
        ...
