"""``k3rl doctor``: can this machine, this configuration and its environment work together?"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from k3rl.errors import RewardError
from k3rl.observe.console import table
from k3rl.rollout.agent_loop import EpisodeSpec
from k3rl.rollout.worker import RolloutWorker
from k3rl.runtime.checks import check_first_task, check_objective, check_vocabulary
from k3rl.trajectory import Task, TrajectoryKey

if TYPE_CHECKING:
    from k3rl.config import RunConfig


def examine(config: RunConfig) -> bool:
    """Run every check, print one row each, and return whether all of them passed."""
    checks: dict[str, Callable[[RunConfig], str]] = {
        "python and libraries": _libraries,
        "devices": _devices,
        "run folder": _run_folder,
        "objective": lambda c: check_objective(c).splitlines()[0],
        "environment": _environment,
        "chat format": check_vocabulary,
        "first task": check_first_task,
        "rewards": _rewards,
    }
    rows = []
    for name, check in checks.items():
        try:
            rows.append({"check": name, "result": "ok", "detail": check(config)})
        except Exception as error:  # whatever is wrong with a part, say so and look at the next one
            rows.append({"check": name, "result": "FAILED", "detail": f"{type(error).__name__}: {error}"})
    table(f"k3rl doctor: {config.name}", rows)
    return all(row["result"] == "ok" for row in rows)


def _libraries(_: RunConfig) -> str:
    found = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "ray", "gymnasium", "omegaconf")]
    return f"Python {sys.version.split()[0]}, {', '.join(found)}"


def _devices(_: RunConfig) -> str:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{os.cpu_count()} CPU cores, {', '.join(gpus) if gpus else 'no GPU'}"


def _run_folder(config: RunConfig) -> str:
    parent = config.run_dir
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        raise PermissionError(f"cannot write below {parent}")
    return f"{config.run_dir}, {shutil.disk_usage(parent).free / 2**30:.0f} GiB free"


def _environment(config: RunConfig) -> str:
    from k3rl.envs.checks import check_environment

    check_environment(config.environment.id, **config.environment.options)
    return f"{config.environment.id}: gymnasium's checks, determinism, the expert solves it, splits are disjoint"


def _rewards(config: RunConfig) -> str:
    """Score two demonstrations."""
    task = Task(environment=config.environment.id, split="train", index=0)
    specs = [EpisodeSpec(key=TrajectoryKey(ordinal=i, sample=0), task=replace(task, index=i)) for i in range(2)]
    summaries = RolloutWorker(config).demonstrate(specs)
    for summary in summaries:
        for text in summary.reward_errors.values():
            raise RewardError(text)
    values = {name: [s.rewards[name] for s in summaries] for name in config.rewards}
    return ", ".join(f"{name} {value}" for name, value in values.items()) + " on two demonstrations"
