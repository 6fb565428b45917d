"""``k3rl bench SUBJECT``: measure, and write what was measured to ``benchmarks/results/``.

Documentation quotes these files and nothing else; a row that was not run is absent.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from k3rl.config import ModelConfig, load_config, load_model_config
from k3rl.errors import ConfigError, suggest
from k3rl.model.pretrained import ExpertFormat, convert, save_pretrained
from k3rl.model.transformer import K3Model
from k3rl.observe.console import table
from k3rl.runtime.job import run_job
from k3rl.runtime.memory import watch_memory

RESULTS = Path("benchmarks/results")
DEMO_SEEDS = (0, 1, 2)


def bench(subject: str) -> Path:
    """Run the benchmark called ``subject`` from the repository's root; return the file of its results."""
    subjects = {"demo": _bench_demo, "model_convert": _bench_model_convert}
    if subject not in subjects:
        raise ConfigError(f"no benchmark {subject!r}; there are {', '.join(subjects)}.{suggest(subject, subjects)}")
    started = datetime.datetime.now(datetime.UTC)
    path = RESULTS / f"{started:%Y-%m-%d}_cpu{os.cpu_count()}_{subject}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"command": f"k3rl bench {subject}", "started": f"{started:%Y-%m-%dT%H:%M:%SZ}"}
    result: dict[str, Any] = {**head, "environment": environment(), "rows": []}
    rows: list[dict[str, Any]] = result["rows"]
    for measured in subjects[subject]():
        # Written as it grows: what was measured before an interruption is kept.
        rows += measured
        path.write_text(json.dumps(result, indent=1) + "\n")
    table(subject, [{k: row[k] for k in ("what", "shape", "ours", "baseline", "goal", "holds")} for row in rows])
    print(f"written to {path}")
    return path


def environment() -> dict[str, Any]:
    """What the figures were measured on."""
    versions = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    commit, changes = (
        subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=False).stdout.strip()
        for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    )
    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": _driver(),
        "torch": versions.get("torch"),
        "triton": versions.get("triton"),
        "ray": versions.get("ray"),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "commit": commit or None,
        "uncommitted_changes": bool(changes),
    }


def _driver() -> str | None:
    """Version of the GPU's driver, where there is one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.splitlines()
    return lines[0].strip() if lines else None


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _bench_demo() -> Iterator[list[dict[str, Any]]]:
    """The demo with three seeds: RL against what SFT reached, and against SFT for RL's time."""
    for seed in DEMO_SEEDS:
        name = f"bench-demo-seed{seed}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        summary = run_job(load_config("configs/demo.yaml", [f"seed={seed}", f"name={name}"]))
        yield _demo_rows(summary, f"seed {seed}")


def _bench_model_convert() -> Iterator[list[dict[str, Any]]]:
    """Peak memory of rewriting a checkpoint of 2.3 GiB in files of 512 MiB."""
    small = dataclasses.replace(
        load_model_config(Path("configs/model/k3_nano.yaml")),
        num_layers=6,
        mla_layers=(3, 5),
        vocab_size=16384,
        num_experts=64,
        expert_dim=1024,
        shared_dim=1024,
    )
    yield from convert_rows(small, 512 * 2**20)


def convert_rows(config: ModelConfig, shard_bytes: int) -> Iterator[list[dict[str, Any]]]:
    """Convert a random model there and back; at most two files and one layer's experts may be held at a time."""
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        save_pretrained(K3Model(config), at / "plain", max_shard_bytes=shard_bytes)
        layer = 3 * 4 * config.num_experts * config.expert_dim * (config.latent_dim or config.hidden_size)
        goal = (2 * shard_bytes + layer) / 2**20
        ways: tuple[tuple[str, str, ExpertFormat], ...]
        ways = (("plain", "copy", "plain"), ("plain", "packed", "mxfp4"), ("packed", "unpacked", "plain"))
        for source, target, experts in ways:
            with watch_memory(".safetensors") as peak:
                convert(at / source, at / target, experts=experts, max_shard_bytes=shard_bytes)
            shape = f"{source} to {target}, files of {shard_bytes / 2**20:g} MiB"
            yield [_row("peak memory of convert", peak.num_bytes / 2**20, goal, "MiB", shape=shape, at_most=True)]


def _row(
    what: str, ours: float, goal: float, unit: str, *, shape: str, at_most: bool = False, **other: Any
) -> dict[str, Any]:
    holds = ours <= goal if at_most else ours >= goal
    fields = {"baseline": None, "baseline_name": None, "floor": None, **other}
    return {"what": what, "shape": shape, "ours": ours, **fields, "goal": goal, "unit": unit, "holds": holds}


def _demo_rows(summary: dict[str, Any], shape: str) -> list[dict[str, Any]]:
    row = functools.partial(_row, shape=shape)
    after_sft, after_rl, sft_only = (summary[f"success_{n}"] for n in ("after_sft", "after_rl", "sft_only"))
    return [
        row("held-out success after RL", after_rl, 0.85, "share", baseline=after_sft, baseline_name="after SFT"),
        row("gain of RL over SFT", after_rl - after_sft, 0.25, "share"),
        row("gain over SFT for RL's time", after_rl - sft_only, 0.25, "share", baseline=sft_only, baseline_name="SFT"),
        row("greedy success after RL", summary["success_after_rl_greedy"], 0.85, "share"),
        row("largest logprob gap", summary["max_logprob_gap"], 1e-4, "nats", at_most=True),
        row("time after set-up", summary["total_s"] - summary["setup_s"], 480.0, "s", at_most=True),
    ]
