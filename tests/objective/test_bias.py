"""Statements about bias, on a decision process small enough to sum over everything that can happen.

Two turns of one token with two actions each. The policy is a table of logits, [3, 2]: a row for the start and one for
each state after it. An expectation is a sum over all batches of so many trajectories, each weighed by its probability.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from k3rl.config import ObjectiveConfig
from k3rl.objective import Objective, ObjectiveBatch, TokenVectors, build_batch, resolve
from k3rl.trajectory import Outcome, Segment, Task, Trajectory, TrajectoryKey

POLICY = torch.tensor([[0.3, -0.4], [0.5, 0.1], [-0.7, 0.2]], dtype=torch.float64)
OTHER = torch.tensor([[-0.2, 0.1], [0.9, -0.3], [0.4, 0.6]], dtype=torch.float64)
FIRST = torch.tensor([0.5, -0.25], dtype=torch.float64)  # reward of the first turn, by its action
SECOND = torch.tensor([[1.0, -1.0], [2.0, 0.5]], dtype=torch.float64)  # of the second, by both
WAYS = [(a, b) for a in range(2) for b in range(2)]

Numbers = torch.Tensor


def log_policy(logits: Numbers, way: tuple[int, int]) -> Numbers:
    """Log-probability of each of the two actions."""
    table = logits.log_softmax(-1)
    return torch.stack([table[0, way[0]], table[1 + way[0], way[1]]])


def total(way: tuple[int, int]) -> Numbers:
    return FIRST[way[0]] + SECOND[way]


def kl(a: Numbers, b: Numbers) -> Numbers:
    """KL(a || b) in each of the three states."""
    return (a.softmax(-1) * (a.log_softmax(-1) - b.log_softmax(-1))).sum(-1)


def visits(logits: Numbers) -> Numbers:
    """Probability of passing by each of the three states."""
    return torch.cat([torch.ones(1, dtype=torch.float64), logits.softmax(-1)[0]]).detach()


def gradient_of(value: Callable[[Numbers], Numbers]) -> Numbers:
    leaf = POLICY.clone().requires_grad_()
    value(leaf).backward()
    assert leaf.grad is not None
    return leaf.grad


def true_return(logits: Numbers) -> Numbers:
    return torch.stack([log_policy(logits, way).sum().exp() * total(way) for way in WAYS]).sum()


TRUTH = gradient_of(true_return)


def trajectory(way: tuple[int, int], sample: int, sampler: Numbers, *, reveal: bool) -> Trajectory:
    """``reveal``: the observation tells which state it is."""
    logprobs = log_policy(sampler, way)
    segments = [Segment(kind="prompt", token_ids=np.array([9], dtype=np.int32))]
    for i, kind in enumerate(("action", "observation", "action")):
        at, turn = len(segments) - 1, i // 2
        token = way[turn] if kind == "action" else 3 + way[0] * reveal
        extra = {}
        if kind == "action":
            behaviour = np.array([float(logprobs[turn])], dtype=np.float32)
            extra = {"rollout_logprobs": behaviour, "version_index": np.zeros(1, dtype=np.int32)}
        ids = np.array([token], dtype=np.int32)
        segments.append(Segment(kind=kind, token_ids=ids, context=at, follows=at, **extra))  # type: ignore[arg-type]
    return Trajectory(
        key=TrajectoryKey(ordinal=0, sample=sample),
        task=Task(environment="toy", split="train", index=0),
        segments=tuple(segments),
        outcome=Outcome(status="completed"),
    )


def flat(rows: list[Numbers]) -> Numbers:
    """Two numbers a trajectory, laid out over its three targets."""
    return torch.cat([torch.stack([row[0], torch.zeros_like(row[0]), row[1]]) for row in rows])


def batches(
    size: int, sampler: Numbers, *, reveal: bool
) -> Iterator[tuple[list[tuple[int, int]], ObjectiveBatch, float]]:
    for ways in itertools.product(WAYS, repeat=size):
        rewards = [np.array([0.0, float(FIRST[a]), 0.0, float(SECOND[a, b])]) for a, b in ways]
        rows = [trajectory(way, i, sampler, reveal=reveal) for i, way in enumerate(ways)]
        probability = math.exp(sum(float(log_policy(sampler, way).sum()) for way in ways))
        yield list(ways), build_batch(rows, rewards), probability


def expected_ascent(
    objective: Objective,
    *,
    size: int = 1,
    sampler: Numbers = POLICY,
    values: Numbers | None = None,
    reference: Numbers | None = None,
    reveal: bool = True,
) -> Numbers:
    """Minus the expected gradient of the loss, [3, 2]."""
    leaf = POLICY.clone().requires_grad_()
    expectation = torch.zeros((), dtype=torch.float64)
    for ways, batch, probability in batches(size, sampler, reveal=reveal):
        logprob = flat([log_policy(leaf, way) for way in ways])
        zeros = torch.zeros_like(logprob)
        value = None if values is None else flat([torch.stack([values[0], values[1 + a]]) for a, _ in ways])
        vectors = TokenVectors(logprob, zeros, zeros, value, None if value is None else torch.zeros(size))
        if reference is not None:
            given = flat([log_policy(reference, way) for way in ways])
            batch = dataclasses.replace(batch, reference_logprobs=given)
        loss, _ = objective.loss(vectors, objective.prepare(batch, vectors))
        expectation = expectation + probability * loss
    (found,) = torch.autograd.grad(-expectation, leaf)
    return found


def objective(preset: str = "grpo", **keys: object) -> Objective:
    """The sum over a trajectory, without the trust region, unless told otherwise."""
    plain = {"normaliser": "sums", "trust_region": "none", "std": "none"}
    used = {key: value for key, value in {**plain, **keys}.items() if value is not ...}
    return resolve(ObjectiveConfig(preset=preset, **used))  # type: ignore[arg-type]


def assert_equal(found: Numbers, want: Numbers) -> None:
    assert torch.allclose(found, want, rtol=0, atol=2e-7), (found, want)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("trust_region", ["none", "score", "clip", "cispo", "sapo", "clamp", "dppo"])
def test_leave_one_out_is_the_policy_gradient_whatever_bounds_a_ratio_of_one(trust_region: str, size: int) -> None:
    found = expected_ascent(objective("rloo", trust_region=trust_region), size=size)
    assert_equal(found, TRUTH)


@pytest.mark.parametrize("size", [2, 3])
def test_a_mean_that_holds_the_sample_itself_shrinks_the_gradient(size: int) -> None:
    assert_equal(expected_ascent(objective("grpo"), size=size), TRUTH * (size - 1) / size)
    mirror = objective("k2", trust_region="score", drift_coef=0.7)  # on-policy, the drift has no gradient
    assert_equal(expected_ascent(mirror, size=size), TRUTH * (size - 1) / size)


def test_a_deviation_makes_two_samples_a_contest() -> None:
    def contest(logits: Numbers) -> Numbers:
        mine, theirs = (torch.stack([log_policy(p, way).sum().exp() for way in WAYS]) for p in (logits, POLICY))
        scores = torch.stack([total(way) for way in WAYS])
        wins = torch.sign(scores[:, None] - scores)
        return mine @ wins @ theirs / math.sqrt(2)

    assert_equal(expected_ascent(objective("grpo", std="sample"), size=2), gradient_of(contest))


def test_returns_are_the_policy_gradient_and_whitened_over_everything_that_divided_by_their_deviation() -> None:
    assert_equal(expected_ascent(objective("reinforce_pp")), TRUTH)
    uniform = torch.zeros(3, 2, dtype=torch.float64)  # so one of each trajectory is the whole distribution
    rows = [trajectory(way, i, uniform, reveal=True) for i, way in enumerate(WAYS)]
    batch = build_batch(rows, [np.array([0.0, float(FIRST[a]), 0.0, float(SECOND[a, b])]) for a, b in WAYS])
    returns = torch.cat([torch.stack([total(way), SECOND[way]]) for way in WAYS])
    whitened = objective("reinforce_pp", std="population")
    logits = uniform.requires_grad_()
    logprob = flat([log_policy(logits, way) for way in WAYS])
    vectors = TokenVectors(logprob, logprob.detach(), logprob.detach())
    loss, _ = whitened.loss(vectors, whitened.prepare(batch, vectors))
    (found,) = torch.autograd.grad(-loss, logits)
    (want,) = torch.autograd.grad(true_return(logits), logits)
    assert_equal(found * returns.std(correction=0), want)


@pytest.mark.parametrize("advantage", ["gae_turn", "gae_token"])
def test_gae_is_the_policy_gradient_with_lambda_one_or_with_the_right_values(advantage: str) -> None:
    wrong = torch.tensor([0.7, -2.0, 5.0], dtype=torch.float64)
    later = (POLICY.softmax(-1)[1:] * SECOND).sum(-1)
    right = torch.cat([true_return(POLICY)[None], later])
    keys = {"advantage": advantage, "value_coef": 0.0}
    assert_equal(expected_ascent(objective("ppo", gae_lambda=1.0, **keys), values=wrong), TRUTH)
    for gae_lambda in (0.0, 0.6):
        assert_equal(expected_ascent(objective("ppo", gae_lambda=gae_lambda, **keys), values=right), TRUTH)

    def as_the_critic_says(logits: Numbers) -> Numbers:
        table, reached = logits.softmax(-1), visits(POLICY)
        return (table[0] * (FIRST + wrong[1:])).sum() + (reached[1:, None] * table[1:] * SECOND).sum()

    found = expected_ascent(objective("ppo", gae_lambda=0.0, **keys), values=wrong)
    assert_equal(found, gradient_of(as_the_critic_says))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("same_state", "reveal"), [("path", False), ("observation", True), ("observation", False)])
def test_a_step_advantage_counts_a_state_as_often_as_another_sample_comes_by(
    same_state: str, reveal: bool, size: int
) -> None:
    keys = {"baseline": "leave_one_out", "gamma": 1.0, "same_state": same_state}
    with_steps, without = (
        expected_ascent(objective("gigpo", step_weight=weight, **keys), size=size, reveal=reveal)
        for weight in (1.0, 0.0)
    )
    assert_equal(without, TRUTH)
    company = 1 - (1 - visits(POLICY)) ** (size - 1)
    if same_state == "observation" and not reveal:
        company = torch.ones(3, dtype=torch.float64)  # both states look alike, so nobody is ever alone
    assert_equal(with_steps - without, TRUTH * company[:, None])


@pytest.mark.parametrize("keys", [{}, {"anchor": "initial", "correction": "token", "truncate_high": math.inf}])
def test_token_ratios_leave_the_states_and_what_follows_to_the_policy_that_sampled(keys: dict[str, object]) -> None:
    def corrected(logits: Numbers) -> Numbers:
        table, reached = logits.softmax(-1), visits(OTHER)
        later = (OTHER.softmax(-1)[1:] * SECOND).sum(-1)
        return (table[0] * (FIRST + later)).sum() + (reached[1:, None] * table[1:] * SECOND).sum()

    found = expected_ascent(objective("reinforce_pp", **keys), sampler=OTHER)
    assert_equal(found, gradient_of(corrected))
    assert not torch.allclose(found, TRUTH, atol=0.01)


def test_sequence_weights_without_a_bound_make_the_gradient_on_policy() -> None:
    keys = {"anchor": "initial", "correction": "sequence", "truncate_high": math.inf}
    assert_equal(expected_ascent(objective("reinforce_pp", **keys), sampler=OTHER), TRUTH)
    keys = {"ratio": "likelihood", "trust_region": "score", "correction": "sequence", "truncate_high": math.inf}
    assert_equal(expected_ascent(objective("reinforce_pp", **keys), sampler=OTHER), TRUTH)


@pytest.mark.parametrize(
    ("kl_name", "target"),
    [
        ("k1", "nothing"),
        ("k2", "train"),
        ("k3", "reference"),
        ("k3_straight", "train"),
        ("k3_score", "train"),
        ("k1_ratio", "train"),
        ("k3_ratio", "train"),
    ],
)
def test_a_kl_in_the_loss_pulls_where_its_docstring_says(kl_name: str, target: str) -> None:
    with_kl, without = (
        expected_ascent(objective("rloo", kl=kl_name, kl_coef=coef), reference=OTHER, size=2) for coef in (0.5, 0.0)
    )
    distances: dict[str, Callable[[Numbers], Numbers]] = {
        "nothing": lambda logits: 0 * logits.sum(),
        "train": lambda logits: (visits(POLICY) * kl(logits, OTHER)).sum(),
        "reference": lambda logits: (visits(POLICY) * kl(OTHER, logits)).sum(),
    }
    assert_equal(with_kl - without, -0.5 * gradient_of(distances[target]))


@pytest.mark.parametrize("kl_name", ["k1_ratio", "k3_ratio"])
def test_a_kl_with_the_ratio_is_right_on_what_another_policy_sampled(kl_name: str) -> None:
    reference = OTHER.flip(0)
    with_kl, without = (
        expected_ascent(objective("reinforce_pp", kl=kl_name, kl_coef=coef), reference=reference, sampler=OTHER)
        for coef in (0.5, 0.0)
    )
    want = gradient_of(lambda logits: (visits(OTHER) * kl(logits, reference)).sum())
    assert_equal(with_kl - without, -0.5 * want)


def sequence_kl(logits: Numbers) -> Numbers:
    """KL of whole trajectories."""
    gaps = [(log_policy(logits, way) - log_policy(OTHER, way)).sum() for way in WAYS]
    chances = [log_policy(logits, way).sum().exp() for way in WAYS]
    return (torch.stack(gaps) * torch.stack(chances)).sum()


@pytest.mark.parametrize(("preset", "size"), [("reinforce_pp", 1), ("rloo", 2)])
def test_k1_taken_off_the_reward_gives_the_gradient_of_the_kl_of_whole_trajectories(preset: str, size: int) -> None:
    found = expected_ascent(objective(preset, reward_kl_coef=0.3), reference=OTHER, size=size)
    assert_equal(found, TRUTH - 0.3 * gradient_of(sequence_kl))


def test_a_teacher_leaves_out_that_a_token_leads_to_states_of_another_kl() -> None:
    keys = {"std": ..., "teacher_cap": math.inf, "drift_coef": 0.0}
    found = expected_ascent(objective("opd", **keys), reference=OTHER)
    assert_equal(found, -gradient_of(lambda logits: (visits(POLICY) * kl(logits, OTHER)).sum()))
    later = kl(POLICY, OTHER)[1:]
    left_out = gradient_of(lambda logits: (logits.softmax(-1)[0] * later).sum())
    assert_equal(-gradient_of(sequence_kl), found - left_out)
