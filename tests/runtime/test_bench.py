"""What the benchmarks measure holds on small sizes too."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from k3rl.config import load_model_config
from k3rl.runtime.bench import convert_rows
from k3rl.runtime.memory import watch_memory

ROOT = Path(__file__).parents[2]


def test_the_peak_of_memory_is_seen_and_nothing_that_was_there_before() -> None:
    before = torch.ones(40 * 2**20, dtype=torch.uint8)
    with watch_memory(".safetensors") as peak:
        held = torch.ones(60 * 2**20, dtype=torch.uint8)
        for _ in range(20):
            held.add_(1)
    assert 58 * 2**20 < peak.num_bytes < 75 * 2**20
    assert before.sum() == len(before)


def test_converting_holds_two_files_and_one_layers_experts_at_most() -> None:
    config = dataclasses.replace(
        load_model_config(ROOT / "configs/model/k3_nano.yaml"),
        num_layers=4,
        mla_layers=(3,),
        vocab_size=4096,
        num_experts=32,
        shared_dim=512,
    )
    rows = [row for measured in convert_rows(config, 32 * 2**20) for row in measured]
    assert len(rows) == 3
    assert all(row["holds"] for row in rows), rows
