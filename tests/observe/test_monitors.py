"""Monitors add up over forward passes before anything is divided."""

from __future__ import annotations

import math

import pytest
import torch

from k3rl.observe.monitors import policy_metrics


def _stats(load: list[list[int]], entropy: list[float], tokens: int) -> dict[str, torch.Tensor]:
    return {
        "moe_load": torch.tensor(load),
        "moe_routing_entropy": torch.tensor(entropy),
        "tokens": torch.tensor(tokens),
    }


def test_the_numbers_are_those_of_the_summed_loads() -> None:
    # Two layers of four experts, one expert per token: 8 tokens in two passes.
    parts = [_stats([[2, 0, 0, 0], [1, 1, 0, 0]], [1.0, 2.0], 2), _stats([[2, 4, 0, 0], [1, 1, 2, 2]], [5.0, 4.0], 6)]
    found = policy_metrics(parts).scalars()
    # loads are [4, 4, 0, 0] and [2, 2, 2, 2]
    assert found["moe/load_max_over_mean"] == 2.0
    assert found["moe/load_cv"] == pytest.approx((1.0 + 0.0) / 2)
    assert found["moe/idle_frac"] == pytest.approx(2 / 8)
    assert found["moe/utilisation_entropy"] == pytest.approx((math.log(2) / math.log(4) + 1.0) / 2)
    assert found["moe/routing_entropy"] == pytest.approx((1.0 + 2.0 + 5.0 + 4.0) / (8 * 2))


def test_a_model_without_experts_has_no_such_metric() -> None:
    assert policy_metrics([{}, {}]).scalars() == {}
    assert policy_metrics([]).scalars() == {}
