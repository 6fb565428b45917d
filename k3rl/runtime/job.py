"""A job from its configuration to its summary: the run folder, who may use it, and what may change on a resume."""

from __future__ import annotations

import dataclasses
import json
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from k3rl.config import JobConfig, SftJobConfig, from_dict, to_dict
from k3rl.errors import ConfigError
from k3rl.observe.tracker import write_whole
from k3rl.runtime.checks import check_runnable, check_source, check_trains
from k3rl.runtime.cluster import ray_session
from k3rl.runtime.controller import Controller
from k3rl.weights.lock import lock_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from k3rl.config import RunConfig

Job = TypeVar("Job", bound=JobConfig)
CUTTING = (
    "learner.micro_batch_tokens",
    "learner.threads",
    "rollout.num_workers",
    "rollout.threads_per_worker",
    "rollout.max_failed_frac",
)
"""Keys that say how the work is cut and what is put up with: results are the same but for rounding."""


def run_job(config: RunConfig, *, resume: bool = False) -> dict[str, Any]:
    """Run a job of ``k3rl train`` to its end and return its summary (also written to ``summary.json``).

    Raises ConfigError before anything is started or changed; after any other error the run can be resumed.
    """
    config = with_absolute_paths(config)
    started = time.perf_counter()

    def check() -> None:
        check_trains(config)
        check_runnable(config)
        check_source(config)

    with open_run(config, resume=resume, check=check) as summary:
        if summary is not None:
            return summary
        with ray_session(config):
            controller = Controller(config)
            try:
                controller.start()
                controller.progress.spend("setup", started)
                return controller.run()
            finally:
                controller.close()


def with_absolute_paths(config: Job) -> Job:
    """Paths that mean the same in any working directory: actors have their own."""
    options = dict(config.chat_options)
    if "wording" in options:
        options["wording"] = str(Path(options["wording"]).resolve())
    made = config.tokenizer in ("tiny", "bytes")
    return dataclasses.replace(
        config,
        run_root=str(Path(config.run_root).resolve()),
        tokenizer=config.tokenizer if made else str(Path(config.tokenizer).resolve()),
        init_from=None if config.init_from is None else str(Path(config.init_from).resolve()),
        chat_options=options,
    )


@contextmanager
def open_run(
    config: RunConfig | SftJobConfig, *, resume: bool, check: Callable[[], None]
) -> Iterator[dict[str, Any] | None]:
    """Lock the job's folder and write its ``config.json``; gives the summary of a job with nothing left to do.

    Raises:
        ConfigError: the folder holds another run, or none to resume; or what ``check`` finds, before anything changes.
    """
    run_dir = config.run_dir
    config_path, summary_path = run_dir / "config.json", run_dir / "summary.json"
    if resume and not config_path.exists():
        raise ConfigError(f"nothing to resume: {run_dir} holds no run")
    check()
    with lock_folder(run_dir):
        if resume:
            old = from_dict(json.loads(config_path.read_text()))
            refuse_another_run(config, old)
            if summary_path.exists() and config.steps == old.steps:
                print(f"{run_dir} is finished; give it more steps, or read {summary_path}")
                yield json.loads(summary_path.read_text())
                return
        elif config_path.exists():
            way = "an interrupted run: go on with --resume"
            if summary_path.exists():
                way = "a finished run: read summary.json, give it more steps and --resume"
            raise ConfigError(f"run folder {run_dir} holds {way}, or choose another name=")
        summary_path.unlink(missing_ok=True)
        write_whole(config_path, json.dumps(to_dict(config), indent=1) + "\n")
        yield None


def refuse_another_run(config: RunConfig | SftJobConfig, old: RunConfig | SftJobConfig) -> None:
    """A resumed run may be longer, wait longer, save more often or cut its work otherwise; it may not be another run.

    Stages may be added behind those that there were.
    """
    if type(config) is not type(old):
        there = "sft" if isinstance(old, SftJobConfig) else "train"
        raise ConfigError(f"{config.run_dir} holds a job of k3rl {there}; choose another name=")
    free = {"steps", "checkpoint_every", "checkpoints_kept", "eval_every", "run_root", "name", *CUTTING}
    before, now = _leaves(to_dict(old)), _leaves(to_dict(config))
    if isinstance(config, SftJobConfig) and isinstance(old, SftJobConfig):
        stages, had = list(config.stages), list(old.stages)
        if stages[: len(had)] != had:
            raise ConfigError(f"{config.run_dir} was started with stages {', '.join(had)}; add others behind them")
        free |= {key for key in now for stage in stages[len(had) :] if key.startswith(f"stages.{stage}.")}
    changed = sorted(
        key
        for key in before.keys() | now.keys()
        if before.get(key) != now.get(key) and key not in free and not key.endswith("timeout_s")
    )
    if changed:
        raise ConfigError(f"{config.run_dir} was started with another {', '.join(changed)}; choose another name=")


def _leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out
