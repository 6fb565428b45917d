"""What a learner worker keeps from phase to phase, and from one life to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k3rl.config import RunConfig, load_config
from k3rl.errors import CheckpointError
from k3rl.learner.worker import BEFORE_RL, LearnerWorker
from k3rl.trajectory import Outcome, PolicyVersion, Reward, Segment, Task, Trajectory, TrajectoryKey

DEMO = Path(__file__).parents[2] / "configs/demo.yaml"
VERSION = PolicyVersion(incarnation=0, step=0, digest="")


def make_config(*overrides: str) -> RunConfig:
    return load_config(DEMO, ["learner.threads=1", "objective.kl_coef=0.1", *overrides])


def make_batch(seed: int, size: int = 8) -> list[Trajectory]:
    rng = np.random.default_rng(seed)

    def make(sample: int) -> Trajectory:
        prompt = Segment(kind="prompt", token_ids=rng.integers(0, 200, 5, dtype=np.int32))
        action = Segment(
            kind="action",
            token_ids=rng.integers(0, 200, 6, dtype=np.int32),
            context=0,
            follows=0,
            rollout_logprobs=np.full(6, -5.5, np.float32),
            version_index=np.zeros(6, np.int32),
            rewards=(Reward("outcome", float(sample % 2)),),
        )
        return Trajectory(
            key=TrajectoryKey(ordinal=0, sample=sample),
            task=Task(environment="toy", split="train", index=0),
            segments=(prompt, action),
            outcome=Outcome(status="completed"),
            versions=(VERSION,),
        )

    return [make(sample) for sample in range(size)]


def save(worker: LearnerWorker, folder: Path) -> None:
    meta: dict[str, Any] = {"step": 0, "version": VERSION, "vocabulary": "v", "state": {}, "consumed": {}, "keep": 1}
    worker.save(folder, **meta)


def test_a_kl_term_is_about_the_policy_that_rl_began_with_also_after_a_restart(tmp_path: Path) -> None:
    worker = LearnerWorker(make_config())
    worker.claim(tmp_path)
    worker.update_on(make_batch(0))  # imitation
    save(worker, tmp_path / BEFORE_RL)
    worker.begin("rl")
    first = worker.update_on(make_batch(1))
    assert first["train/reference_kl"] == pytest.approx(0.0, abs=1e-9)
    second = worker.update_on(make_batch(2))
    assert second["train/reference_kl"] > 1e-6
    save(worker, tmp_path / "checkpoints")
    third = worker.update_on(make_batch(3)).scalars()

    again = LearnerWorker(make_config("learner.timeout_s=0.1"))
    again._folder = tmp_path  # the first one, in this same process, has the claim
    assert again.load(tmp_path / "checkpoints", "v") is not None
    found = again.update_on(make_batch(3)).scalars()
    assert {k: v for k, v in found.items() if k != "train/update_s"} == {
        k: v for k, v in third.items() if k != "train/update_s"
    }
    ours, theirs = worker.weights(0, 0).tensors, again.weights(0, 0).tensors
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_kl_term_without_the_weights_that_rl_began_with_is_refused(tmp_path: Path) -> None:
    worker = LearnerWorker(make_config())
    worker.claim(tmp_path)
    with pytest.raises(CheckpointError, match=f"{BEFORE_RL} holds no checkpoint, and a KL term needs it"):
        worker.begin("rl")


def test_entering_the_phase_that_one_is_in_changes_nothing_and_rl_has_an_optimiser_of_its_own() -> None:
    worker = LearnerWorker(load_config(DEMO, ["learner.threads=1"]))
    worker.update_on(make_batch(0))
    learner = worker._learner
    worker.begin("sft")
    assert worker._learner is learner
    worker.begin("rl")
    assert worker._learner.step == 0
    assert not worker._learner.state_dict()[0]
