"""A job from its configuration to its summary: the run folder, who may use it, and what may change on a resume."""

from __future__ import annotations

import dataclasses
import json
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from k3rl.config import JobConfig, SftJobConfig, from_dict, to_dict
from k3rl.errors import ConfigError
from k3rl.observe.tracker import write_whole
from k3rl.runtime.checks import check_runnable, check_trains
from k3rl.runtime.cluster import ray_session
from k3rl.runtime.controller import Controller
from k3rl.weights.lock import lock_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from k3rl.config import RunConfig

Job = TypeVar("Job", bound=JobConfig)


def run_job(config: RunConfig, *, resume: bool = False) -> dict[str, Any]:
    """Run a job of ``k3rl train`` to its end and return its summary (also written to ``summary.json``).

    Raises ConfigError before anything is started or changed; after any other error the run can be resumed.
    """
    config = with_absolute_paths(config)
    started = time.perf_counter()

    def check() -> None:
        check_trains(config)
        check_runnable(config)

    with open_run(config, resume=resume, check=check) as opened:
        if opened.summary is not None:
            return opened.summary
        with ray_session(config):
            controller = Controller(config)
            try:
                controller.start(is_longer=opened.is_longer)
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


@dataclass(frozen=True)
class OpenedRun:
    """A run's folder, locked."""

    summary: dict[str, Any] | None
    """Of a run that is finished and was not made longer: there is nothing to do."""
    is_longer: bool
    """Steps were added to it."""


@contextmanager
def open_run(config: RunConfig | SftJobConfig, *, resume: bool, check: Callable[[], None]) -> Iterator[OpenedRun]:
    """Lock the job's folder and write its ``config.json``.

    Raises:
        ConfigError: the folder holds another run, or none to resume; or what ``check`` finds, before anything changes.
    """
    run_dir = config.run_dir
    config_path, summary_path = run_dir / "config.json", run_dir / "summary.json"
    if resume and not config_path.exists():
        raise ConfigError(f"nothing to resume: {run_dir} holds no run")
    check()
    with lock_folder(run_dir):
        is_longer = False
        if resume:
            old = from_dict(json.loads(config_path.read_text()))
            refuse_another_run(config, old)
            is_longer = config.steps > old.steps
            if summary_path.exists() and config.steps == old.steps:
                print(f"{run_dir} is finished; give it more steps, or read {summary_path}")
                yield OpenedRun(json.loads(summary_path.read_text()), is_longer)
                return
        elif config_path.exists():
            way = "an interrupted run: go on with --resume"
            if summary_path.exists():
                way = "a finished run: read summary.json, give it more steps and --resume"
            raise ConfigError(f"run folder {run_dir} holds {way}, or choose another name=")
        summary_path.unlink(missing_ok=True)
        write_whole(config_path, json.dumps(to_dict(config), indent=1) + "\n")
        yield OpenedRun(None, is_longer)


def refuse_another_run(config: RunConfig | SftJobConfig, old: RunConfig | SftJobConfig) -> None:
    """A resumed run may become longer, wait longer or save more often; it may not become another run.

    Stages may be added behind those that there were.
    """
    if type(config) is not type(old):
        there = "sft" if isinstance(old, SftJobConfig) else "train"
        raise ConfigError(f"{config.run_dir} holds a job of k3rl {there}; choose another name=")
    free = {"steps", "checkpoint_every", "checkpoints_kept", "eval_every", "run_root", "name"}
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
