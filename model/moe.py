"""Mixtures of experts and their load balancer. Letters: T tokens, D width, E experts, k per token."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from k3rl.kernels.moe import (
    apply_experts,
    expert_load,
    load_quantile_update,
    qb_histogram,
    qb_update,
    route,
    router_scores,
)
from k3rl.model.layers import WHOLE, FeedForward, Placement, RMSNorm, activation, linear
from k3rl.model.mxfp4 import round_mxfp4

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from k3rl.config import ModelConfig


EXPERT_WEIGHTS = (".experts.w1", ".experts.w2", ".experts.w3")
"""Ends of their names in a model's state."""


class Router(nn.Module):
    """Router weight and the selection bias, which no gradient reaches."""

    placements: ClassVar = {"weight": WHOLE}

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        self.e_score_correction_bias: torch.Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(num_experts))


class Experts(nn.Module):
    """All routed experts, stacked: w1 gate and w3 up [E, F, D], w2 down [E, D, F]."""

    placements: ClassVar = {name: Placement(expert=0) for name in ("w1", "w2", "w3")}

    def __init__(self, num_experts: int, dim: int, width: int, rounded: bool) -> None:
        super().__init__()
        self.rounded = rounded  # to MXFP4 in the forward
        self.w1 = nn.Parameter(torch.empty(num_experts, width, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, width))
        self.w3 = nn.Parameter(torch.empty(num_experts, width, dim))

    def weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """w1, w2 and w3 as the forward uses them."""
        if not self.rounded:
            return self.w1, self.w2, self.w3
        return round_mxfp4(self.w1), round_mxfp4(self.w2), round_mxfp4(self.w3)


def rounded_experts(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's state with :meth:`Experts.weights` in place of what is trained; ValueError where that is not finite."""
    return {n: round_mxfp4(t) if n.endswith(EXPERT_WEIGHTS) else t for n, t in state.items()}


class SparseMoE(nn.Module):
    """Routed experts of the full width, and a shared feed-forward beside them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = config
        self.top_k, self.scale, self.activate = c.experts_per_token, c.routed_scale, activation(c)
        self.gate = Router(c.hidden_size, c.num_experts)
        self.experts = Experts(c.num_experts, c.latent_dim or c.hidden_size, c.expert_dim, c.expert_format == "mxfp4")
        self.shared_experts = FeedForward(c.hidden_size, c.shared_dim, self.activate)
        self.observer: Callable[[torch.Tensor], None] | None = None
        self.apply_experts: Callable[..., torch.Tensor] = apply_experts  # see k3rl.model.parallel

    def forward(
        self, inputs_TD: torch.Tensor, replay_Tk: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output [T, D], the expert ids used [T, k] and all scores [T, E], detached.

        Rows of ``replay_Tk`` that are not -1 are replayed.
        """
        scores_TE = router_scores(inputs_TD, self.gate.weight)
        if self.observer is not None:
            self.observer(scores_TE.detach())
        ids_Tk, weights_Tk = route(scores_TE, self.gate.e_score_correction_bias, self.top_k, replay_Tk)
        routed = self._routed(inputs_TD, ids_Tk, weights_Tk * self.scale)
        return routed + self.shared_experts(inputs_TD), ids_Tk, scores_TE.detach()

    def _routed(self, inputs_TD: torch.Tensor, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor) -> torch.Tensor:
        return self.apply_experts(inputs_TD, ids_Tk, weights_Tk, *self.experts.weights(), self.activate)


class LatentMoE(SparseMoE):
    """Routed experts inside a latent, with a norm after they are combined."""

    placements: ClassVar = {
        "routed_expert_down_proj.weight": WHOLE,
        "routed_expert_norm.weight": WHOLE,
        "routed_expert_up_proj.weight": WHOLE,
    }

    def __init__(self, config: ModelConfig, latent_dim: int) -> None:
        super().__init__(config)
        self.routed_expert_down_proj = linear(config.hidden_size, latent_dim)
        self.routed_expert_norm = RMSNorm(latent_dim, config.rms_norm_eps)
        self.routed_expert_up_proj = linear(latent_dim, config.hidden_size)

    def _routed(self, inputs_TD: torch.Tensor, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor) -> torch.Tensor:
        combined = super()._routed(self.routed_expert_down_proj(inputs_TD), ids_Tk, weights_Tk)
        return self.routed_expert_up_proj(self.routed_expert_norm(combined))


class Balancer:
    """Counts what routers do while observing; :meth:`step` moves the selection biases so that loads become even.

    Not used in reinforcement learning, where a moving bias would change the policy between rollout and update. New
    biases take effect with the next step, so that nothing a token is routed by depends on the tokens after it.
    """

    def __init__(self, layers: Sequence[SparseMoE]) -> None:
        self._layers = list(layers)
        self.counts: list[torch.Tensor | None] = [None] * len(self._layers)
        """Integer counts of each layer since the last step, None where nothing was counted."""

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Count every forward inside that has a gradient: what is run without one first is counted when it has."""
        for i, layer in enumerate(self._layers):
            layer.observer = self._observer(i)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.observer = None

    def step(self, group: ProcessGroup | None = None) -> None:
        """Update the biases from what was counted since the last step, and forget it.

        Given the ``group`` of data-parallel ranks, which have the same layers and must all call, counts are summed over
        it with one all-reduce of integers: the biases are the same bit for bit however the tokens were spread.
        """
        counts = [self._counted(i) for i in range(len(self._layers))]
        if group is not None and counts:
            together = torch.stack(counts)
            torch.distributed.all_reduce(together, group=group)
            counts = list(together.unbind())
        for layer, counted in zip(self._layers, counts, strict=True):
            if bool(counted.any()):
                bias = layer.gate.e_score_correction_bias
                bias.copy_(self._update(counted, bias, layer.top_k))
        self.forget()

    def forget(self) -> None:
        """Drop what was counted since the last step."""
        self.counts = [None] * len(self._layers)

    def _counted(self, index: int) -> torch.Tensor:
        counts, layer = self.counts[index], self._layers[index]
        if counts is None:  # a rank without tokens takes part too
            bias = layer.gate.e_score_correction_bias
            counts = self._count(bias.new_zeros(0, len(bias)), bias, layer.top_k)
        return counts

    def _count(self, scores_TE: torch.Tensor, bias_E: torch.Tensor, top_k: int) -> torch.Tensor:
        """Integer counts of one forward, which add up."""
        raise NotImplementedError

    def _update(self, counts: torch.Tensor, bias_E: torch.Tensor, top_k: int) -> torch.Tensor:
        """Next bias."""
        raise NotImplementedError

    def _observer(self, index: int) -> Callable[[torch.Tensor], None]:
        layer = self._layers[index]

        def add(scores_TE: torch.Tensor) -> None:
            if not torch.is_grad_enabled():
                return
            counts = self._count(scores_TE, layer.gate.e_score_correction_bias, layer.top_k)
            before = self.counts[index]
            self.counts[index] = counts if before is None else before + counts

        return add


class QuantileBalancer(Balancer):
    """Quantile Balancing (K3 report §2.3.3): histograms [E, B] of required biases, and no step size."""

    def _count(self, scores_TE: torch.Tensor, bias_E: torch.Tensor, top_k: int) -> torch.Tensor:
        return qb_histogram(scores_TE, bias_E, top_k)

    def _update(self, counts: torch.Tensor, bias_E: torch.Tensor, top_k: int) -> torch.Tensor:
        return qb_update(counts, bias_E, top_k)


class LoadQuantileBalancer(Balancer):
    """The plain rule on loads [E], for comparison: a fixed step down above one quantile, up below another."""

    def __init__(self, layers: Sequence[SparseMoE], step: float = 1e-2, low: float = 0.25, high: float = 0.75) -> None:
        super().__init__(layers)
        self._step, self._low, self._high = step, low, high

    def _count(self, scores_TE: torch.Tensor, bias_E: torch.Tensor, top_k: int) -> torch.Tensor:
        return expert_load(route(scores_TE, bias_E, top_k)[0], scores_TE.shape[1])

    def _update(self, counts: torch.Tensor, bias_E: torch.Tensor, top_k: int) -> torch.Tensor:
        return load_quantile_update(counts, bias_E, self._step, self._low, self._high)


BALANCERS: dict[str, type[Balancer] | None] = {
    "none": None,
    "quantile": QuantileBalancer,
    "load_quantile": LoadQuantileBalancer,
}
"""By their name in a configuration."""
