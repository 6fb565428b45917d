"""What a micro-batch holds, what is computed of it and how often, and what an update does with it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from k3rl.config import LearnerConfig, ObjectiveConfig, OptimizerConfig, load_model_config
from k3rl.errors import TrainingError
from k3rl.learner.forward import compute_gradients, compute_vectors
from k3rl.learner.policy import Policy
from k3rl.learner.token_tree import plan_walk, whole_samples
from k3rl.learner.update import Learner
from k3rl.model.batch import ForwardOutput, TokenBatch
from k3rl.model.transformer import K3Model
from k3rl.objective import Objective, build_batch, resolve
from k3rl.testing.toy_policy import ToyPolicy
from k3rl.trajectory import Outcome, Segment, SegmentKind, Task, Trajectory, TrajectoryKey
from k3rl.weights.base import weights_digest

PPO = resolve(ObjectiveConfig(preset="ppo", std="none", gamma=1.0, gae_lambda=1.0))
TINY = load_model_config(Path(__file__).parents[2] / "configs/model/k3_tiny.yaml")


def segment(kind: SegmentKind, ids: list[int], context: int | None, follows: int | None = None) -> Segment:
    token_ids, size = np.array(ids, dtype=np.int32), len(ids)
    if kind != "action":
        return Segment(kind=kind, token_ids=token_ids, context=context, follows=follows)
    return Segment(
        kind=kind,
        token_ids=token_ids,
        context=context,
        follows=follows,
        rollout_logprobs=np.full(size, -2.4, dtype=np.float32),
        version_index=np.zeros(size, dtype=np.int32),
    )


def make_trajectory(*segments: Segment, sample: int = 0, truncated: bool = True) -> Trajectory:
    outcome = Outcome(status="truncated", limit="max_turns") if truncated else Outcome(status="completed")
    task = Task(environment="toy", split="train", index=0)
    return Trajectory(key=TrajectoryKey(ordinal=0, sample=sample), task=task, segments=segments, outcome=outcome)


def make_linear(sample: int, size: int = 4) -> Trajectory:
    """A prompt and one turn."""
    ids = [(3 * sample + i) % 11 for i in range(size)]
    return make_trajectory(segment("prompt", [sample], None), segment("action", ids, 0, 0), sample=sample)


def compacted(seen: list[int], *, read_on: bool = False) -> Trajectory:
    """Cut right after a compaction: the last observation begins a context in which nothing was sampled.

    With ``read_on`` another observation was read in that context, by a branch that was cut as well.
    """
    parts = [segment("prompt", [1, 2], None), segment("action", [3, 4], 0, 0), segment("observation", seen, None, 1)]
    if read_on:
        parts.append(segment("observation", [9, 8], 2, 1))
    return make_trajectory(*parts)


def make_learner(epochs: int = 1, objective: Objective | None = None) -> Learner:
    objective = dataclasses.replace(objective or resolve(ObjectiveConfig(preset="grpo")), epochs=epochs)
    config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-2), micro_batch_tokens=12)
    return Learner(ToyPolicy(), objective, config, total_steps=20)


def k3_with_values() -> K3Model:
    model = K3Model(dataclasses.replace(TINY, value_head=True))
    assert model.value_head is not None
    torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize("seen", [[5, 6, 7], [5]])
@pytest.mark.parametrize("make_policy", [ToyPolicy, k3_with_values])
def test_a_bootstrap_is_computed_even_where_its_path_trains_nothing(
    make_policy: Callable[[], Policy], seen: list[int]
) -> None:
    policy = make_policy()
    batch = build_batch([compacted(seen)], [np.array([0.0, 1.0, 2.0])])
    ids = torch.tensor(seen)
    bootstrap = float(policy.values(policy(TokenBatch.pack([ids])).hidden)[-1].detach())
    for tokens in (3, 100):  # the sample alone in its micro-batch, and with the other one
        walk = plan_walk(batch, tokens, with_value=True)
        assert sorted(n for part in walk.samples for n in part) == [0, 1]
        _, prepared, _ = compute_gradients(policy, PPO, batch, walk)
        assert prepared.returns is not None
        assert bootstrap != 0
        assert prepared.returns[batch.action_mask].tolist() == pytest.approx([3.0 + bootstrap] * 2, abs=1e-4)
    assert plan_walk(batch, 100).samples == [[0]]


@pytest.mark.parametrize("make_policy", [ToyPolicy, k3_with_values])
def test_a_reference_reads_a_sample_that_has_only_a_value(make_policy: Callable[[], Policy]) -> None:
    objective = resolve(ObjectiveConfig(preset="ppo", kl_coef=0.1))
    config = LearnerConfig(micro_batch_tokens=4)  # the sample of one token, of which nothing is a target, is alone
    learner = Learner(make_policy(), objective, config, total_steps=5, reference=make_policy())
    metrics = learner.update([compacted([5])], [np.array([0.0, 1.0, 0.0])])
    assert metrics["train/skipped_updates"] == 0
    assert metrics["train/input_tokens"] == 5
    assert metrics["train/reference_kl"] == pytest.approx(0.0, abs=1e-9)


def test_a_bootstrap_inside_of_a_path_that_trains_nothing_is_computed() -> None:
    policy = ToyPolicy()
    batch = build_batch([compacted([5, 6], read_on=True)], [np.zeros(4)])
    vectors = compute_vectors(policy, batch, plan_walk(batch, 100, with_value=True))
    assert vectors.value is not None
    assert vectors.tail_value is not None
    values = policy.values(policy(TokenBatch.pack([torch.tensor([5, 6, 9, 8])])).hidden).detach()
    everything = torch.cat([vectors.value, vectors.tail_value])
    found = [float(everything[chain.bootstrap]) for chain in batch.chains if chain.bootstrap is not None]
    assert found == pytest.approx([float(values[1]), float(values[3])], abs=1e-6)


@pytest.mark.parametrize("std", ["none", "sample"])
def test_a_value_that_is_read_and_that_nobody_computed_makes_the_loss_nan(std: str) -> None:
    objective = resolve(ObjectiveConfig(preset="ppo", std=std, value_coef=0.0))  # type: ignore[arg-type]
    batch = build_batch([compacted([5, 6])], [np.zeros(3)])
    loss, _, _ = compute_gradients(ToyPolicy(), objective, batch, whole_samples(batch, [[0]], with_value=True))
    assert bool(loss.isnan())


def test_a_value_that_nobody_reads_or_computes_reaches_neither_loss_nor_gradient() -> None:
    policy = ToyPolicy()
    trajectories = [make_linear(i) for i in range(3)]
    rewards = [np.array([0.0, 1.0]), None, np.zeros(2)]
    batch = build_batch(trajectories, rewards)
    walk = plan_walk(batch, 6, with_value=True)
    assert walk.samples == [[0], [2]]
    vectors = compute_vectors(policy, batch, walk)
    assert vectors.value is not None
    assert vectors.tail_value is not None
    assert vectors.value.isnan().tolist() == (~batch.action_mask).tolist()
    assert vectors.tail_value.isnan().tolist() == [False, True, False]
    loss, _, metrics = compute_gradients(policy, PPO, batch, walk)
    found = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    policy.zero_grad()
    others = build_batch(trajectories[::2], rewards[::2])
    want, _, _ = compute_gradients(policy, PPO, others, whole_samples(others, [[0], [1]], with_value=True))
    assert float(loss) == pytest.approx(float(want))
    assert all(np.isfinite(value) for value in metrics.scalars().values())
    for ours, parameter in zip(found, policy.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.allclose(ours, parameter.grad, atol=1e-7)


class CountingPolicy(ToyPolicy):
    """Counts its forward passes."""

    passes = 0

    def forward(self, batch: TokenBatch, cache: None = None) -> ForwardOutput:
        self.passes += 1
        return super().forward(batch, cache)


@pytest.mark.parametrize(("preset", "passes"), [("sft", [1, 4]), ("grpo", [1, 7]), ("ppo", [1, 7])])
def test_a_micro_batch_is_computed_again_only_where_the_gradient_was_not_known(preset: str, passes: list[int]) -> None:
    policy = CountingPolicy()
    batch = build_batch([make_linear(i) for i in range(4)], [np.array([0.0, float(i)]) for i in range(4)])
    for plan, want in zip(([[0, 1, 2, 3]], [[0], [1], [2], [3]]), passes, strict=True):
        policy.passes = 0
        walk = whole_samples(batch, plan, with_value=preset == "ppo")
        compute_gradients(policy, resolve(ObjectiveConfig(preset=preset)), batch, walk)
        assert policy.passes == want


@pytest.mark.parametrize("at_epoch", [0, 2])
def test_a_refused_step_ends_the_epochs_of_its_batch_and_counts_once(at_epoch: int) -> None:
    learner = make_learner(epochs=4)
    trajectories, rewards = [make_linear(i) for i in range(4)], [np.array([0.0, float(i)]) for i in range(4)]
    parameter = dict(learner.policy.named_parameters())["lm_head.weight"]

    def poisoned(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan") if learner.step % 4 == at_epoch else gradient

    hook = parameter.register_hook(poisoned)
    metrics = learner.update(trajectories, rewards)
    assert metrics["train/skipped_updates"] == 1
    assert (learner.step, learner.skipped, learner.skipped_in_a_row) == (at_epoch, 1, 1)
    before = weights_digest(learner.policy.state_dict())
    learner.update(trajectories, rewards)
    assert (learner.step, learner.skipped, learner.skipped_in_a_row) == (at_epoch, 2, 2)
    with pytest.raises(TrainingError, match="3 updates in a row"):
        learner.update(trajectories, rewards)
    assert weights_digest(learner.policy.state_dict()) == before
    hook.remove()
    learner.update(trajectories, rewards)
    assert (learner.step, learner.skipped_in_a_row) == (at_epoch + 4, 0)


def test_the_gap_is_that_before_the_first_step_and_the_ratio_that_of_every_epoch() -> None:
    trajectories, rewards = [make_linear(i) for i in range(4)], [np.array([0.0, float(i)]) for i in range(4)]
    one, three = (make_learner(epochs).update(trajectories, rewards) for epochs in (1, 3))
    for name in ("train/logprob_gap", "train/logprob_gap_max"):
        assert three[name] == pytest.approx(one[name], rel=1e-12)
    assert three["train/ratio"] != pytest.approx(one["train/ratio"], rel=1e-4)


def test_monitors_of_the_policy_do_not_depend_on_how_the_batch_was_cut() -> None:
    trajectories = [make_linear(n, 4 + n) for n in range(6)]
    batch = build_batch(trajectories, [np.zeros(len(t.segments)) for t in trajectories])
    objective, found = resolve(ObjectiveConfig(preset="grpo")), []
    for tokens in (10, 40, 1000):
        walk = plan_walk(batch, tokens, chunked=tokens == 10)
        _, _, metrics = compute_gradients(K3Model(TINY, seed=1), objective, batch, walk)
        found.append({name: value for name, value in metrics.scalars().items() if name.startswith("moe/")})
    assert len(found[0]) == 5
    assert found[1] == pytest.approx(found[0])
    assert found[2] == pytest.approx(found[0])


@pytest.mark.parametrize("epochs", [1, 4])
def test_groups_without_signal_are_counted_once_whatever_the_epochs(epochs: int) -> None:
    metrics = make_learner(epochs).update([make_linear(i) for i in range(4)], [np.zeros(2)] * 4)
    assert metrics["train/no_signal_groups"] == 1


def test_no_gradient_is_scaled_down_where_the_largest_norm_is_nought() -> None:
    learner = make_learner()
    optimizer = dataclasses.replace(learner.config.optimizer, max_grad_norm=0.0)
    learner.config = dataclasses.replace(learner.config, optimizer=optimizer)
    before = weights_digest(learner.policy.state_dict())
    rewards = [np.array([0.0, float(i)]) for i in range(4)]
    metrics = learner.update([make_linear(i) for i in range(4)], list(rewards))
    assert metrics["train/grad_clipped_frac"] == 0.0
    assert weights_digest(learner.policy.state_dict()) != before
