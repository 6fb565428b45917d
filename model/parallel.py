"""A model spread over processes. Letters: T tokens, D width, F expert width, E experts, k per token, R ranks.

Each layer names beside its parameters how they are cut (:class:`k3rl.model.layers.Placement`); this module cuts them,
lets the ranks compute together what one would, and puts them together again.

Experts: each rank holds E / R consecutive experts of every layer and all of the rest, and runs tokens of its own. A
token's row goes to the ranks of its experts and comes back from each; what a slot gives is combined on the token's own
rank, in the order of slots, so that every rank has what one process alone would have.

Tensors: each rank holds some heads of every mixer and some channels of every dense feed-forward, and runs the same
tokens. What they give is summed over the ranks.

Tokens of one sequence on several ranks are :mod:`k3rl.model.context`, layers are :mod:`k3rl.model.pipeline`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from k3rl.errors import ConfigError
from k3rl.kernels.moe import apply_experts, combine_slots
from k3rl.model.kda import KdaMixer
from k3rl.model.layers import FeedForward
from k3rl.model.mla import MlaMixer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from k3rl.model.layers import Placement
    from k3rl.model.transformer import K3Model

Axis = Literal["tensor", "expert"]


def placements(model: nn.Module) -> dict[str, Placement]:
    """How each parameter is cut, by name. LookupError: a layer does not say so of a parameter."""
    modules = dict(model.named_modules())
    found: dict[str, Placement] = {}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        for end in reversed(range(len(parts))):
            table = getattr(modules[".".join(parts[:end])], "placements", {})
            if (own := ".".join(parts[end:])) in table:
                found[name] = table[own]
                break
        else:
            raise LookupError(f"no layer says in its placements how {name} is cut")
    return found


def shard_experts(model: K3Model, group: dist.ProcessGroup) -> None:
    """Keep this rank's experts of ``model``, which all ranks have alike, and send rows to the others from now on.

    Every rank must run as many forwards and backwards as the others, each with at least one token. An optimiser is made
    afterwards, since parameters are replaced.

    Raises:
        ConfigError: the experts cannot be spread evenly.
    """
    ranks, experts = dist.get_world_size(group), model.config.num_experts
    if experts % ranks:
        raise ConfigError(f"model.num_experts: {experts} experts cannot be spread evenly over {ranks} ranks")
    _cut(model, "expert", group)
    for layer in model.moe_layers:
        layer.apply_experts = ExpertExchange(group)


def shard_tensors(model: K3Model, group: dist.ProcessGroup) -> None:
    """Keep this rank's heads and channels of ``model``, which all ranks have alike.

    All ranks run the same tokens, without a cache or over a :class:`k3rl.model.context.ContextShare`. Embedding, head,
    routers and routed experts stay whole. An optimiser is made afterwards, since parameters are replaced.

    Raises:
        ConfigError: heads or channels cannot be spread evenly.
    """
    ranks, c = dist.get_world_size(group), model.config
    for key in ("num_heads", "dense_dim", "shared_dim"):
        if getattr(c, key) % ranks:
            raise ConfigError(f"model.{key}: {getattr(c, key)} cannot be spread evenly over {ranks} ranks")
    _cut(model, "tensor", group)
    for module in model.modules():
        if isinstance(module, KdaMixer | MlaMixer):
            module.heads //= ranks
        if isinstance(module, _CUT_LAYERS):
            module.register_forward_pre_hook(lambda _, args: (_Copy.apply(args[0], group), *args[1:]))
            module.register_forward_hook(lambda _, args, out: _Sum.apply(out, group))


_CUT_LAYERS = (KdaMixer, MlaMixer, FeedForward)


def _cut(model: K3Model, axis: Axis, group: dist.ProcessGroup) -> None:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    for name, placement in placements(model).items():
        dim = getattr(placement, axis)
        if dim is not None:
            owner, _, own = name.rpartition(".")
            mine = model.get_parameter(name).detach().chunk(ranks, dim)[rank].clone()
            setattr(model.get_submodule(owner), own, nn.Parameter(mine))


def gather_state(model: K3Model, groups: Mapping[Axis, dist.ProcessGroup]) -> dict[str, torch.Tensor]:
    """The state of the whole model, on every rank: what a checkpoint holds. ``groups`` are those it was cut over."""
    state = dict(model.state_dict())
    for name, placement in placements(model).items():
        for axis, group in groups.items():
            dim = getattr(placement, axis)
            if dim is not None:
                parts = [torch.empty_like(state[name]) for _ in range(dist.get_world_size(group))]
                dist.all_gather(parts, state[name].contiguous(), group=group)
                state[name] = torch.cat(parts, dim)
    return state


def sum_gradients(
    model: K3Model, *, tokens: dist.ProcessGroup | None = None, tensor: dist.ProcessGroup | None = None
) -> None:
    """Make gradients those of one process, once all backwards are done: each sum is taken once.

    A parameter that a loss reads on one rank it reads on all; those without a gradient are left out.

    Args:
        tokens: ranks that ran different tokens of one loss. Experts that are cut have their whole gradient already;
            they are cut over this group.
        tensor: ranks of :func:`shard_tensors`. Inside of the layers that are cut, what is whole has only seen this
            rank's heads; everything else has its gradient.
    """
    plan = {n: p for n, p in placements(model).items() if model.get_parameter(n).grad is not None}
    if tensor is not None:
        inside = {f"{n}.{own}" for n, x in model.named_modules() if isinstance(x, _CUT_LAYERS) for own in x.placements}
        _sum_over(model, [n for n, p in plan.items() if n in inside and p.tensor is None], tensor)
    if tokens is not None:
        cut_experts = any(isinstance(layer.apply_experts, ExpertExchange) for layer in model.moe_layers)
        _sum_over(model, [n for n, p in plan.items() if p.expert is None or not cut_experts], tokens)


def _sum_over(model: K3Model, names: list[str], group: dist.ProcessGroup) -> None:
    # All at once: one after the other, small ones would mostly wait.
    works = [dist.all_reduce(model.get_parameter(name).grad, group=group, async_op=True) for name in names]
    for work in works:
        assert work is not None  # this rank is of the group
        work.wait()


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


class _Copy(torch.autograd.Function):
    """What ranks read alike; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """The sum of what ranks give; all of them have its gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = part.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None
