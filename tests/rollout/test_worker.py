"""A rollout worker with the K3 engine: agent loop, cache handles, routes and versions together."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from k3rl.buffer.store import Store
from k3rl.config import EnvironmentConfig, RolloutConfig, RunConfig, load_model_config
from k3rl.learner.forward import compute_vectors
from k3rl.learner.token_tree import plan_walk
from k3rl.model.transformer import K3Model
from k3rl.objective import build_batch
from k3rl.rewards.compose import compose, total_of
from k3rl.rollout.agent_loop import EpisodeSpec
from k3rl.rollout.worker import RolloutWorker
from k3rl.trajectory import NO_ROUTE, PolicyVersion, Task, Trajectory, TrajectoryKey, summarise_trajectory
from k3rl.weights.base import LocalWeights, weights_digest

MODEL = load_model_config(Path(__file__).parents[2] / "configs/model/k3_tiny.yaml")


def _config(id: str, **changes: int) -> RunConfig:
    limits = {"max_turns": 3, "max_tokens_per_turn": 60, "max_episode_tokens": 200, **changes}
    return RunConfig(name="test", model=MODEL, environment=EnvironmentConfig(id=id, **limits))  # type: ignore[arg-type]


def _specs(count: int) -> list[EpisodeSpec]:
    task = Task(environment="count", split="train", index=0)
    return [
        EpisodeSpec(key=TrajectoryKey(ordinal=i // 4, sample=i % 4), task=replace(task, index=i // 4))
        for i in range(count)
    ]


def _worker(config: RunConfig) -> tuple[RolloutWorker, K3Model]:
    worker, model = RolloutWorker(config), K3Model(MODEL)
    tensors = {name: t.detach() for name, t in model.state_dict().items()}
    weights = LocalWeights(PolicyVersion(incarnation=0, step=5, digest=weights_digest(tensors)), tensors)
    assert worker.update_weights(weights) == weights.version.digest
    assert worker.update_weights(weights) == weights.version.digest
    return worker, model


def _rollout(worker: RolloutWorker, specs: list[EpisodeSpec], temperature: float, folder: Path) -> list[Trajectory]:
    summaries = worker.rollout(specs, temperature, 0, folder)
    trajectories = Store(folder).read_all(summaries)
    assert [s.key for s in summaries] == [t.key for t in trajectories] == [s.key for s in specs]
    for summary, trajectory in zip(summaries, trajectories, strict=True):
        assert summary == summarise_trajectory(trajectory, ["outcome"], uri=summary.uri, digest=summary.digest)
    return trajectories


def _ids(trajectory: Trajectory) -> list[int]:
    return np.concatenate([s.token_ids for s in trajectory.segments]).tolist()


COUNT = "k3rl.testing.environments:CountEnvironment"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_multi_turn_rollouts_have_the_logprobs_that_the_learner_computes_from_their_routes(
    temperature: float, tmp_path: Path
) -> None:
    worker, model = _worker(_config(COUNT))
    trajectories = _rollout(worker, _specs(24), temperature, tmp_path)
    assert max(t.num_turns for t in trajectories) > 1
    assert {t.temperature for t in trajectories} == {temperature}
    assert {t.oldest_step for t in trajectories} == {5}
    batch = build_batch(trajectories, [np.zeros(len(t.segments)) for t in trajectories])
    vectors = compute_vectors(model, batch, plan_walk(batch, 300))
    assert batch.num_trained == sum(t.num_action_tokens for t in trajectories)
    # Rounding of the logits, which a low temperature magnifies; the engine's own test holds 1e-5 on short contexts.
    gap = (vectors.logprob - batch.rollout_logprobs)[batch.action_mask].abs()
    assert gap.max() <= 1e-5 / min(temperature, 1.0)
    assert gap.square().mean().sqrt() <= 3e-6 / min(temperature, 1.0)
    for trajectory in trajectories:
        routes = np.concatenate([s.routes for s in trajectory.segments if s.routes is not None])
        assert len(routes) == trajectory.num_tokens
        unfed = (routes == NO_ROUTE).all(axis=(1, 2))
        last_action = max(i for i, s in enumerate(trajectory.segments) if s.kind == "action")
        fed = sum(len(s) for s in trajectory.segments[: last_action + 1]) - 1
        assert unfed.tolist() == [False] * fed + [True] * (trajectory.num_tokens - fed)


def test_an_episode_is_the_same_whichever_worker_plays_it_and_beside_whatever_else(tmp_path: Path) -> None:
    config = _config(COUNT)
    specs = _specs(8)
    together = _rollout(_worker(config)[0], specs, 1.0, tmp_path)
    other = _worker(config)[0]
    apart = [_rollout(other, [spec], 1.0, tmp_path)[0] for spec in reversed(specs)]
    for first, second in zip(together, reversed(apart), strict=True):
        assert first.key == second.key
        assert _ids(first) == _ids(second)
        assert first.outcome == second.outcome
    assert len({tuple(_ids(t)) for t in together[:4]}) == 4


def test_greedy_rollouts_of_one_task_are_all_the_same(tmp_path: Path) -> None:
    worker, _ = _worker(_config(COUNT))
    trajectories = _rollout(worker, _specs(4), 0.0, tmp_path)
    assert len({tuple(_ids(t)) for t in trajectories}) == 1
    assert trajectories[0].temperature == 1.0


REWARDS = """
import time

def length(task, trajectory):
    return [float(len(s)) if s.kind == "action" else None for s in trajectory.segments]

def broken(task, trajectory):
    if trajectory.key.sample == 1:
        raise OSError("judge is down")
    return [0.5] * len(trajectory.segments)

def bonus(task, trajectory):
    return [None] * len(trajectory.segments)

def slow(task, trajectory):
    time.sleep(5.0 if trajectory.key.sample == 2 else 0.0)
    return [0.25] * len(trajectory.segments)
"""


def test_a_reward_function_that_raises_or_hangs_costs_its_own_reward_of_its_own_trajectory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "k3rl_worker_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("length", "broken", "slow")
    config = replace(
        _config(COUNT),
        rewards={"outcome": 1.0, **dict.fromkeys(names, 0.1)},
        reward_functions={name: f"k3rl_worker_rewards:{name}" for name in names},
        rollout=RolloutConfig(reward_timeout_s=0.3),
    )
    begin = time.monotonic()
    summaries = _worker(config)[0].rollout(_specs(4), 1.0, 0, tmp_path / "payloads")
    assert time.monotonic() - begin < 4.0
    absent = {(s.key.sample, name) for s in summaries for name in names if s.rewards[name] is None}
    assert absent == {(1, "broken"), (2, "slow")}
    errors = {s.key.sample: dict(s.reward_errors) for s in summaries}
    assert errors == {
        0: {},
        1: {"broken": "reward 'broken': OSError: judge is down"},
        2: {"slow": "no answer within 0.3 s"},
        3: {},
    }
    for summary, trajectory in zip(summaries, Store(tmp_path / "payloads").read_all(summaries), strict=True):
        assert summary.rewards["length"] == summary.num_action_tokens
        assert {r.cause for s in trajectory.segments for r in s.rewards if r.value is None} <= {"grader"}
        composed = compose(trajectory, config.rewards)
        assert composed is not None
        assert np.isnan(composed).any() == (summary.key.sample in (1, 2))
        assert total_of(summary, config.rewards) == (
            None if np.isnan(composed).any() else pytest.approx(composed.sum())
        )


def test_a_reward_function_that_found_nothing_to_reward_gave_nought_and_not_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "k3rl_worker_bonus.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = replace(
        _config(COUNT), rewards={"outcome": 1.0, "bonus": 0.1}, reward_functions={"bonus": "k3rl_worker_bonus:bonus"}
    )
    summaries = _worker(config)[0].rollout(_specs(2), 1.0, 0, tmp_path / "payloads")
    for summary, trajectory in zip(summaries, Store(tmp_path / "payloads").read_all(summaries), strict=True):
        assert summary.rewards["bonus"] == 0.0
        composed = compose(trajectory, config.rewards)
        assert composed is not None
        assert total_of(summary, config.rewards) == summary.rewards["outcome"] == composed.sum()
