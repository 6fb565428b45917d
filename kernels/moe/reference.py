"""Routing, experts and Quantile Balancing of the latent mixture of experts.

Letters: T tokens, E experts, k experts per token, D latent width, F expert width, B histogram bins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_BINS = 1000
DENSE_WORK = 2**22
"""Up to this many multiplications by w1, all experts of all tokens cost less than the sorting and the small calls."""


def router_scores(inputs_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """Sigmoid scores [T, E], at least float32."""
    dtype = torch.promote_types(torch.float32, inputs_TD.dtype)
    return torch.sigmoid(inputs_TD.to(dtype) @ weight_ED.to(dtype).t())


def _top(biased_TE: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    # A stable sort, not topk: among equal scores the lowest index wins, on every device.
    values, ids = torch.sort(biased_TE, dim=-1, descending=True, stable=True)
    return values[:, :num], ids[:, :num]


def route(
    scores_TE: torch.Tensor, bias_E: torch.Tensor, top_k: int, replay_Tk: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids [T, k] int64 and their weights [T, k], which sum to one.

    The bias decides who is selected and nothing else. Rows of ``replay_Tk`` that are not -1 replace the selection; the
    weights always come from this model's own scores, so that the router gets its gradient.
    """
    if replay_Tk is not None and bool((replay_Tk >= 0).all()):
        ids_Tk = replay_Tk
    else:
        ids_Tk = _top(scores_TE.detach() + bias_E, top_k)[1]
        if replay_Tk is not None:
            ids_Tk = torch.where(replay_Tk >= 0, replay_Tk, ids_Tk)
    chosen_Tk = scores_TE.gather(-1, ids_Tk)
    return ids_Tk, chosen_Tk / (chosen_Tk.sum(-1, keepdim=True) + 1e-20)


def apply_experts(
    inputs_TD: torch.Tensor,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    w3_EFD: torch.Tensor,
    activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Sum over slots of ``weight * w2(activation(w1 x, w3 x))``, [T, D]; slots are added in order, in float32."""
    tokens = len(ids_Tk)
    if tokens * w1_EFD.numel() <= DENSE_WORK:
        gate_ETF, up_ETF = (inputs_TD @ w.transpose(1, 2) for w in (w1_EFD, w3_EFD))
        all_ETD = activation(gate_ETF, up_ETF) @ w2_EDF.transpose(1, 2)
        expert_TkD = all_ETD[ids_Tk, torch.arange(tokens, device=ids_Tk.device).unsqueeze(1)]
    else:
        expert_TkD = _sorted_experts(inputs_TD, ids_Tk, w1_EFD, w2_EDF, w3_EFD, activation)
    return combine_slots(weights_Tk, expert_TkD)


def combine_slots(weights_Tk: torch.Tensor, expert_TkD: torch.Tensor) -> torch.Tensor:
    """Weighted sum [T, D] of each slot's expert output, in the order of slots, in the precision of the weights."""
    total = weights_Tk[:, 0, None] * expert_TkD[:, 0]
    for slot in range(1, weights_Tk.shape[1]):
        total = total + weights_Tk[:, slot, None] * expert_TkD[:, slot]
    return total.to(expert_TkD.dtype)


def _sorted_experts(
    inputs_TD: torch.Tensor,
    ids_Tk: torch.Tensor,
    w1_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    w3_EFD: torch.Tensor,
    activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Each slot's expert output [T, k, D]; an expert computes the rows that chose it and no other."""
    tokens, top_k = ids_Tk.shape
    flat_M = ids_Tk.reshape(tokens * top_k)
    order_M = torch.argsort(flat_M, stable=True)
    counts = torch.bincount(flat_M, minlength=w1_EFD.shape[0]).tolist()
    rows = inputs_TD.index_select(0, order_M // top_k).split(counts)
    # One activation over all experts' rows: it is elementwise, and eight small calls cost far more than a large one.
    gate = torch.cat([x @ w.t() for x, w in zip(rows, w1_EFD.unbind(0), strict=True) if len(x)])
    up = torch.cat([x @ w.t() for x, w in zip(rows, w3_EFD.unbind(0), strict=True) if len(x)])
    middle = activation(gate, up).split(counts)
    outputs = [x @ w.t() for x, w in zip(middle, w2_EDF.unbind(0), strict=True) if len(x)]
    inverse_M = torch.empty_like(order_M)
    inverse_M[order_M] = torch.arange(len(order_M), device=order_M.device)
    return torch.cat(outputs).index_select(0, inverse_M).view(tokens, top_k, inputs_TD.shape[1])


def required_bias(scores_TE: torch.Tensor, bias_E: torch.Tensor, top_k: int) -> torch.Tensor:
    """Bias [T, E] at which a token would just select an expert: its cutoff (entry k + 1) minus its raw score."""
    cutoff_T = _top(scores_TE + bias_E, top_k + 1)[0][:, top_k]
    return cutoff_T.unsqueeze(-1) - scores_TE


def qb_histogram(scores_TE: torch.Tensor, bias_E: torch.Tensor, top_k: int, num_bins: int = NUM_BINS) -> torch.Tensor:
    """Counts [E, B] int64 of required biases over ``[bias.min() - 1, bias.max() + 1]``; counts of parts just add up."""
    low = bias_E.min() - 1
    width = (bias_E.max() - bias_E.min() + 2) / num_bins
    bins_TE = ((required_bias(scores_TE, bias_E, top_k) - low) / width).long().clamp(0, num_bins - 1)
    experts = scores_TE.shape[1]
    flat = bins_TE + torch.arange(experts, device=bins_TE.device) * num_bins
    return torch.bincount(flat.flatten(), minlength=experts * num_bins).view(experts, num_bins)


def qb_update(counts_EB: torch.Tensor, bias_E: torch.Tensor, top_k: int) -> torch.Tensor:
    """Next bias [E] from the step's histogram: the k/E-quantile of each expert's required bias, mean-centred."""
    experts, num_bins = counts_EB.shape
    low = bias_E.min() - 1
    width = (bias_E.max() - bias_E.min() + 2) / num_bins
    target = float(counts_EB[0].sum()) * top_k / experts
    cumulative_EB = counts_EB.cumsum(-1)
    first_E = (cumulative_EB < -(-target // 1)).sum(-1).clamp(max=num_bins - 1)
    inside_E = counts_EB.gather(-1, first_E.unsqueeze(-1)).squeeze(-1)
    before_E = cumulative_EB.gather(-1, first_E.unsqueeze(-1)).squeeze(-1) - inside_E
    fraction_E = ((target - before_E) / inside_E.clamp(min=1)).clamp(0, 1)
    bias = low + (first_E + fraction_E) * width
    return (bias - bias.mean()).to(bias_E.dtype)


def expert_load(ids_Tk: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Tokens that chose each expert, [E] int64; counts of parts just add up."""
    return torch.bincount(ids_Tk.flatten(), minlength=num_experts)


def load_quantile_update(
    load_E: torch.Tensor, bias_E: torch.Tensor, step: float, low: float = 0.25, high: float = 0.75
) -> torch.Tensor:
    """Next bias [E] by the plain rule that Quantile Balancing replaces, for comparison.

    Experts whose load is above the ``high`` quantile of all loads lose ``step``, those below the ``low`` quantile gain
    it; mean-centred. It knows by how many an expert is too loaded, not by how much, and needs many steps.
    """
    load = load_E.to(bias_E.dtype)
    bounds = torch.quantile(load, torch.tensor([low, high], dtype=load.dtype, device=load.device))
    moved = bias_E + step * ((load < bounds[0]).to(bias_E.dtype) - (load > bounds[1]).to(bias_E.dtype))
    return moved - moved.mean()


def qb_update_exact(scores_TE: torch.Tensor, bias_E: torch.Tensor, top_k: int) -> torch.Tensor:
    """What :func:`qb_update` estimates, from all the scores at once."""
    tokens, experts = scores_TE.shape
    rank = max(1, -(-tokens * top_k // experts))
    bias = required_bias(scores_TE, bias_E, top_k).sort(dim=0).values[rank - 1]
    return bias - bias.mean()
