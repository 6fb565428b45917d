"""Whole runs as a user starts them, in processes of their own that are killed, interrupted and resumed."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from k3rl.buffer.ledger import Attempt, Ledger
from k3rl.cli.app import app
from k3rl.model.bpe_tokenizer import load_tokenizer
from k3rl.model.moe import EXPERT_WEIGHTS
from k3rl.model.pretrained import from_pretrained
from k3rl.observe.tracker import read_metrics
from k3rl.runtime.event_log import check_order, read_events
from k3rl.weights.checkpoint import load, verify

ROOT = Path(__file__).resolve().parents[2]
COIN = "k3rl.testing.environments:CoinEnvironment"
COUNT = "k3rl.testing.environments:CountEnvironment"
STEPS = 14
ENDING_S = 120.0


def _take_interrupts() -> None:
    """A shell's background job ignores Ctrl-C, and what it starts would too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass(frozen=True, slots=True)
class Job:
    """One configuration and its run folder."""

    config: Path
    folder: Path
    ending_s: float = ENDING_S
    """How long it may take to its end."""

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start ``k3rl train``; its output goes to ``output.txt`` beside the configuration."""
        command = [sys.executable, "-m", "k3rl", "train", str(self.config), *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment.pop("RAY_ADDRESS", None)
        with open(self.config.with_suffix(".txt"), "wb") as output:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, preexec_fn=_take_interrupts
            )

    def finish(self, process: subprocess.Popen[bytes], timeout_s: float) -> tuple[int, str]:
        """Wait for the end: exit code and output."""
        try:
            return process.wait(timeout_s), self.config.with_suffix(".txt").read_text()
        finally:
            kill_tree(process)

    def run(self, *arguments: str) -> dict[str, Any]:
        """Run to the end, which must be a good one, and return the summary."""
        code, output = self.finish(self.start(*arguments), self.ending_s)
        assert code == 0, output
        return json.loads((self.folder / "summary.json").read_text())

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        return [event for event in read_events(path) if event["kind"] == kind] if path.exists() else []

    def start_until(self, reached: Callable[[], bool], *arguments: str) -> subprocess.Popen[bytes]:
        """Start and return as soon as ``reached``."""
        process = self.start(*arguments)
        deadline = time.monotonic() + self.ending_s
        while not reached():
            if process.poll() is not None or time.monotonic() > deadline:
                kill_tree(process)
                pytest.fail(f"the run ended or hung too early: {self.config.with_suffix('.txt').read_text()}")
            time.sleep(0.01)
        return process

    def leased(self) -> dict[int, list[tuple[str, str]]]:
        """(ordinal, sample) of the batch of every step, as it was last taken."""
        return {e["step"]: [sample_of(key) for key in e["keys"]] for e in self.events("lease")}

    def attempts(self) -> list[Attempt]:
        """Every attempt, once the laws hold (L1 to L3 and L6) and nothing is left running or leased."""
        ledger = Ledger(self.folder / "ledger.sqlite")
        try:
            ledger.check_laws()
            check_order(read_events(self.folder / "events.jsonl"))
            attempts = ledger.attempts()
        finally:
            ledger.close()
        assert {a.state for a in attempts} <= {"committed", "dropped"}
        assert sum(a.state == "committed" for a in attempts) == sum(len(keys) for keys in self.leased().values())
        return attempts

    def staleness(self) -> list[int]:
        """Of every committed trajectory (L5)."""
        used = [a for a in self.attempts() if a.state == "committed"]
        return [a.step - 1 - a.policy_step for a in used if a.step is not None and a.policy_step is not None]

    def weights(self, checkpoint: str) -> str:
        return verify(self.folder / checkpoint)["weights_sha256"]


def sample_of(key: str) -> tuple[str, str]:
    ordinal, sample = key.split(".")[:2]
    return ordinal, sample


def job(folder: Path, name: str, **changes: Any) -> Job:
    """A run that takes seconds: imitation of a coin toss, then RL finds out which side wins."""
    values: dict[str, Any] = {
        "name": name,
        "run_root": str(folder / "runs"),
        "model": str(ROOT / "configs/model/k3_tiny.yaml"),
        "environment": {"id": COIN, "max_turns": 2, "max_tokens_per_turn": 6, "max_episode_tokens": 48},
        "sft": {
            "max_steps": 20,
            "batch_size": 16,
            "eval_every": 10,
            "eval_tasks": 16,
            "patience": 5,
            "optimizer": {"name": "muon", "lr": 1e-2, "warmup_steps": 2, "decay": "none"},
        },
        "steps": STEPS,
        "checkpoint_every": 2,
        "rollout": {"num_workers": 1, "groups_per_step": 4, "group_size": 8},
        "learner": {"threads": 1, "optimizer": {"name": "muon", "lr": 3e-3, "warmup_steps": 2, "decay": "none"}},
        "evaluation": {"num_tasks": 64},
    }
    for key, change in changes.items():
        values[key] = values[key] | change if isinstance(change, dict) and key in values else change
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return Job(path, folder / "runs" / name)


def demo(folder: Path, name: str, **changes: Any) -> Job:
    """The README's demo, changed."""
    values = yaml.safe_load((ROOT / "configs/demo.yaml").read_text())
    values |= {"name": name, "run_root": str(folder / "runs"), "model": str(ROOT / "configs/model/k3_tiny.yaml")}
    values["evaluation"] = {"num_tasks": 64}
    for key, change in changes.items():
        values[key] = values[key] | change if isinstance(change, dict) else change
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return Job(path, folder / "runs" / name, ending_s=900.0)


def processes() -> dict[int, int]:
    """Parent of every process."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    return parents


def descendants(pid: int) -> list[int]:
    """The processes below ``pid``: Ray's daemons and workers among them."""
    parents = processes()
    found, frontier = [], [pid]
    while frontier:
        frontier = [child for child, parent in parents.items() if parent in frontier]
        found += frontier
    return found


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """kill -9 for the driver and everything below it."""
    for pid in [process.pid, *descendants(process.pid)] if process.poll() is None else []:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def k3rl(*arguments: str | Path) -> tuple[int, str]:
    """A command in this process: exit code and output."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    done = job(tmp_path_factory.mktemp("undisturbed"), "a", evaluation={"sft_only_baseline": True})
    done.run()
    return done


def test_reinforcement_finds_what_imitation_cannot_and_nothing_is_lost(undisturbed: Job) -> None:
    summary = json.loads((undisturbed.folder / "summary.json").read_text())
    rewards = [row["rollout/reward"] for row in read_metrics(undisturbed.folder / "metrics.jsonl")[:STEPS]]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15
    assert summary["success_after_rl"] > summary["success_after_sft"] + 0.2
    assert summary["success_after_rl"] > summary["success_sft_only"] + 0.2
    assert 0.0 < summary["max_logprob_gap"] <= 1e-4
    assert summary["seed"] == 0
    assert summary["total_s"] >= sum(summary[name] for name in ("sft_s", "rl_s", "eval_s")) > 0.0

    attempts, counts = undisturbed.attempts(), summary["trajectories"]
    assert counts["issued"] == len(attempts) == STEPS * 4 * 8
    assert counts["committed"] == sum(a.state == "committed" for a in attempts) > 0
    assert counts["issued"] == counts["committed"] + sum(counts["dropped"].values())
    assert set(undisturbed.staleness()) == {0}


def test_eval_of_a_finished_run_says_what_its_summary_says(undisturbed: Job) -> None:
    code, output = k3rl("eval", undisturbed.config)
    assert code == 0, output
    summary = json.loads((undisturbed.folder / "summary.json").read_text())
    found = json.loads((undisturbed.folder / "eval.json").read_text())
    assert found["sampled"] == summary["reports"]["after_rl"]
    assert found["greedy"] == summary["reports"]["after_rl_greedy"]


def test_l4_a_run_killed_in_sft_and_in_rl_takes_the_identical_steps_when_resumed(
    undisturbed: Job, tmp_path: Path
) -> None:
    killed = job(tmp_path, "b")
    kill_tree(killed.start_until(lambda: bool(killed.events("checkpoint"))))
    state = load(killed.folder / "checkpoints" / "step_000000").state["controller"]
    assert (state["phase"], state["sft_step"]) == ("sft", 10)

    at = random.Random(0).randint(5, STEPS - 3)
    kill_tree(killed.start_until(lambda: any(e["step"] == at for e in killed.events("step")), "--resume"))
    killed.run("--resume")

    assert killed.leased() == undisturbed.leased()
    names = ("sft/train/loss", "train/loss", "train/grad_norm", "rollout/reward")
    rows = [read_metrics(run.folder / "metrics.jsonl")[:20] for run in (undisturbed, killed)]
    numbers = [[[row.get(name) for name in names] for row in of_run] for of_run in rows]
    assert len(numbers[0]) == 20
    assert numbers[0] == numbers[1]
    for checkpoint in ("after_sft/step_000000", f"checkpoints/step_{STEPS:06d}"):
        assert killed.weights(checkpoint) == undisturbed.weights(checkpoint)
    published: dict[int, str] = {}
    for event in undisturbed.events("publish"):
        published.setdefault(event["at_step"], event["digest"])
    served = [(e["at_step"], e["digest"]) for e in killed.events("publish") if e["at_step"] > 0]
    assert {step for step, _ in served} == set(range(1, STEPS + 1))
    assert all(published[step] == digest for step, digest in served)
    assert [e["step"] for e in killed.events("restore")][1:] == [0, at - at % 2]
    assert set(killed.staleness()) == {0}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_l4_the_demo_killed_at_a_random_step_takes_the_identical_steps_when_resumed(tmp_path: Path) -> None:
    changes = {"sft": {"max_steps": 150, "min_steps": 150}, "steps": 12, "checkpoint_every": 3}
    runs = [demo(tmp_path, name, **changes) for name in ("undisturbed", "killed")]
    runs[0].run()
    at = random.Random().randint(2, 11)
    kill_tree(runs[1].start_until(lambda: any(e["step"] == at for e in runs[1].events("step"))))
    runs[1].run("--resume")
    print(f"killed at step {at}")
    assert runs[0].leased() == runs[1].leased()
    losses = [[row["train/loss"] for row in read_metrics(r.folder / "metrics.jsonl")[:12]] for r in runs]
    assert len(losses[0]) == 12
    assert losses[0] == losses[1]
    assert runs[0].weights("checkpoints/step_000012") == runs[1].weights("checkpoints/step_000012")


def test_an_interrupted_run_of_the_asynchronous_schedule_is_resumed_and_never_too_stale(tmp_path: Path) -> None:
    interrupted = job(tmp_path, "c", steps=40, sft={"max_steps": 10}, schedule="one_step_async")
    process = interrupted.start_until(lambda: len(interrupted.events("step")) >= 3)
    process.send_signal(signal.SIGINT)
    code, output = interrupted.finish(process, 60.0)
    assert (code, "Traceback" in output) == (130, False), output
    assert "--resume" in output

    interrupted.run("--resume")
    ages = interrupted.staleness()
    assert max(ages) == 1
    assert [e["step"] for e in interrupted.events("lease")][-1] >= 8
    assert "stale" not in {a.reason for a in interrupted.attempts()}


def test_b58_a_killed_rollout_worker_is_named_and_the_run_can_go_on(tmp_path: Path) -> None:
    hurt = job(tmp_path, "d", steps=40, sft={"max_steps": 10}, rollout={"num_workers": 2})
    process = hurt.start_until(lambda: len(hurt.events("step")) >= 2)
    workers = [pid for pid in descendants(process.pid) if "rolloutworker" in title(pid).lower()]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    code, output = hurt.finish(process, 60.0)
    assert (code, "Traceback" in output) == (1, False), output
    assert "WorkerDiedError" in output
    assert "rollout-" in output
    assert "--resume" in output

    hurt.run("--resume")
    assert [e["step"] for e in hurt.events("lease")][-1] >= 8
    assert set(hurt.staleness()) == {0}


def test_what_the_environment_failed_is_played_again_and_after_three_attempts_has_no_reward(tmp_path: Path) -> None:
    flaky = job(
        tmp_path,
        "l",
        steps=1,
        sft={"max_steps": 0},
        environment={"id": COUNT, "options": {"fault": "raise_reset"}},
        rollout={"groups_per_step": 2, "group_size": 4},
        buffer={"drop_no_signal": False},
        evaluation={"num_tasks": 2},
    )
    flaky.run()
    attempts = flaky.attempts()
    assert [a.reason for a in attempts if a.state == "dropped"] == ["failed_env"] * 8
    assert sum(a.state == "committed" for a in attempts) == 8
    assert [e["detail"] for e in flaky.events("fail")] == ["OSError: reset broke"] * 8
    (row,) = read_metrics(flaky.folder / "metrics.jsonl")
    assert row["train/unscored_trajectories"] == 4
    assert row["rollout/outcome/failed_frac"] == 0.5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["objective.preset=ppo"], "model.value_head"),
        (["environment.id=k3rl/Shp-v0"], "k3rl/Shop-v0"),
        (["environment.options.colour=red"], "environment.options"),
        (["model.vocab_size=16"], "model.vocab_size"),
        (["num-epochs=3"], "num-epochs"),
        (["steps=0", "sft.max_steps=0"], "nothing to do"),
        (["rollout.group_size=1"], "rollout.group_size"),
        (["objective.preset=opd"], "a run keeps no teacher"),
        (["rewards.milestone=0.5"], "rewards.milestone"),
        (["environment.max_episode_tokens=3"], "environment.max_episode_tokens"),
        (["reward_functions.mine=no.module:f", "rewards.mine=1"], "reward_functions.mine"),
    ],
)
def test_b60_what_cannot_run_is_refused_before_anything_starts(changes: list[str], named: str, tmp_path: Path) -> None:
    import ray

    wrong = job(tmp_path, "f")
    for command in (["train"], ["train", "--dry-run"]):
        code, output = k3rl(*command, wrong.config, *changes)
        assert (code, named in output) == (2, True), output
    assert not wrong.folder.exists()
    assert not ray.is_initialized()


def test_resuming_a_finished_run_says_so_and_starts_nothing(undisturbed: Job) -> None:
    before = (undisturbed.folder / "summary.json").read_bytes()
    code, output = k3rl("train", undisturbed.config, "--resume")
    assert (code, "is finished" in output) == (0, True), output
    assert (undisturbed.folder / "summary.json").read_bytes() == before


def test_a_run_folder_belongs_to_one_run(undisturbed: Job, tmp_path: Path) -> None:
    code, output = k3rl("train", undisturbed.config)
    assert (code, "holds a finished run" in output) == (2, True), output
    code, output = k3rl("train", undisturbed.config, "seed=5", "rollout.group_size=4", "--resume")
    assert (code, "rollout.group_size, seed" in output) == (2, True), output
    code, output = k3rl("train", job(tmp_path, "g").config, "--resume")
    assert (code, "nothing to resume" in output) == (2, True), output


def test_a_runs_checkpoint_becomes_a_published_folder_and_back(undisturbed: Job, tmp_path: Path) -> None:
    checkpoint = undisturbed.folder / f"checkpoints/step_{STEPS:06d}"
    code, output = k3rl("convert", checkpoint, tmp_path / "a")
    assert code == 0, output
    loaded, kept = from_pretrained(tmp_path / "a").state_dict(), load(checkpoint).model
    assert loaded.keys() == kept.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in kept.items())
    assert load_tokenizer(tmp_path / "a").digest[:16] in load(checkpoint).vocabulary
    code, output = k3rl("convert", tmp_path / "a", tmp_path / "b", "--experts", "mxfp4", "--dtype", "bfloat16")
    assert (code, "experts mxfp4" in output) == (0, True), output
    code, output = k3rl("sizes", tmp_path / "b", ROOT / "configs/model/k3.yaml")
    assert (code, "339,046" in output, "2,779,484,379,232" in output) == (0, True, True), output
    code, output = k3rl("convert", tmp_path / "a", tmp_path / "b")
    assert (code, "nothing is overwritten" in output) == (1, True), output


def test_a_run_with_experts_in_mxfp4_samples_trains_and_exports_one_function(tmp_path: Path) -> None:
    quantised = job(tmp_path, "q", steps=3)
    summary = quantised.run("model.expert_format=mxfp4")
    assert 0.0 < summary["max_logprob_gap"] <= 1e-4
    checkpoint = quantised.folder / "checkpoints/step_000003"
    code, output = k3rl("convert", checkpoint, tmp_path / "packed")
    assert (code, "experts mxfp4" in output) == (0, True), output
    code, output = k3rl("convert", checkpoint, tmp_path / "plain", "--experts", "plain")
    assert (code, "experts plain" in output) == (0, True), output
    packed, plain = (from_pretrained(tmp_path / name).state_dict() for name in ("packed", "plain"))
    trained = load(checkpoint).model
    for name, tensor in trained.items():
        assert torch.equal(packed[name], plain[name])
        # What is trained keeps more than four bits.
        assert torch.equal(packed[name], tensor) == (not name.endswith(EXPERT_WEIGHTS))


def test_a_checkpoint_of_another_model_is_refused(undisturbed: Job, tmp_path: Path) -> None:
    code, output = k3rl("eval", undisturbed.config, "model.hidden_size=32")
    assert (code, "hidden_size" in output) == (1, True), output
    code, output = k3rl("eval", job(tmp_path, "h").config)
    assert (code, "no checkpoint" in output) == (1, True), output


def test_a_checkpoint_of_other_token_ids_is_refused(undisturbed: Job) -> None:
    code, output = k3rl("eval", undisturbed.config, f"environment.id={COUNT}")
    assert (code, "other token ids" in output) == (1, True), output


PLUGINS = """
from k3rl.testing.environments import CoinEnvironment

class Mine(CoinEnvironment):
    name = "mine"

def brevity(task, trajectory):
    return [-0.01 * len(s) if s.kind == "action" else None for s in trajectory.segments]
"""


def test_the_doctor_calls_reward_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "k3rl_sick_rewards.py").write_text("def mine(task, trajectory):\n    return 1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = ["reward_functions.mine=k3rl_sick_rewards:mine", "rewards.mine=0.1", "rewards.outcome=1"]
    code, output = k3rl("doctor", job(tmp_path, "n").config, *changes)
    assert (code, "ZeroDivisionError" in output) == (1, True), output


def test_the_installed_command_trains_a_critic_on_plug_ins_in_the_folder_that_it_is_called_from(tmp_path: Path) -> None:
    (tmp_path / "my_plugins.py").write_text(PLUGINS)
    changes = {"rewards": {"outcome": 1.0, "brevity": 0.1}, "reward_functions": {"brevity": "my_plugins:brevity"}}
    changes |= {"environment": {"id": "my_plugins:Mine"}, "objective": {"preset": "ppo"}}
    mine = job(tmp_path, "m", steps=3, sft={"max_steps": 10}, **changes)
    # What pip makes of the entry point: the folder on the path is that of the script, not the current one.
    script = tmp_path / "bin" / "k3rl"
    script.parent.mkdir()
    script.write_text("import sys\nfrom k3rl.__main__ import main\nsys.exit(main())\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), "train", str(mine.config), "model.value_head=true"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=ENDING_S)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(mine.folder / "metrics.jsonl")[:3]
    assert all(row["rollout/reward/brevity"] < 0.0 for row in rows)
    assert all(math.isfinite(row["train/value_loss"]) and row["train/value_loss"] > 0.0 for row in rows)
    assert {a.state for a in mine.attempts()} == {"committed"}  # a critic learns from a group of equal rewards too


def test_a_dry_run_shows_the_configuration_the_objective_and_the_costs(tmp_path: Path) -> None:
    dry = job(tmp_path, "i")
    code, output = k3rl("train", dry.config, "seed=17", "--dry-run")
    assert code == 0, output
    for piece in ("seed: 17", "max(-r A, -clip(r, 0.8, 1.2) A)", "Estimate", "MiB"):
        assert piece in output
    assert not dry.folder.exists()


def test_the_doctor_passes_the_demo_and_names_what_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = k3rl("doctor", ROOT / "configs/demo.yaml", f"run_root={tmp_path}")
    assert (code, "FAILED" in output) == (0, False), output
    (tmp_path / "k3rl_hopeless.py").write_text(
        "from k3rl.testing.environments import CoinEnvironment\n\n\n"
        "class Hopeless(CoinEnvironment):\n"
        "    def grade(self, answer):\n"
        "        return 0.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code, output = k3rl("doctor", job(tmp_path, "j").config, "environment.id=k3rl_hopeless:Hopeless")
    assert (code, "FAILED" in output) == (1, True), output
    assert "expert" in output
    for change, named in (("model.vocab_size=16", "model.vocab_size"), ("environment.options.colour=red", "colour")):
        code, output = k3rl("doctor", job(tmp_path, "k").config, change)
        assert (code, named in output) == (1, True), output
