"""Experts spread over processes. Letters: T tokens, D width, F expert width, E experts, k per token, R ranks.

Each rank holds E / R consecutive experts of every layer and all of the rest, and runs tokens of its own. A token's row
goes to the ranks of its experts and comes back from each; what a slot gives is combined on the token's own rank, in the
order of slots, so that every rank has what one process alone would have. Gradients of the experts are whole where the
experts are; those of everything else are to be summed over the ranks, as in data parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from k3rl.errors import ConfigError
from k3rl.kernels.moe import apply_experts, combine_slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3rl.model.transformer import K3Model


def shard_experts(model: K3Model, group: dist.ProcessGroup) -> None:
    """Keep this rank's experts of ``model``, which all ranks have alike, and send rows to the others from now on.

    Every rank must run as many forwards and backwards as the others, each with at least one token. An optimiser is made
    afterwards, since parameters are replaced.

    Raises:
        ConfigError: the experts cannot be spread evenly.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    experts = model.config.num_experts
    if experts % ranks:
        raise ConfigError(f"model.num_experts: {experts} experts cannot be spread evenly over {ranks} ranks")
    share = experts // ranks
    for layer in model.moe_layers:
        for name, weight in list(layer.experts.named_parameters(recurse=False)):
            mine = weight.detach()[rank * share : (rank + 1) * share].clone()
            setattr(layer.experts, name, nn.Parameter(mine))
        layer.apply_experts = ExpertExchange(group)


def gather_experts(model: K3Model, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """The state of the whole model, on every rank: what a checkpoint holds."""
    state = dict(model.state_dict())
    for name in state:
        if name.split(".")[-2] == "experts":
            parts = [torch.empty_like(state[name]) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, state[name].contiguous(), group=group)
            state[name] = torch.cat(parts)
    return state


class ExpertExchange:
    """:func:`k3rl.kernels.moe.apply_experts` where the weights given are this rank's share of the experts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_world_size(group)

    def __call__(
        self,
        inputs_TD: torch.Tensor,
        ids_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
        w1_EFD: torch.Tensor,
        w2_EDF: torch.Tensor,
        w3_EFD: torch.Tensor,
        activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Combined expert outputs [T, D]."""
        tokens, top_k = ids_Tk.shape
        share = w1_EFD.shape[0]
        flat_M = ids_Tk.reshape(tokens * top_k)
        owner_M = flat_M // share
        order_M = torch.argsort(owner_M, stable=True)
        counts_R = torch.bincount(owner_M, minlength=self._ranks)
        sent = counts_R.tolist()
        got = self._exchange(counts_R, [1] * self._ranks, [1] * self._ranks).tolist()
        rows_MD = exchange_rows(inputs_TD.index_select(0, order_M // top_k), sent, got, self._group)
        ids_M1 = self._exchange((flat_M % share)[order_M], sent, got).unsqueeze(1)
        ones_M1 = torch.ones(ids_M1.shape, dtype=weights_Tk.dtype, device=weights_Tk.device)
        out_MD = apply_experts(rows_MD, ids_M1, ones_M1, w1_EFD, w2_EDF, w3_EFD, activation)
        back_MD = exchange_rows(out_MD, got, sent, self._group)
        inverse_M = torch.empty_like(order_M)
        inverse_M[order_M] = torch.arange(len(order_M), device=order_M.device)
        return combine_slots(weights_Tk, back_MD.index_select(0, inverse_M).view(tokens, top_k, inputs_TD.shape[1]))

    def _exchange(self, numbers: torch.Tensor, sent: list[int], got: list[int]) -> torch.Tensor:
        out = numbers.new_empty(sum(got))
        dist.all_to_all_single(out, numbers, got, sent, group=self._group)
        return out


def exchange_rows(rows_MX: torch.Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Send the first ``sent[0]`` rows to rank 0, the next ``sent[1]`` to rank 1, and so on; gradients come back.

    All ranks of ``group`` call it, and each must use what it gets, even if that is no row: its backward is a call too.

    Args:
        rows_MX: [sum(sent), X].
        sent: rows for each rank.
        got: rows from each rank, which are what that rank sends here.

    Returns:
        [sum(got), X], in the order of ranks.
    """
    return _Exchange.apply(rows_MX, sent, got, group)


class _Exchange(torch.autograd.Function):
    """Rows to the ranks that they are for; gradients go back the same way."""

    @staticmethod
    def forward(
        ctx: Any, rows_MD: torch.Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.got, ctx.group = sent, got, group
        out = rows_MD.new_empty(sum(got), rows_MD.shape[1])
        dist.all_to_all_single(out, rows_MD.contiguous(), got, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        back = grads[0].new_empty(sum(ctx.sent), grads[0].shape[1])
        dist.all_to_all_single(back, grads[0].contiguous(), ctx.sent, ctx.got, group=ctx.group)
        return back, None, None, None
