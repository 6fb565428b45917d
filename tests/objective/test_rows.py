"""Rows of the tables against closed forms and figures measured on other systems (letters), and what they report."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from k3rl.config import ObjectiveConfig
from k3rl.errors import ConfigError, TrainingError
from k3rl.objective import Objective, ObjectiveBatch, TokenVectors, build_batch, resolve
from k3rl.objective.advantage import compute_group_advantages
from k3rl.objective.kl import KL_ESTIMATORS
from k3rl.objective.normaliser import NORMALISERS
from k3rl.objective.watch import effective_size
from k3rl.trajectory import Outcome, Segment, SegmentKind, Task, Trajectory, TrajectoryKey

E_RATIOS = torch.tensor([1.5, 1.5, 0.5, 0.5, 5, 5], dtype=torch.float64)
E_ADVANTAGES = torch.tensor([1.0, -1, 1, -1, -1, 1], dtype=torch.float64)
H_RATIOS = torch.tensor([0.3, 1, 1.8, 6], dtype=torch.float64)


def segment(
    kind: SegmentKind, ids: list[int], context: int | None, logprobs: float = 0.0, follows: int | None = None
) -> Segment:
    tokens, size = np.array(ids, dtype=np.int32), len(ids)
    follows = context if follows is None else follows
    if kind != "action":
        return Segment(kind=kind, token_ids=tokens, context=context, follows=follows)
    behaviour, version = np.full(size, logprobs, dtype=np.float32), np.zeros(size, dtype=np.int32)
    return Segment(
        kind=kind, token_ids=tokens, context=context, follows=follows, rollout_logprobs=behaviour, version_index=version
    )


def trajectory(*parts: Segment, group: int = 0) -> Trajectory:
    task = Task(environment="toy", split="train", index=0)
    return Trajectory(
        key=TrajectoryKey(ordinal=group, sample=0), task=task, segments=parts, outcome=Outcome(status="completed")
    )


def one_turn(size: int, logprobs: float = 0.0, group: int = 0) -> Trajectory:
    return trajectory(segment("prompt", [9], None), segment("action", list(range(size)), 0, logprobs), group=group)


def batch_of(*trajectories: Trajectory) -> ObjectiveBatch:
    return build_batch(trajectories, [np.zeros(len(t.segments)) for t in trajectories])


def at(logprob: torch.Tensor) -> TokenVectors:
    zeros = torch.zeros_like(logprob)
    return TokenVectors(logprob, zeros, zeros)


def objective(preset: str = "grpo", **keys: Any) -> Objective:
    return resolve(ObjectiveConfig(preset=preset, **keys), horizon=8)


def gradient(of: Objective, batch: ObjectiveBatch, logprob: torch.Tensor) -> list[float]:
    """Of the loss with respect to the log-probabilities, [T]."""
    leaf = logprob.detach().clone().requires_grad_()
    loss, _ = of.loss(at(leaf), batch)
    (found,) = torch.autograd.grad(loss, leaf)
    return found.tolist()


def gradient_e(**keys: Any) -> list[float]:
    """That of six tokens of one turn, each sampled with probability 0.1."""
    asked = objective(**keys)
    batch = asked.prepare(batch_of(one_turn(6, math.log(0.1))))
    batch = dataclasses.replace(batch, advantages=E_ADVANTAGES)
    return gradient(asked, batch, E_RATIOS.log() + math.log(0.1))


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        ({"trust_region": "clip"}, [0, 0.25, -0.08333, 0, 0.83333, 0]),
        ({"trust_region": "dual_clip"}, [0, 0.25, -0.08333, 0, 0, 0]),
        ({"trust_region": "cispo"}, [-0.2, 0.2, -0.13333, 0.13333, 0.2, -0.2]),
        ({"trust_region": "dppo"}, [-0.25, 0.25, -0.08333, 0.08333, 0.83333, 0]),
        ({"trust_region": "none"}, [-0.25, 0.25, -0.08333, 0.08333, 0.83333, -0.83333]),
        ({"trust_region": "score"}, [-1 / 6, 1 / 6, -1 / 6, 1 / 6, 1 / 6, -1 / 6]),
        ({"trust_region": "clamp", "clip_low": 0.6, "clip_high": 1.0}, [-0.25, 0.25, -0.08333, 0.08333, 0, 0]),
    ],
)
def test_e_gradient_of_each_trust_region(keys: dict[str, Any], want: list[float]) -> None:
    assert gradient_e(**keys) == pytest.approx(want, abs=1e-5)


def test_e_the_soft_gate_weighs_a_token_by_the_slope_of_its_sigmoid() -> None:
    tau = torch.where(E_ADVANTAGES > 0, 1.0, 1.05)
    gate = torch.sigmoid(tau * (E_RATIOS - 1))
    want = -4 * gate * (1 - gate) * E_RATIOS * E_ADVANTAGES / 6
    assert gradient_e(preset="sapo") == pytest.approx(want.tolist(), abs=1e-7)


def test_gmpo_is_the_geometric_mean_of_what_the_clip_leaves() -> None:
    asked = objective("gmpo")
    batch = asked.prepare(batch_of(one_turn(3), one_turn(2)))
    batch = dataclasses.replace(batch, advantages=torch.tensor([2.0, 2, 2, -1, -1], dtype=torch.float64))
    logprob = torch.tensor([0.9, -0.9, 0.2, 0.7, -0.7], dtype=torch.float64, requires_grad=True)
    loss, metrics = asked.loss(at(logprob), batch)
    # above 0.4 with A > 0, and below -0.4 with A < 0, nothing is left to gain
    better = (torch.tensor(0.4) + logprob[1] + logprob[2]) / 3
    worse = (logprob[3] + torch.tensor(-0.4)) / 2
    want = (-2 * better.exp() + worse.exp()) / 2
    assert float(loss.detach()) == pytest.approx(float(want.detach()), abs=1e-7)
    for found, wanted in zip(torch.autograd.grad(loss, logprob), torch.autograd.grad(want, logprob), strict=True):
        assert torch.allclose(found, wanted, atol=1e-7)
    assert metrics["train/ratio_clipped_frac"] == pytest.approx(2 / 5)


def test_a_turn_ratio_is_the_geometric_mean_over_each_turn() -> None:
    parts = [segment("prompt", [9], None), segment("action", [1, 2], 0), segment("observation", [3], 1)]
    batch = batch_of(trajectory(*parts, segment("action", [4, 5, 6], 2)), one_turn(1))
    logprob = torch.tensor([0.1, 0.3, math.nan, 0.3, 0.6, 0.9, 0.7])
    ratios = objective(ratio="turn")
    prepared = dataclasses.replace(ratios.prepare(batch), advantages=torch.ones(7))
    wide = objective(ratio="turn", trust_region="none")
    found = torch.tensor(gradient(wide, prepared, logprob))[batch.action_mask]
    want = [math.exp(x) for x in (0.2, 0.2, 0.6, 0.6, 0.6, 0.7)]
    assert (-6 * found).tolist() == pytest.approx(want, rel=1e-6)


def test_b_returns_are_carried_over_observations() -> None:
    parts = [segment("prompt", [9], None), segment("action", [1, 2], 0), segment("observation", [3, 3], 1)]
    batch = build_batch([trajectory(*parts, segment("action", [4, 5], 2))], [np.array([0.0, 0, 0, 1])])
    for gamma, want in ((1.0, [1, 1, 0, 0, 1, 1]), (0.5, [0.125, 0.25, 0, 0, 0.5, 1])):
        prepared = objective("reinforce_pp", std="none", gamma=gamma).prepare(batch)
        assert prepared.advantages is not None
        assert prepared.advantages.tolist() == want


def test_c_leave_one_out_gives_a_group_of_one_nothing() -> None:
    scores, groups = torch.tensor([1.0, 0, 0, 1, 1, 0, 1]), torch.tensor([0, 0, 0, 0, 1, 2, 2])
    found, no_signal = compute_group_advantages(scores, groups, baseline="leave_one_out", std="none")
    assert found.tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3, 0, -1, 1])
    assert no_signal == 1
    found, _ = compute_group_advantages(scores, groups, baseline="mean", std="population", spread="batch")
    deviation = math.sqrt(4 / 7 * 3 / 7)
    assert (found * deviation).tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5, 0, -0.5, 0.5])


def test_scores_less_their_groups_mean_are_whitened_over_the_tokens_of_the_batch() -> None:
    rows = [one_turn(1), one_turn(3), one_turn(2, group=1), one_turn(2, group=1)]
    batch = build_batch(rows, [np.array([0.0, r]) for r in (1.0, 0.0, 6.0, 2.0)])
    prepared = objective(advantage="group_whitened").prepare(batch)
    centred = torch.tensor([0.5] + [-0.5] * 3 + [2.0] * 2 + [-2.0] * 2, dtype=torch.float64)
    assert prepared.advantages is not None
    assert torch.allclose(prepared.advantages, (centred - centred.mean()) / centred.std())


def test_an_absent_reward_is_in_no_statistic_of_the_batch() -> None:
    rows = [one_turn(2), one_turn(2), one_turn(2)]
    absent, present = [np.array([0.0, 1]), np.array([0.0, 0]), None], [np.array([0.0, 1]), np.array([0.0, 0])]
    for keys in ({"preset": "reinforce_pp"}, {"advantage": "group_whitened"}, {"preset": "gigpo"}, {"spread": "batch"}):
        with_absent = objective(**keys).prepare(build_batch(rows, absent)).advantages
        without = objective(**keys).prepare(build_batch(rows[:2], present)).advantages
        assert with_absent is not None
        assert without is not None
        assert with_absent.tolist() == [*without.tolist(), 0, 0]


def test_d_mean_over_trajectories_of_sums() -> None:
    batch = batch_of(one_turn(1), one_turn(4), one_turn(8, group=1))
    losses = torch.tensor([1.0] + [0.5] * 4 + [0.25] * 8, dtype=torch.float64)
    for name, want in {"sums": 1.66667, "groups": (3 / 5 + 0.25) / 2}.items():
        weights = NORMALISERS[name].compute(batch, objective())
        assert float((weights * losses).sum()) == pytest.approx(want, abs=1e-5)


def test_j_a_rollout_cut_in_two_keeps_its_weight_except_in_the_mean_over_samples() -> None:
    whole = one_turn(8)
    cut = trajectory(
        segment("prompt", [9], None),
        segment("action", [0, 1, 2, 3], 0),
        segment("prompt", [9], None, follows=1),
        segment("action", [4, 5, 6, 7], 2),
    )
    for name in NORMALISERS:
        weights = [NORMALISERS[name].compute(batch_of(t, one_turn(8)), objective())[:8].sum() for t in (whole, cut)]
        assert torch.equal(weights[0], weights[1]) == (name != "sequences")


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        ({"correction": "token"}, [0.3, 1, 1.8, 2]),
        ({"correction": "sequence"}, [2, 2, 2, 2]),
        ({"correction": "icepop"}, [0, 1, 1.8, 0]),
        ({"correction": "token", "truncate_low": 0.5}, [0.5, 1, 1.8, 2]),
        ({"correction": "token", "truncate_high": math.inf, "rejection": "sequence"}, [0.3, 1, 1.8, 6]),
        ({"rejection": "token"}, [0, 1, 1, 0]),
        ({"rejection": "sequence", "keep_high": 1.3}, [0, 0, 0, 0]),
        ({"correction": "none"}, [1, 1, 1, 1]),
    ],
)
def test_h_weights_of_each_correction_and_rejection(keys: dict[str, Any], want: list[float]) -> None:
    asked = objective(anchor="initial", trust_region="none", **keys)
    batch = asked.prepare(batch_of(one_turn(4, -3.0)), at(H_RATIOS.log() - 3))
    batch = dataclasses.replace(batch, advantages=torch.ones(4, dtype=torch.float64))
    # before the first step the ratio is 1, and the weight is all that there is
    assert (-4 * np.array(gradient(asked, batch, H_RATIOS.log() - 3))).tolist() == pytest.approx(want, abs=1e-6)


def test_the_three_policies_are_told_apart_in_later_epochs() -> None:
    asked = objective(anchor="initial", correction="token", trust_region="none")
    initial, train = H_RATIOS.log() - 3, H_RATIOS.log() - 3 + torch.tensor([0.1, -0.2, 0.3, 0.0])
    batch = asked.prepare(batch_of(one_turn(4, -3.0)), at(initial))
    batch = dataclasses.replace(batch, advantages=torch.ones(4, dtype=torch.float64))
    want = H_RATIOS.clamp(max=2) * (train - initial).exp() / 4
    assert gradient(asked, batch, train) == pytest.approx((-want).tolist(), abs=1e-7)
    one_step_later = asked.loss(at(train), batch)[1]
    assert one_step_later["train/correction"] == asked.loss(at(initial), batch)[1]["train/correction"]


@pytest.mark.parametrize(("count_rejected", "share"), [(True, 4), (False, 2)])
def test_whether_rejected_tokens_count_in_the_denominator_is_a_key(count_rejected: bool, share: int) -> None:
    asked = objective(rejection="token", trust_region="score", count_rejected=count_rejected)
    batch = asked.prepare(batch_of(one_turn(4, -3.0)), at(H_RATIOS.log() - 3))
    batch = dataclasses.replace(batch, advantages=torch.ones(4, dtype=torch.float64))
    assert gradient(asked, batch, H_RATIOS.log() - 3) == pytest.approx([0, -1 / share, -1 / share, 0])
    assert ("not counted" in asked.formula()) != count_rejected


@pytest.mark.parametrize("truncate_high", [5.0, 100.0])
@pytest.mark.parametrize("rejection", ["none", "token"])
def test_b11_weights_are_reported_before_bound_and_rejection(rejection: str, truncate_high: float) -> None:
    asked = objective(anchor="initial", correction="token", truncate_high=truncate_high, rejection=rejection)
    logprob = torch.tensor([-0.5, 2.5, -0.2], dtype=torch.float64)
    batch = asked.prepare(batch_of(one_turn(3)), at(logprob))
    _, metrics = asked.loss(at(logprob), batch)
    assert metrics["train/correction_raw"] == pytest.approx(4.535919, abs=1e-6)
    assert metrics["train/correction_raw_max"] == pytest.approx(12.182494, abs=1e-6)
    assert metrics["train/mismatch_kl"] == pytest.approx(-0.6)
    raw = logprob.exp()
    assert metrics["train/token_ess_frac"] == pytest.approx(float(raw.sum() ** 2 / raw.square().sum() / 3))
    assert metrics["train/trajectory_ess_frac"] == pytest.approx(1.0)
    assert metrics["train/rejected_frac"] == pytest.approx(0 if rejection == "none" else 1 / 3)
    if rejection == "none" and truncate_high == 5.0:
        assert metrics["train/correction"] == pytest.approx(2.141754, abs=1e-6)
        assert metrics["train/correction_bounded_frac"] == pytest.approx(1 / 3)


def test_an_effective_size_is_all_of_equal_weights_and_one_of_a_single_large_one() -> None:
    assert effective_size(torch.full((7,), -900.0, dtype=torch.float64)) == pytest.approx(7)
    assert effective_size(torch.tensor([800.0, 0, 0], dtype=torch.float64)) == pytest.approx(1)


def test_k2_is_the_square_of_the_whole_trajectory_up_to_a_constant_factor() -> None:
    tau, rewards = 0.3, [1.0, 0.0, 2.5]
    asked = objective("k2", drift_coef=tau)
    rows = [one_turn(2, -1.0), one_turn(3, -1.5), one_turn(1, -0.5)]
    batch = asked.prepare(build_batch(rows, [np.array([0.0, r]) for r in rewards]))
    logprob = batch.rollout_logprobs.double() + torch.tensor([0.2, -0.4, 0.1, 0.3, 0.5, -0.6])
    leaf = logprob.clone().requires_grad_()
    whole = torch.stack([x.sum() for x in (leaf - batch.rollout_logprobs).split([2, 3, 1])])
    advantages = torch.tensor(rewards, dtype=torch.float64) - float(np.mean(rewards))
    (want,) = torch.autograd.grad((advantages - tau * whole).square().mean(), leaf)
    assert (2 * tau * np.array(gradient(asked, batch, logprob))).tolist() == pytest.approx(want.tolist(), abs=1e-7)


def test_k3_drops_the_gradient_outside_whatever_the_sign_and_keeps_the_square_everywhere() -> None:
    asked = objective("k3", drift_coef=0.01, clip_low=0.6)
    batch = asked.prepare(batch_of(one_turn(6)))
    batch = dataclasses.replace(batch, advantages=E_ADVANTAGES)
    policy = torch.where(E_RATIOS < 2, -E_RATIOS * E_ADVANTAGES, 0.0)
    want = (policy + 0.02 * E_RATIOS.log()) / 6
    assert gradient(asked, batch, E_RATIOS.log()) == pytest.approx(want.tolist(), abs=1e-7)
    _, metrics = asked.loss(at(E_RATIOS.log()), batch)
    assert metrics["train/ratio_clipped_frac"] == metrics["train/ratio_outside_frac"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("name", "values", "slopes"),
    [
        ("k3", [0.1065, 0.1487, 2.0498, 16.0855], [0.3935, -0.6487, 0.9502, -19.0855]),
        ("k3_straight", [0.1065, 0.1487, 2.0498, 16.0855], [0.5, -0.5, 3, -3]),
        ("k3_score", [0.1065, 0.1487, 2.0498, 16.0855], [0.5, -0.5, 3, -3]),
        ("k1", [0.5, -0.5, 3, -3], [1, 1, 1, 1]),
        ("k2", [0.125, 0.125, 4.5, 4.5], [0.5, -0.5, 3, -3]),
    ],
)
def test_f_value_and_gradient_of_each_kl_estimator(name: str, values: list[float], slopes: list[float]) -> None:
    """The score function of k3 adds its value to its gradient, which makes it that of k2."""
    train = torch.tensor([0.5, -0.5, 3, -3], requires_grad=True)
    found = KL_ESTIMATORS[name].compute(train, torch.zeros(4), torch.zeros(4))
    assert found.tolist() == pytest.approx(values, abs=1e-4)
    (slope,) = torch.autograd.grad(found.sum(), train)
    assert slope.tolist() == pytest.approx(slopes, abs=1e-3)


def test_a_kl_off_the_reward_falls_on_the_step_that_made_it() -> None:
    parts = [segment("prompt", [9], None), segment("action", [1, 2], 0), segment("observation", [3], 1)]
    batch = build_batch([trajectory(*parts, segment("action", [4], 2))], [np.array([0.0, 0, 0, 1])])
    batch = dataclasses.replace(batch, reference_logprobs=torch.tensor([-1.0, -2, math.nan, -3]))
    logprob = torch.tensor([-0.5, -1, math.nan, -1.0])
    asked = objective("reinforce_pp", std="none", reward_kl_coef=0.1)
    prepared = asked.prepare(batch, at(logprob))
    assert prepared.advantages is not None
    assert prepared.advantages.tolist() == pytest.approx([0.65, 0.7, 0, 0.8])
    assert asked.loss(at(logprob), prepared)[1]["train/reward_kl"] == pytest.approx(3.5 / 3)
    with pytest.raises(TrainingError, match="no reference log-probabilities"):
        asked.prepare(dataclasses.replace(batch, reference_logprobs=None), at(logprob))


def test_a_teacher_gives_each_token_its_log_ratio_within_the_cap() -> None:
    batch = dataclasses.replace(batch_of(one_turn(3)), reference_logprobs=torch.tensor([-1.0, -9.0, -0.1]))
    prepared = objective("opd", teacher_cap=2.0).prepare(batch, at(torch.tensor([-1.5, -1.0, -4.0])))
    assert prepared.advantages is not None
    assert prepared.advantages.tolist() == pytest.approx([0.5, -2, 2])


def test_a_state_is_what_was_read_however_that_was_cut() -> None:
    def walk(first: int, *observed: list[int]) -> Trajectory:
        parts = [segment("prompt", [9], None), segment("action", [first], 0)]
        parts += [segment("observation", ids, 1 + i) for i, ids in enumerate(observed)]
        return trajectory(*parts, segment("action", [7], len(parts) - 1))

    batch = batch_of(walk(1, [3, 4]), walk(1, [3], [4]), walk(2, [3, 4]), walk(1, [3, 5]), walk(2))
    by_observation, by_path = (batch.states[kind].reshape(-1, 2) for kind in ("observation", "path"))
    for states in (by_observation, by_path):
        assert len(states[:, 0].unique()) == 1  # all start from the same prompt
        assert states[0, 1] == states[1, 1] != states[3, 1]
    assert by_observation[0, 1] == by_observation[2, 1]
    assert by_path[0, 1] != by_path[2, 1]
    assert len(by_observation[:, 1].unique()) == 3  # who read nothing is known by its path
    other = batch_of(walk(1, [3]), dataclasses.replace(walk(1, [3]), key=TrajectoryKey(ordinal=1, sample=0)))
    assert len(other.states["path"].unique()) == 4  # no state is shared between tasks


def test_a_step_is_compared_with_those_that_read_the_same() -> None:
    def walk(first: int, read: int) -> Trajectory:
        parts = [segment("prompt", [9], None), segment("action", [first], 0), segment("observation", [read], 1)]
        return trajectory(*parts, segment("action", [7], 2))

    rows = [walk(1, 3), walk(2, 3), walk(1, 4)]
    batch = build_batch(rows, [np.array([0.0, 0, 0, 4]), np.array([0.0, 1, 0, 0]), np.array([0.0, 0, 0, 1])])
    found = objective("gigpo", std="none", gamma=0.5, step_weight=10.0).prepare(batch).advantages
    episode = torch.tensor([2.0, -1, -1]).repeat_interleave(3)
    steps = torch.tensor([2 - 3.5 / 3, 0, 2, 1 - 3.5 / 3, 0, -2, 0.5 - 3.5 / 3, 0, 0])
    want = torch.where(batch.action_mask, episode + 10 * steps, 0.0)
    assert found is not None
    assert found.tolist() == pytest.approx(want.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"correction": "token"}, "already; set objective.anchor: initial"),
        ({"preset": "sft", "trust_region": "clip"}, "'clip' bounds a ratio"),
        ({"advantage": "gae_turn"}, "'grpo' does not train; take 'ppo'"),
        ({"preset": "ppo", "advantage": "group"}, "'group' gives the critic nothing to learn"),
        ({"preset": "sft", "anchor": "initial"}, r"objective\.anchor: preset 'sft' does not use it"),
        ({"count_rejected": False}, r"objective\.count_rejected.*does not use it"),
        ({"trust_region": "clips"}, r"no trust_region 'clips'.*'clip'"),
        ({"kl": "k4"}, "no kl 'k4'; known: k1, "),
        ({"trust_region": "dual_clip", "dual_clip": 0.5}, "from 1 to inf"),
    ],
)
def test_rows_that_do_not_go_together_are_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        objective(**keys)


def test_a_likelihood_may_be_corrected_since_it_holds_no_ratio() -> None:
    asked = objective("sft", correction="token")
    batch = asked.prepare(batch_of(one_turn(4, -3.0)), at(H_RATIOS.log() - 3))
    assert gradient(asked, batch, H_RATIOS.log() - 3) == pytest.approx([-0.3 / 4, -1 / 4, -1.8 / 4, -2 / 4])
