"""MLA, mixture of experts, attention residuals, SiTU and the output head."""

from __future__ import annotations

from typing import Any

import torch

from k3rl.kernels.attn_res import attn_res_mix
from k3rl.kernels.linear_logprob import linear_logprob
from k3rl.kernels.mla import mla_absorbed, mla_expanded
from k3rl.kernels.moe import (
    apply_experts,
    expert_load,
    load_quantile_update,
    qb_histogram,
    qb_update,
    qb_update_exact,
    route,
)
from k3rl.kernels.situ import situ_glu


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_absorbed_attention_equals_expanded_attention() -> None:
    q, latent, kv_b = _normal(3, 5, 2, 12), _normal(3, 9, 10, seed=1), _normal(2, 8 + 16, 6, seed=2)
    offsets = torch.tensor([0, 2, 4])
    args: Any = [x.requires_grad_() for x in (q, latent, kv_b)]
    a, b = (form(*args, key_dim=8, offsets_N=offsets) for form in (mla_absorbed, mla_expanded))
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), args) for x in (a, b)))


def test_attention_residual_equals_the_written_formula() -> None:
    sources = [_normal(4, 6, seed=i) for i in range(3)]
    norm, query = _normal(6, seed=8), _normal(6, seed=9)
    got = attn_res_mix(sources, norm, query, 1e-5)
    for t in range(4):
        scores = torch.stack([(s[t] / (s[t].square().mean() + 1e-5).sqrt() * norm * query).sum() for s in sources])
        want = sum(w * s[t] for w, s in zip(torch.softmax(scores, 0), sources, strict=True))
        torch.testing.assert_close(got[t], want)


def test_situ_has_its_closed_form_derivatives() -> None:
    a = torch.tensor([-3.0, 0.0, 0.5, 9.0], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([40.0, 2.0, -1.0, 30.0], dtype=torch.float64, requires_grad=True)
    da, db = torch.autograd.grad(situ_glu(a, b, 4.0, 25.0).sum(), (a, b))
    t1, s, t2 = torch.tanh(a / 4), torch.sigmoid(a), torch.tanh(b / 25)
    torch.testing.assert_close(da, ((1 - t1**2) * s + 4 * t1 * s * (1 - s)) * 25 * t2)
    torch.testing.assert_close(db, 4 * t1 * s * (1 - t2**2))
    assert situ_glu(torch.tensor([1e4]), torch.tensor([1e4]), 4.0, 25.0).item() == 100.0


def test_ties_go_to_the_lowest_index_and_the_bias_only_selects() -> None:
    ids, weights = route(torch.full((1, 6), 0.5), torch.tensor([0.0, 0, 0, 0, 0, 9.0]), 3)
    assert ids.tolist() == [[5, 0, 1]]
    torch.testing.assert_close(weights, torch.full((1, 3), 1 / 3))


def test_experts_equal_a_loop_over_tokens_and_slots() -> None:
    x, w1, w2, w3 = _normal(7, 4), _normal(5, 3, 4, seed=1), _normal(5, 4, 3, seed=2), _normal(5, 3, 4, seed=3)
    ids, weights = route(torch.sigmoid(_normal(7, 5, seed=4)), torch.zeros(5), 2)
    got = apply_experts(x, ids, weights, w1, w2, w3, lambda a, b: a * b)
    for t in range(7):
        want = sum(p * (w2[e] @ ((w1[e] @ x[t]) * (w3[e] @ x[t]))) for e, p in zip(ids[t], weights[t], strict=True))
        torch.testing.assert_close(got[t], want)


def test_one_quantile_update_balances_a_skewed_load() -> None:
    experts, top_k, tokens = 896, 16, 16384
    generator = torch.Generator().manual_seed(0)
    skew = torch.randn(experts, generator=generator)
    scores = torch.sigmoid(1.5 * torch.randn(tokens, experts, generator=generator) + skew)
    bias = torch.zeros(experts)

    def imbalance(at: torch.Tensor) -> float:
        load = torch.bincount((scores + at).topk(top_k, -1).indices.flatten(), minlength=experts).double()
        return float(load.max() / load.mean())

    counts = torch.stack([qb_histogram(part, bias, top_k) for part in scores.split(6000)]).sum(0)
    assert torch.equal(counts, qb_histogram(scores, bias, top_k))
    updated = qb_update(counts, bias, top_k)
    assert imbalance(bias) > 20
    assert imbalance(updated) < 1.5
    exact = qb_update_exact(scores, bias, top_k)
    assert float((updated - exact).abs().max()) <= 2 * 2 / 1000


def test_the_plain_rule_moves_a_fixed_step_by_quantiles_of_the_load_and_stays_centred() -> None:
    load = torch.tensor([0, 10, 20, 30, 400])
    bias = torch.tensor([0.3, 0.0, -0.1, 0.0, -0.2])
    moved = load_quantile_update(load, bias, step=0.1)
    # quantiles 10 and 30: one expert below, one above, and those on the bounds stay
    torch.testing.assert_close(moved, torch.tensor([0.4, 0.0, -0.1, 0.0, -0.3]))
    assert abs(float(load_quantile_update(load, bias, 0.1, low=0.0, high=0.9).mean())) < 1e-7
    even = torch.full((5,), 7)
    torch.testing.assert_close(load_quantile_update(even, bias, 0.1), bias - bias.mean())


def test_loads_of_parts_add_up() -> None:
    ids = torch.randint(0, 5, (40, 3), generator=torch.Generator().manual_seed(0))
    parts = torch.stack([expert_load(part, 5) for part in ids.split(7)]).sum(0)
    assert torch.equal(parts, expert_load(ids, 5))
    assert int(parts.sum()) == 120


def test_linear_logprob_equals_log_softmax_at_a_temperature() -> None:
    hidden, weight, targets = _normal(5, 4), _normal(9, 4, seed=1), torch.tensor([0, 8, 3, 3, 1])
    logprob, entropy, lse = linear_logprob(hidden, weight, targets, 0.7)
    want = torch.log_softmax(hidden @ weight.t() / 0.7, -1)
    torch.testing.assert_close(logprob, want[torch.arange(5), targets])
    torch.testing.assert_close(entropy, -(want.exp() * want).sum(-1))
    torch.testing.assert_close(lse, torch.logsumexp(hidden @ weight.t() / 0.7, -1))
