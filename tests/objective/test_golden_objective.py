"""Golden numbers of the objective: public faults (B..) and figures measured on other systems (letters)."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from k3rl.config import ObjectiveConfig
from k3rl.errors import ConfigError
from k3rl.objective import TokenVectors, build_batch, resolve
from k3rl.objective.advantage import Baseline, Std, compute_gae, compute_group_advantages, whiten
from k3rl.objective.batch import ObjectiveBatch
from k3rl.objective.kl import KL_ESTIMATORS
from k3rl.objective.normaliser import NORMALISERS
from k3rl.objective.presets import PRESETS
from k3rl.objective.term import clipped_value_loss
from k3rl.objective.trust_region import ppo_clip
from k3rl.rewards.signal import no_signal_reason
from k3rl.trajectory import Outcome, Segment, SegmentKind, Task, Trajectory, TrajectoryKey

NAN = math.nan
TASK = Task(environment="toy", split="train", index=0)


def segment(
    kind: SegmentKind, size: int, context: int | None, logprobs: list[float] | None = None, follows: int | None = None
) -> Segment:
    ids = np.arange(1, size + 1, dtype=np.int32)
    if kind != "action":
        return Segment(kind=kind, token_ids=ids, context=context, follows=follows)
    behaviour = np.asarray(logprobs if logprobs is not None else [0.0] * size, dtype=np.float32)
    version = np.zeros(size, dtype=np.int32)
    return Segment(
        kind="action",
        token_ids=ids,
        context=context,
        rollout_logprobs=behaviour,
        version_index=version,
        follows=follows,
    )


def trajectory(*parts: Segment, group: int = 0, sample: int = 0, limit: str | None = None) -> Trajectory:
    outcome = Outcome(status="completed") if limit is None else Outcome(status="truncated", limit=limit)
    return Trajectory(key=TrajectoryKey(ordinal=group, sample=sample), task=TASK, segments=parts, outcome=outcome)


def single_turn(size: int, *, group: int = 0, logprobs: list[float] | None = None) -> Trajectory:
    return trajectory(segment("prompt", 1, None), segment("action", size, 0, logprobs, follows=0), group=group)


def compute_weights(normaliser: str, *sizes: int, untrained: Sequence[int] = ()) -> torch.Tensor:
    """Weights of trajectories of so many tokens each; those at ``untrained`` are masked."""
    rewards = [None if i in untrained else np.zeros(2) for i in range(len(sizes))]
    batch = build_batch([single_turn(size) for size in sizes], rewards)
    objective = resolve(ObjectiveConfig(preset="grpo", normaliser=normaliser), horizon=8)
    return NORMALISERS[normaliser].compute(batch, objective)


def clip_loss(ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    return ppo_clip(ratio.log(), advantages, build_batch([], []), resolve(ObjectiveConfig(preset="grpo")))


def group_advantages(
    scores: Sequence[float], groups: list[int], baseline: Baseline = "mean", std: Std = "sample"
) -> list[float]:
    out, _ = compute_group_advantages(torch.tensor(scores), torch.tensor(groups), baseline=baseline, std=std)
    return out.tolist()


def vectors_for(
    batch: ObjectiveBatch, logprob: torch.Tensor | None = None, value: torch.Tensor | None = None
) -> TokenVectors:
    zeros = torch.zeros(batch.num_tokens)
    tail = None if value is None else torch.zeros(len(batch.samples))
    return TokenVectors(zeros if logprob is None else logprob, zeros, zeros, value, tail)


def estimate(name: str, train: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """A KL estimate of tokens that ``train`` sampled."""
    return KL_ESTIMATORS[name].compute(train, reference, torch.zeros_like(train))


def gae(rewards: list[float], values: list[float], gamma: float, lam: float, last: float = 0.0) -> list[float]:
    return compute_gae(rewards, values, gamma=gamma, gae_lambda=lam, last_value=last)


def test_b01_each_group_is_normalised_alone_and_values_follow_the_ids() -> None:
    scores, groups = [1, 1, 0, 0, 10, 10, 0, 0], [0] * 4 + [1] * 4
    want = [0.8660254, 0.8660254, -0.8660254, -0.8660254] * 2
    assert group_advantages(scores, groups) == pytest.approx(want)
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    shuffled = group_advantages([scores[i] for i in order], [groups[i] for i in order])
    assert shuffled == pytest.approx([want[i] for i in order])


@pytest.mark.parametrize("scores", [[0.7], [1.0] * 4, [0.1] * 7, [0.1 + 0.2, 0.3]])
def test_b02_a_group_without_signal_gives_exact_zeros(scores: list[float]) -> None:
    for dtype in (torch.float32, torch.float64):
        values, no_signal = compute_group_advantages(
            torch.tensor(scores, dtype=dtype),
            torch.zeros(len(scores), dtype=torch.int64),
            baseline="mean",
            std="sample",
        )
        assert values.tolist() == [0.0] * len(scores)
        assert no_signal == 1


def test_b02_sample_and_population_deviation_are_named() -> None:
    assert group_advantages([1, 0, 0, 0], [0] * 4, std="sample") == pytest.approx([1.5, -0.5, -0.5, -0.5])
    want = [1.7320508, -0.5773503, -0.5773503, -0.5773503]
    assert group_advantages([1, 0, 0, 0], [0] * 4, std="population") == pytest.approx(want)


def test_b04_an_absent_reward_is_in_no_baseline() -> None:
    assert group_advantages([1, NAN, 0, NAN], [0] * 4, "leave_one_out", "none") == [1, 0, -1, 0]
    assert group_advantages([NAN, -1, -1, NAN], [0] * 4, "leave_one_out", "none") == [0, 0, 0, 0]


def test_b04_a_sample_without_trained_tokens_moves_no_baseline_and_an_absent_one_no_denominator() -> None:
    objective = resolve(ObjectiveConfig(preset="grpo", std="none"))
    empty = trajectory(segment("prompt", 2, None))
    batch = objective.prepare(build_batch([empty, single_turn(2)], [np.array([100.0]), np.array([0.0, 1.0])]))
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [0, 0, 0]
    rewards = [np.array([0.0, 1.0]), np.array([0.0, NAN]), None]
    batch = objective.prepare(build_batch([single_turn(2), single_turn(6), single_turn(3)], rewards))
    assert batch.weights is not None
    assert batch.weights.tolist() == [0.5, 0.5] + [0.0] * 9


def test_b04_a_reward_on_a_rejected_token_contributes_nothing() -> None:
    objective = resolve(ObjectiveConfig(preset="grpo", std="none"))
    batch = build_batch([single_turn(2), single_turn(2)], [np.zeros(2)] * 2)
    # one column a token: the first sample earned 1 on its second token, which was rejected
    batch = dataclasses.replace(
        batch,
        rewards=torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64),
        action_mask=torch.tensor([True, False, True, True]),
    )
    prepared = objective.prepare(batch)
    assert prepared.advantages is not None
    assert prepared.advantages.tolist() == [0, 0, 0, 0]


def test_b05_the_filter_looks_at_the_metric_that_was_named() -> None:
    assert no_signal_reason([0, 0, 0, 0]) == "all_same"
    assert no_signal_reason([0.0, 0.01, 0.02, 0.03]) is None
    assert no_signal_reason([None, NAN]) == "all_absent"
    assert no_signal_reason([None, 1.0]) == "too_small"


def test_b06_token_mean_counts_the_tokens_of_the_whole_batch() -> None:
    losses = torch.tensor([1.0, 1, 1, 1, 3])
    assert float((compute_weights("tokens", 4, 1) * losses).sum()) == pytest.approx(1.4)


def test_b07_masked_tokens_leave_the_denominator() -> None:
    losses = torch.tensor([1.0] * 4 + [7.0] * 6)
    for name in ("tokens", "sequences", "trajectories"):
        assert float((compute_weights(name, 4, 6, untrained=[1]) * losses).sum()) == pytest.approx(1.0)


def test_b07_an_all_masked_batch_has_zero_loss_and_gradient_and_no_kl_metric() -> None:
    objective = resolve(ObjectiveConfig(preset="grpo"))
    batch = objective.prepare(build_batch([single_turn(3)], [None]))
    logprob = torch.full((3,), NAN, requires_grad=True)
    loss, metrics = objective.loss(vectors_for(batch, logprob), batch)
    loss.backward()
    assert float(loss.detach()) == 0
    assert logprob.grad is not None
    assert logprob.grad.tolist() == [0, 0, 0]
    assert "train/rollout_kl" not in metrics.scalars()


@pytest.mark.parametrize("poison", [10.0, NAN, math.inf])
def test_b08_masked_values_change_neither_loss_nor_gradient(poison: float) -> None:
    objective = resolve(ObjectiveConfig(preset="ppo", std="none", gae_lambda=1.0, entropy_coef=0.1))
    parts = [segment("prompt", 1, None), segment("action", 2, 0, follows=0), segment("observation", 2, 1, follows=1)]
    clean = build_batch([trajectory(*parts)], [np.array([0.0, 1.0, 0.0])])
    results = []
    for filler in (0.0, poison):
        row = torch.tensor([0.1, -0.1, filler, filler])
        leaves = [row.clone().requires_grad_() for _ in range(3)]
        vectors = TokenVectors(leaves[0], leaves[1], torch.zeros(4), leaves[2], torch.full((1,), filler))
        batch = objective.prepare(clean, vectors)
        loss, _ = objective.loss(vectors, batch)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("preset", ["grpo", "gspo"])
@pytest.mark.parametrize("normaliser", ["tokens", "sequences", "trajectories", "constant"])
def test_b08_a_mean_over_a_sample_leaves_its_masked_entries_out(normaliser: str, preset: str) -> None:
    objective = resolve(ObjectiveConfig(preset=preset, normaliser=normaliser), horizon=2)
    parts = [segment("prompt", 1, None), segment("action", 2, 0, follows=0), segment("observation", 2, 1, follows=1)]
    batch = objective.prepare(build_batch([trajectory(*parts)], [np.zeros(3)]))
    batch = dataclasses.replace(batch, advantages=torch.tensor([1.0, 1, 10, 10]))
    assert batch.action_mask.tolist() == [True, True, False, False]
    assert float(objective.loss(vectors_for(batch), batch)[0]) == pytest.approx(-1.0)


def test_b08_the_mean_of_advantages_two_and_minus_one_is_minus_a_half() -> None:
    loss = (compute_weights("tokens", 2) * clip_loss(torch.ones(2), torch.tensor([2.0, -1.0]))).sum()
    assert float(loss) == pytest.approx(-0.5)


@pytest.mark.parametrize(("preset", "normaliser"), [("gspo", "sequences"), ("grpo", "tokens"), ("grpo", "constant")])
def test_b11_the_ratio_of_every_token_is_reported_in_every_mode(preset: str, normaliser: str) -> None:
    config = ObjectiveConfig(preset=preset, normaliser=normaliser, epochs=2)
    objective = resolve(config, horizon=8)
    batch = objective.prepare(build_batch([single_turn(3, logprobs=[0.5, -2.5, 0.2])], [np.zeros(2)]))
    _, metrics = objective.loss(vectors_for(batch), batch)
    assert metrics["train/ratio"] == pytest.approx(4.535919, abs=1e-5)
    assert metrics["train/ratio_max"] == pytest.approx(12.182494, abs=1e-5)


@pytest.mark.parametrize("clip_high", [0.2, 4.0, 100.0])
def test_b11_the_ratio_is_reported_before_the_clip(clip_high: float) -> None:
    objective = resolve(ObjectiveConfig(preset="grpo", clip_low=0.9, clip_high=clip_high))
    log_ratio = [-0.5, 2.5, -0.2]
    batch = objective.prepare(build_batch([single_turn(3, logprobs=[-x for x in log_ratio])], [np.zeros(2)]))
    batch = dataclasses.replace(batch, advantages=torch.ones(3))
    loss, metrics = objective.loss(vectors_for(batch), batch)
    assert metrics["train/ratio"] == pytest.approx(4.535919, abs=1e-5)
    assert metrics["train/ratio_outside_frac"] == pytest.approx(0.0 if clip_high == 100 else 1 / 3)
    if clip_high == 4.0:
        assert float(loss.detach()) == pytest.approx(-2.141754, abs=1e-6)


def test_b12_k3_is_finite_with_a_live_gradient_of_the_right_sign() -> None:
    reference = torch.zeros(2)
    values = estimate("k3", torch.tensor([-0.5, 0.5]), reference)
    assert values.tolist() == pytest.approx([0.148721, 0.106531], abs=1e-6)
    policy = torch.tensor([-101.0, -1.0, -200.0], requires_grad=True)
    value = estimate("k3", policy, torch.tensor([-1.0, -2.0, 0.0]))
    value.sum().backward()
    assert value.isfinite().all()
    assert policy.grad is not None
    assert policy.grad.isfinite().all()
    assert float(policy.grad[0]) < 0
    assert float(policy.grad[1]) == pytest.approx(0.632121, abs=1e-6)


@pytest.mark.parametrize("preset", ["grpo", "gspo", "ppo"])
def test_b12_minimising_the_loss_moves_the_policy_towards_the_reference(preset: str) -> None:
    objective = resolve(ObjectiveConfig(preset=preset, kl_coef=0.5))
    batch = build_batch([single_turn(2, logprobs=[-1.0, -1.0])], [np.zeros(2)])
    batch = dataclasses.replace(batch, reference_logprobs=torch.tensor([-2.0, -1.0]))
    logprob = torch.tensor([-1.0, -1.0], requires_grad=True)
    vectors = vectors_for(batch, logprob, torch.zeros(2))
    prepared = dataclasses.replace(objective.prepare(batch, vectors), advantages=torch.zeros(2))
    loss, metrics = objective.loss(vectors, prepared)
    loss.backward()
    assert logprob.grad is not None
    # coefficient 0.5, mean over 2 tokens; the second token is where the reference is
    assert logprob.grad.tolist() == pytest.approx([0.5 / 2 * 0.632121, 0.0], abs=1e-6)
    assert metrics["train/reference_kl"] == pytest.approx((math.exp(-1.0) + 1 - 1) / 2, abs=1e-6)


def test_b15_the_value_of_a_masked_token_is_never_read() -> None:
    objective = resolve(ObjectiveConfig(preset="ppo", std="none"))
    parts = [segment("prompt", 1, None), segment("action", 1, 0, follows=0), segment("action", 1, 1, follows=1)]
    parts.append(segment("observation", 1, 2, follows=2))
    batch = build_batch([trajectory(*parts)], [np.array([0.0, 0.0, 1.0, 0.0])])
    for masked in (100.0, NAN):
        prepared = objective.prepare(batch, vectors_for(batch, value=torch.tensor([0.0, 0.0, masked])))
        assert prepared.advantages is not None
        assert prepared.advantages.tolist() == pytest.approx([0.95, 1.0, 0.0])


def test_b17_a_reward_on_an_observation_goes_to_the_last_action_before_it() -> None:
    parts = [segment("prompt", 1, None), segment("action", 2, 0, follows=0), segment("observation", 2, 1, follows=1)]
    batch = build_batch([trajectory(*parts)], [np.array([0.0, 0.0, 1.0])])
    assert batch.rewards.tolist() == [0, 1, 0, 0]
    assert [chain.rewards for chain in batch.chains] == [(1.0,)]
    credited = batch.rewards[batch.action_mask].tolist()
    assert gae(credited, [0, 0], 0.9, 1.0) == pytest.approx([0.9, 1.0])
    assert gae(credited, [0, 0], 0.0, 1.0) == [0, 1]


@pytest.mark.parametrize("observed", [0, 1, 2])
def test_b17_a_terminal_reward_sits_on_the_last_sampled_token_whatever_follows_it(observed: int) -> None:
    parts = [segment("prompt", 1, None), segment("action", 3, 0, follows=0)]
    if observed:
        parts.append(segment("observation", observed, 1, follows=1))
    batch = build_batch([trajectory(*parts)], [np.array([0.0, 1.0, 0.0][: len(parts)])])
    assert batch.rewards.tolist() == [0, 0, 1] + [0] * observed
    by_turn = resolve(ObjectiveConfig(preset="ppo", std="none", gamma=0.0))
    objective = dataclasses.replace(by_turn, advantage="gae_token")
    prepared = objective.prepare(batch, vectors_for(batch, value=torch.zeros(3 + observed)))
    assert prepared.advantages is not None
    assert prepared.advantages.tolist() == [0, 0, 1] + [0] * observed


def test_b18_truncated_bootstraps_and_terminated_does_not() -> None:
    assert gae([1, 1], [2, 3], 0.9, 0.5, last=10) == pytest.approx([4.85, 7.0])
    assert gae([1, 1], [2, 3], 0.9, 0.5) == pytest.approx([0.8, -2.0])


@pytest.mark.parametrize("limit", [None, "max_turns"])
def test_b18_episodes_back_to_back_equal_each_alone(limit: str | None) -> None:
    objective = resolve(ObjectiveConfig(preset="ppo", std="none", gamma=0.9, gae_lambda=0.5))
    parts = [segment("prompt", 1, None), segment("action", 1, 0, follows=0), segment("action", 1, 1, follows=1)]
    rewards = np.array([0.0, 1.0, 1.0])
    batch = build_batch([trajectory(*parts, limit=limit)] * 2, [rewards] * 2)
    vectors = TokenVectors(
        torch.zeros(4), torch.zeros(4), torch.zeros(4), torch.tensor([2.0, 3, 2, 3]), torch.tensor([10.0, 10.0])
    )
    prepared = objective.prepare(batch, vectors)
    want = [0.8, -2.0] if limit is None else [4.85, 7.0]
    assert prepared.advantages is not None
    assert prepared.advantages.tolist() == pytest.approx(want * 2)


def test_a_token_gae_bridges_observations() -> None:
    advantages = gae([0, 0, 0, 1], [0.5] * 4, 1.0, 0.95)
    assert advantages == pytest.approx([0.4287, 0.4512, 0.4750, 0.5000], abs=1e-4)


def test_c_groups_of_uneven_size_keep_their_own_baseline() -> None:
    want = [0.8660, -0.8660, -0.8660, 0.8660, 0.0, -0.7071, 0.7071]
    assert group_advantages([1, 0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 1, 2, 2]) == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("masked_row", [False, True])
def test_d_aggregation_over_rows_of_one_four_and_eight(masked_row: bool) -> None:
    sizes, untrained = ([1, 4, 8, 5], [3]) if masked_row else ([1, 4, 8], [])
    losses = torch.tensor(([1.0] + [0.5] * 4 + [0.25] * 8 + [9.0] * 5)[: sum(sizes)])
    for name, want in {"tokens": 0.38462, "sequences": 0.58333, "trajectories": 0.58333, "constant": 0.20833}.items():
        weights = compute_weights(name, *sizes, untrained=untrained)
        assert float((weights * losses).sum()) == pytest.approx(want, abs=1e-5)


def test_e_gradient_of_the_clip_without_dual_clip() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 5, 5])
    logprob = ratio.log().requires_grad_()
    clip_loss(logprob.exp(), torch.tensor([1.0, -1, 1, -1, -1, 1])).mean().backward()
    assert logprob.grad is not None
    assert logprob.grad.tolist() == pytest.approx([0, 0.25, -0.08333, 0, 0.83333, 0], abs=1e-4)


def test_f_kl_estimators() -> None:
    train = torch.tensor([0.5, -0.5, 3, -3], requires_grad=True)
    value = estimate("k3", train, torch.zeros(4))
    value.sum().backward()
    assert train.grad is not None
    assert value.tolist() == pytest.approx([0.1065, 0.1487, 2.0498, 16.0855], abs=1e-4)
    assert train.grad.tolist() == pytest.approx([0.3935, -0.6487, 0.9502, -19.0855], abs=1e-3)
    assert estimate("k1", train, torch.zeros(4)).tolist() == [0.5, -0.5, 3, -3]
    assert estimate("k2", train, torch.zeros(4)).tolist() == [0.125, 0.125, 4.5, 4.5]


def test_g_clipped_value_loss() -> None:
    assert float(clipped_value_loss(torch.tensor(1.5), torch.tensor(1.0), torch.tensor(3.0), 0.2)) == pytest.approx(
        1.62
    )


def test_i_whitening_with_the_sample_deviation_and_a_single_token() -> None:
    values = torch.tensor([1.0, 2, 3])
    assert whiten(values, torch.tensor([True] * 3), "sample").tolist() == [-1, 0, 1]
    assert whiten(values, torch.tensor([True, False, False]), "sample").tolist() == [0, 0, 0]


def test_a_shared_action_is_trained_once_and_gets_the_mean_of_its_branches() -> None:
    parts = [segment("prompt", 1, None), segment("action", 2, 0, follows=0)]
    parts += [segment("action", 1, 1, follows=1), segment("action", 1, 1, follows=1)]
    batch = build_batch([trajectory(*parts)], [np.array([0.0, 0.0, 1.0, 3.0])])
    assert batch.action_mask.tolist() == [True, True, True, False, False, True]
    objective = resolve(ObjectiveConfig(preset="ppo", std="none", gae_lambda=1.0))
    prepared = objective.prepare(batch, vectors_for(batch, value=torch.zeros(6)))
    assert prepared.advantages is not None
    assert prepared.advantages.tolist() == [2, 2, 1, 0, 0, 3]


def test_a_key_that_the_preset_does_not_use_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"objective\.value_clip.*'grpo'.*uses: advantage, anchor, baseline"):
        resolve(ObjectiveConfig(preset="grpo", value_clip=0.1))
    with pytest.raises(ConfigError, match="mean 'grpo'"):
        resolve(ObjectiveConfig(preset="grp"))
    with pytest.raises(ConfigError, match="horizon"):
        resolve(ObjectiveConfig(preset="grpo", normaliser="constant"))
    for name in PRESETS:
        assert f"objective {name}" in resolve(ObjectiveConfig(preset=name), horizon=8).formula()
