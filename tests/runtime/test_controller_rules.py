"""Rules of a run that need no cluster to be seen."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from k3rl.config import from_dict, load_config, to_dict
from k3rl.envs.base import Message
from k3rl.errors import ConfigError, EnvError, RewardError
from k3rl.observe.tracker import write_whole
from k3rl.rollout.chat_format import vocabulary_of
from k3rl.rollout.formats.xtml import XtmlFormat
from k3rl.runtime.checks import check_first_task, check_source, check_vocabulary
from k3rl.runtime.job import refuse_another_run
from k3rl.runtime.rollout_metrics import check_failures, rollout_metrics
from k3rl.testing.environments import CoinEnvironment
from k3rl.testing.records import make_summary
from k3rl.trajectory import Outcome, Summary, Task, TrajectoryKey
from k3rl.weights.lock import lock_folder

DEMO = load_config(Path(__file__).parents[2] / "configs" / "demo.yaml")


def episode(index: int, outcome: Outcome) -> Summary:
    return replace(make_summary(TrajectoryKey(ordinal=index, sample=0), outcome=None, num_turns=0), outcome=outcome)


def test_failures_are_data_until_they_are_the_rule_and_then_name_their_commonest_cause() -> None:
    done = [episode(i, Outcome(status="completed")) for i in range(2)]
    failed = [episode(i, Outcome(status="failed", cause="env", detail="disk full")) for i in range(2, 4)]
    check_failures(done + failed, {}, 0.5)
    check_failures([], {}, 0.5)
    other = episode(4, Outcome(status="failed", cause="env", detail="timed out"))
    with pytest.raises(EnvError, match=r"3 of 5 episodes failed.*2 of them with env: disk full"):
        check_failures([*done, *failed, other], {}, 0.5)


def test_a_reward_function_that_mostly_fails_stops_the_run_when_it_counts() -> None:
    whole = [episode(i, Outcome(status="completed")) for i in range(2)]
    broken = [replace(e, reward_errors={"mine": "reward 'mine': ZeroDivisionError: by zero"}) for e in whole]
    check_failures([*whole, *broken], {"mine": 0.1}, 0.5)
    with pytest.raises(RewardError, match=r"3 of 4 episodes failed.*3 of them with reward 'mine': ZeroDivisionError"):
        check_failures([whole[0], *broken, broken[0]], {"mine": 0.1}, 0.5)
    check_failures(broken, {"mine": 0.0}, 0.5)


def test_a_policy_that_fails_is_not_broken_infrastructure() -> None:
    check_failures([episode(0, Outcome(status="failed", cause="policy"))], {}, 0.0)


def test_a_failed_episode_has_no_reward_and_is_counted_as_absent() -> None:
    metrics = rollout_metrics([episode(0, Outcome(status="failed", cause="env", detail="x"))], {"outcome": 1.0})
    assert "rollout/reward" not in metrics.scalars()
    assert metrics["rollout/absent_frac"] == 1.0


def played(index: int, turns: int, **rewards: float | None) -> Summary:
    return make_summary(TrajectoryKey(ordinal=index, sample=0), num_turns=turns, rewards=rewards)


def test_b10_the_reward_of_a_run_is_a_mean_over_trajectories_of_the_weighted_sum() -> None:
    long_and_short = [played(0, 2, outcome=1.0), played(1, 8, outcome=0.0)]
    assert rollout_metrics(long_and_short, {"outcome": 1.0})["rollout/reward"] == 0.5
    metrics = rollout_metrics([played(0, 1, outcome=1.0, milestone=0.0)], {"outcome": 0.7, "milestone": 0.3})
    assert metrics["rollout/reward"] == pytest.approx(0.7)
    assert (metrics["rollout/reward/outcome"], metrics["rollout/reward/milestone"]) == (1.0, 0.0)


def test_b05_groups_without_signal_are_counted_by_every_component_and_by_the_sum() -> None:
    weights = {"outcome": 1.0, "milestone": 0.1}
    group = [
        make_summary(TrajectoryKey(ordinal=o, sample=s), rewards={"outcome": float(o == s == 1), "milestone": float(s)})
        for o in range(3)
        for s in range(2)
    ]
    metrics = rollout_metrics(group, weights).scalars()
    counted = {name: metrics[f"rollout/no_signal_groups/{name}"] for name in (*weights, "total")}
    assert counted == {"outcome": 2.0, "milestone": 0.0, "total": 0.0}


def test_a_resumed_run_may_be_longer_and_more_patient_but_not_another_one() -> None:
    values = to_dict(DEMO)
    longer = dataclasses.replace(
        DEMO, steps=500, checkpoint_every=1, rollout=dataclasses.replace(DEMO.rollout, timeout_s=900.0)
    )
    refuse_another_run(longer, DEMO)
    del values["rollout"]["max_attempts"]  # a run of a version that did not have this key yet
    refuse_another_run(DEMO, from_dict(values))
    other = dataclasses.replace(DEMO, seed=5, rollout=dataclasses.replace(DEMO.rollout, group_size=4))
    with pytest.raises(ConfigError, match=r"another rollout\.group_size, seed; choose"):
        refuse_another_run(other, DEMO)


def test_a_run_folder_has_one_driver_and_a_second_one_is_told_who_it_is(tmp_path: Path) -> None:
    holder = "from pathlib import Path; from k3rl.weights.lock import lock_folder; import sys, time\n"
    holder += f"with lock_folder(Path({str(tmp_path)!r})): print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        try:
            with pytest.raises(ConfigError, match=f"in use by process {process.pid} on"), lock_folder(tmp_path):
                pytest.fail("two drivers hold one folder")
        finally:
            process.kill()
    with lock_folder(tmp_path):  # a holder that was killed holds nothing
        assert str(os.getpid()) in (tmp_path / ".lock").read_text()


def test_a_learner_waits_for_the_one_before_it_to_let_go(tmp_path: Path) -> None:
    holder = "from pathlib import Path; from k3rl.weights.lock import lock_folder; import time\n"
    holder += f"with lock_folder(Path({str(tmp_path)!r})): print('held', flush=True); time.sleep(1.0)"
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with lock_folder(tmp_path, timeout_s=60.0):
            assert process.wait(10.0) == 0


def test_a_file_that_is_replaced_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    write_whole(path, "old")

    def die(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text() == "old"
    monkeypatch.undo()
    write_whole(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    assert path.read_text() == "new"


def test_a_run_may_use_the_tokenizer_of_a_checkpoint_folder(tmp_path: Path) -> None:
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(["a shop"], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    backend.add_special_tokens([AddedToken(name, special=True) for name in XtmlFormat.MARKERS])
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    config = dataclasses.replace(DEMO, chat_format="xtml", tokenizer=str(tmp_path))
    assert vocabulary_of(config) != vocabulary_of(dataclasses.replace(config, tokenizer="tiny"))
    with pytest.raises(ConfigError, match=r"model\.vocab_size: 256 is too small"):
        check_vocabulary(config)
    roomy = dataclasses.replace(config, model=dataclasses.replace(DEMO.model, vocab_size=300))
    assert "of 300 token ids" in check_vocabulary(roomy)
    with pytest.raises(ConfigError, match="no marker"):
        check_vocabulary(dataclasses.replace(roomy, chat_format="compact"))


class Hangs(CoinEnvironment):
    """Never starts an episode."""

    def start(self, task: Task, rng: np.random.Generator) -> tuple[Message, ...]:
        time.sleep(30)
        return super().start(task, rng)


def test_an_environment_that_hangs_is_refused_within_its_deadline() -> None:
    environment = dataclasses.replace(DEMO.environment, id=f"{__name__}:Hangs", options={}, step_timeout_s=0.3)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="cannot start a task: TimeoutError"):
        check_first_task(dataclasses.replace(DEMO, environment=environment))
    assert time.monotonic() - began < 5


def test_a_run_with_a_checkpoint_no_longer_needs_what_it_started_from(tmp_path: Path) -> None:
    run = dataclasses.replace(DEMO, run_root=str(tmp_path), init_from=str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"init_from: .*gone is no checkpoint folder"):
        check_source(run)
    (run.run_dir / "checkpoints" / "step_000001").mkdir(parents=True)
    check_source(run)
