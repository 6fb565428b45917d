"""What the benchmarks measure holds on small sizes too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# In processes of their own: what other tests left on the heap would be filled or given back at any time.
WATCH = """
import torch
from k3rl.runtime.memory import watch_memory

before = torch.ones(40 * 2**20, dtype=torch.uint8)
with watch_memory(".safetensors") as peak:
    held = torch.ones(60 * 2**20, dtype=torch.uint8)
    for _ in range(20):
        held.add_(1)
print(peak.num_bytes)
"""
CONVERT = """
import dataclasses, json
from pathlib import Path
from k3rl.config import load_model_config
from k3rl.runtime.bench import convert_rows

nano = load_model_config(Path("configs/model/k3_nano.yaml"))
experts = {"num_experts": 64, "expert_dim": 512, "shared_dim": 512}
small = dataclasses.replace(nano, num_layers=3, mla_layers=(2,), vocab_size=4096, **experts)
print(json.dumps([row for measured in convert_rows(small, 64 * 2**20) for row in measured]))
"""


def _run(script: str) -> str:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout


def test_the_peak_of_memory_is_seen_and_nothing_that_was_there_before() -> None:
    assert 58 * 2**20 < int(_run(WATCH)) < 75 * 2**20


def test_converting_holds_two_files_and_one_layers_experts_at_most() -> None:
    rows = json.loads(_run(CONVERT))
    assert len(rows) == 3
    assert all(row["holds"] for row in rows), rows
