"""Metrics are pooled, never averaged twice."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.metrics import Max, Mean, Metrics, Sum


def test_b10_ranks_with_different_token_counts_are_pooled() -> None:
    merged = Metrics.merge([Metrics({"r": Mean(3.0, 12)}), Metrics({"r": Mean(3.0, 4)})])
    assert merged["r"] == 0.375


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=40), st.data())
def test_a_mean_does_not_depend_on_how_the_observations_were_sharded(values: list[int], data: st.DataObject) -> None:
    owner = [data.draw(st.integers(0, 3)) for _ in values]
    shards = [Metrics() for _ in range(4)]
    for value, rank in zip(values, owner, strict=True):
        shards[rank].mean("x", value)
        shards[rank].max("top", value)
        shards[rank].sum("all", value)
    merged = Metrics.merge(shards)
    assert merged["x"] == sum(values) / len(values)
    assert merged["top"] == max(values)
    assert merged["all"] == sum(values)


def test_a_mean_over_nothing_is_absent_and_not_zero() -> None:
    assert Metrics({"kl": Mean(0.0, 0)}).scalars() == {}


def test_a_nan_is_never_hidden_by_a_larger_number() -> None:
    assert math.isnan((Max(math.nan) + Max(5.0)).value)
    assert math.isnan((Max(5.0) + Max(math.nan)).value)


def test_two_kinds_under_one_name_are_refused() -> None:
    metrics = Metrics({"x": Sum(1.0)})
    with pytest.raises(TypeError, match="'x' is a Sum"):
        metrics.mean("x", 1.0)
