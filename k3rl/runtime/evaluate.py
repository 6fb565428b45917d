"""``k3rl eval``: a checkpoint on held-out tasks."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from k3rl.config import to_dict
from k3rl.errors import CheckpointError
from k3rl.evaluation.report import EvaluationReport, report
from k3rl.observe.console import table
from k3rl.rollout.agent_loop import EpisodeSpec
from k3rl.rollout.chat_format import vocabulary_of
from k3rl.rollout.worker import RolloutWorker
from k3rl.runtime.checks import check_runnable
from k3rl.trajectory import Task, TrajectoryKey
from k3rl.weights.base import LocalWeights
from k3rl.weights.checkpoint import find_latest, load, load_latest

if TYPE_CHECKING:
    from pathlib import Path

    from k3rl.config import RunConfig


def evaluate_checkpoint(config: RunConfig, path: Path | None = None) -> dict[str, EvaluationReport]:
    """Evaluate sampled and greedy in this process, print a table and write ``eval.json`` beside the checkpoints.

    Raises CheckpointError when there is no good checkpoint, or when it is of another model.
    """
    check_runnable(config)
    model, vocabulary = to_dict(config.model), vocabulary_of(config)
    if path is not None:
        if (path / "checkpoints").is_dir():  # a run's folder: its last good one
            path = find_latest(path / "checkpoints")[0] or path
        checkpoint = load(path, model, vocabulary)
    else:
        loaded = load_latest(config.run_dir / "checkpoints", model, vocabulary)
        if loaded is None:
            raise CheckpointError(f"{config.run_dir / 'checkpoints'} holds no checkpoint; train first, or name one")
        checkpoint, path = loaded.checkpoint, loaded.path
    worker = RolloutWorker(config)
    worker.update_weights(LocalWeights(checkpoint.version, checkpoint.model))
    at = config.evaluation
    specs = [
        EpisodeSpec(
            key=TrajectoryKey(ordinal=i, sample=0),
            task=Task(environment=config.environment.id, split=at.split, index=i),
        )
        for i in range(at.num_tasks)
    ]
    reports, rows = {}, []
    for name, temperature in (("sampled", config.rollout.temperature), ("greedy", 0.0)):
        started = time.perf_counter()
        reports[name] = report(worker.rollout(specs, temperature, at.seed))
        rows.append({"decoding": name, **reports[name].row(), "s": round(time.perf_counter() - started, 1)})
    table(f"{path} on {config.environment.id}, split {at.split}", rows)
    out = config.run_dir / "eval.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps({"checkpoint": str(path), **{n: r.to_dict() for n, r in reports.items()}}, indent=1) + "\n"
    )
    print(f"written to {out}")
    return reports
