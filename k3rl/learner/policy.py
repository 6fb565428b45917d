"""All that the learner knows of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from k3rl.model.batch import ForwardOutput, PolicyCapabilities, TokenBatch, TokenLogprobs
    from k3rl.model.cache import Past
    from k3rl.model.tape import Tape


class Policy(Protocol):
    """A trainable autoregressive model. K3 is one, a Hugging Face model another, a toy in the tests a third."""

    capabilities: PolicyCapabilities

    def __call__(self, batch: TokenBatch, cache: Past | None = None) -> ForwardOutput: ...

    def tape(self, num_rows: int) -> Tape:
        """For a walk over a tree of so many tokens; asked of a policy that can ``chunk``."""
        ...

    def token_logprobs(self, hidden_MD: torch.Tensor, targets_M: torch.Tensor, temperature: float) -> TokenLogprobs:
        """Log-probability of ``targets_M`` under softmax(head(hidden) / temperature), entropy and log-sum-exp."""
        ...

    def values(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Value estimates [M], at least float32; never scaled by temperature. Raises when there is no value head."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything the engine needs, by name: parameters and persistent buffers."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], /) -> object:
        """Take the tensors of :meth:`state_dict`; raises where names or shapes differ."""
        ...

    def muon_blocks(self) -> dict[str, int]:
        """Into how many row blocks (heads) Muon cuts a parameter, by name; one that is not named stays whole."""
        ...
