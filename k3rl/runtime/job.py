"""A job from its configuration to its summary: the run folder, who may use it, and what may change on a resume."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3rl.config import from_dict, to_dict
from k3rl.errors import ConfigError
from k3rl.observe.tracker import write_whole
from k3rl.runtime.checks import check_runnable, check_trains
from k3rl.runtime.cluster import ray_session
from k3rl.runtime.controller import Controller
from k3rl.weights.lock import lock_folder

if TYPE_CHECKING:
    from k3rl.config import RunConfig


def run_job(config: RunConfig, *, resume: bool = False) -> dict[str, Any]:
    """Run a job to its end and return its summary (also written to ``summary.json``).

    Raises ConfigError before anything is started or changed; after any other error the run can be resumed.
    """
    # Absolute, since the actors have working directories of their own.
    made = config.tokenizer in ("tiny", "bytes")
    tokenizer = config.tokenizer if made else str(Path(config.tokenizer).resolve())
    options = dict(config.chat_options)
    if "wording" in options:
        options["wording"] = str(Path(options["wording"]).resolve())
    config = dataclasses.replace(
        config, run_root=str(Path(config.run_root).resolve()), tokenizer=tokenizer, chat_options=options
    )
    run_dir = config.run_dir
    config_path, summary_path = run_dir / "config.json", run_dir / "summary.json"
    if resume and not config_path.exists():
        raise ConfigError(f"nothing to resume: {run_dir} holds no run")
    check_trains(config)
    check_runnable(config)
    started = time.perf_counter()
    with lock_folder(run_dir):
        is_longer = False
        if resume:
            old = json.loads(config_path.read_text())
            refuse_another_run(config, old)
            is_longer = config.steps > old["steps"]
            if summary_path.exists() and old["steps"] == config.steps:
                print(f"{run_dir} is finished; make it longer with steps=, or read {summary_path}")
                return json.loads(summary_path.read_text())
        elif config_path.exists():
            way = "an interrupted run: go on with --resume"
            if summary_path.exists():
                way = "a finished run: read summary.json, make it longer with steps= and --resume"
            raise ConfigError(f"run folder {run_dir} holds {way}, or choose another name=")
        summary_path.unlink(missing_ok=True)
        write_whole(config_path, json.dumps(to_dict(config), indent=1) + "\n")
        with ray_session(config):
            controller = Controller(config)
            try:
                controller.start(is_longer=is_longer)
                controller.progress.spend("setup", started)
                return controller.run()
            finally:
                controller.close()


def refuse_another_run(config: RunConfig, old: dict[str, Any]) -> None:
    """A resumed run may become longer, wait longer or save more often; it may not become another run.

    Keys that ``old``, the plain configuration it was started with, does not have yet had their defaults.
    """
    free = {"steps", "checkpoint_every", "checkpoints_kept", "run_root", "name"}
    before, now = _leaves(to_dict(from_dict(old))), _leaves(to_dict(config))
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
