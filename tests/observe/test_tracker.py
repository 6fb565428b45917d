"""Metrics reach the disk as they are: absent stays absent, NaN stays visible."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest

from k3rl.metrics import Mean, Metrics
from k3rl.observe.tracker import MetricsWriter, read_metrics


def test_rows_hold_final_numbers_and_non_finite_ones_as_strings_of_valid_json(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, Metrics({"loss": Mean(3.0, 12), "reward": Mean(0.0, 0)}))
        writer.write(2, {"loss": math.nan, "norm": math.inf, "low": -math.inf})
    one, two = read_metrics(tmp_path / "metrics.jsonl")
    assert (one["loss"], "reward" in one) == (0.25, False)
    assert (two["loss"], two["norm"], two["low"]) == ("nan", "inf", "-inf")

    def refuse(name: str) -> None:
        raise AssertionError(name)

    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_a_step_taken_again_after_a_crash_counts_once_and_a_torn_line_is_cut(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"loss": 1.0})
        writer.write(2, {"loss": 2.0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(2, {"loss": 2.5})
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path / "metrics.jsonl")] == [(1, 1.0), (2, 2.5)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_the_same_numbers(tmp_path: Path) -> None:
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"train/loss": 0.5})
    writer.write(2, {"train/loss": 0.25, "odd": math.nan})
    writer.flush()
    writer.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.25)]
