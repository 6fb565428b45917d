"""``k3rl train --dry-run``: what a configuration means, before anything starts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
import yaml

from k3rl.config import to_dict
from k3rl.learner.worker import LearnerWorker, phases_of
from k3rl.model.config import cache_bytes, count_parameters
from k3rl.observe.console import table
from k3rl.rollout.agent_loop import EpisodeSpec
from k3rl.rollout.worker import RolloutWorker
from k3rl.runtime.checks import check_objective, check_runnable, check_source, check_trains
from k3rl.trajectory import Task, TrajectoryKey

if TYPE_CHECKING:
    from k3rl.config import RunConfig

MAX_PROBED_PARAMETERS = 20_000_000
"""Larger models are not built for a dry run; their time is not estimated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Memory in bytes and, when the model was small enough to probe, seconds per step."""

    parameters: int
    active_parameters: int
    learner_bytes: int
    cache_bytes: int
    sft_step_s: float | None = None
    rl_step_s: float | None = None


def print_plan(config: RunConfig) -> Estimate:
    """Print the resolved configuration, the objective and the estimate. Raises ConfigError for what cannot run."""
    check_trains(config)
    formula = check_objective(config)
    check_runnable(config)
    check_source(config)
    print(yaml.safe_dump(to_dict(config), sort_keys=False, default_flow_style=None, width=120))
    print(formula)
    estimate = _estimate(config)
    row: dict[str, object] = {
        "parameters": f"{estimate.parameters:,}",
        "active": f"{estimate.active_parameters:,}",
        "learner state": f"{estimate.learner_bytes / 2**20:.1f} MiB",
        "caches of a worker": f"{estimate.cache_bytes / 2**20:.1f} MiB",
    }
    if estimate.sft_step_s is not None and estimate.rl_step_s is not None:
        total_s = config.sft.max_steps * estimate.sft_step_s + config.steps * estimate.rl_step_s
        row |= {
            "SFT step": f"{estimate.sft_step_s:.2f} s",
            "RL step": f"{estimate.rl_step_s:.2f} s",
            "at most, without evaluation": f"{total_s / 60:.1f} min",
        }
    table("Estimate (times: one step probed on this machine)", [row])
    return estimate


def _estimate(config: RunConfig) -> Estimate:
    total, active = count_parameters(config.model)
    episodes = config.rollout.groups_per_step * config.rollout.group_size // config.rollout.num_workers
    cache = cache_bytes(config.model, config.environment.max_episode_tokens, element_bytes=4)
    needs_reference = phases_of(config)["rl"].objective.needs_reference
    sizes = {
        "parameters": total,
        "active_parameters": active,
        # Weights and gradients in fp32, one (Muon) or two (AdamW) moments, and perhaps the weights of a reference.
        "learner_bytes": 4 * total * ((3 if config.learner.optimizer.name == "muon" else 4) + needs_reference),
        "cache_bytes": episodes * cache,
    }
    if total > MAX_PROBED_PARAMETERS:
        return Estimate(**sizes)
    sft_s, rl_s = _probe(config)
    return Estimate(**sizes, sft_step_s=sft_s, rl_step_s=rl_s)


def _probe(config: RunConfig) -> tuple[float, float]:
    """Seconds of one SFT step and one RL step, each from one share of the work played in this process."""
    torch.set_num_threads(config.learner.threads)
    learner, worker = LearnerWorker(config), RolloutWorker(config)
    worker.update_weights(learner.weights(0, 0))

    def specs(n: int) -> list[EpisodeSpec]:
        task = Task(environment=config.environment.id, split="train", index=0)
        return [EpisodeSpec(key=TrajectoryKey(ordinal=i, sample=0), task=task) for i in range(n)]

    started = time.perf_counter()
    with TemporaryDirectory() as folder:
        learner.update(worker.demonstrate(specs(config.sft.batch_size), Path(folder)), Path(folder))
    sft_s = time.perf_counter() - started
    episodes = config.rollout.groups_per_step * config.rollout.group_size
    started = time.perf_counter()
    worker.rollout(specs(max(1, episodes // config.rollout.num_workers)), config.rollout.temperature, config.seed)
    rollout_s = time.perf_counter() - started
    # A batch of RL costs two passes like a batch of SFT costs one; tokens an episode are about the same.
    return sft_s, rollout_s + 1.4 * sft_s * episodes / config.sft.batch_size
