"""Rewards are given once, stand on the segments that earned them, and are absent rather than zero when missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from k3rl.errors import ConfigError, RewardError
from k3rl.rewards.base import RewardFunction, evaluate
from k3rl.rewards.compose import compose, signal_reason, total_of
from k3rl.rewards.scoring import RECORDED, load_reward, with_rewards
from k3rl.testing.records import make_summary
from k3rl.trajectory import (
    Outcome,
    PolicyVersion,
    Reward,
    Segment,
    Task,
    Trajectory,
    TrajectoryKey,
    summarise_trajectory,
)

KEY = TrajectoryKey(ordinal=0, sample=0)


def trajectory(*rewards: tuple[Reward, ...], outcome: Outcome | None = None) -> Trajectory:
    one = np.zeros(1, np.int32)
    segments = [Segment(kind="prompt", token_ids=one)]
    for r in rewards:
        segments.append(
            Segment(
                kind="action", token_ids=one, rollout_logprobs=np.zeros(1, np.float32), version_index=one, rewards=r
            )
        )
    return Trajectory(
        key=TrajectoryKey(ordinal=0, sample=0),
        task=Task(environment="e", split="train", index=0),
        segments=tuple(segments),
        outcome=outcome or Outcome(status="completed"),
        versions=(PolicyVersion(incarnation=0, step=0, digest="w"),),
    )


def scored(*rewards: tuple[Reward, ...], outcome: Outcome | None = None) -> Trajectory:
    """A trajectory as it leaves a rollout worker: both recorded components on its segments."""
    plain = trajectory(*rewards, outcome=outcome)
    return with_rewards(plain, {name: evaluate(name, function, plain) for name, function in RECORDED.items()})


def total(of: Trajectory, weights: dict[str, float]) -> float | None:
    return total_of(summarise_trajectory(of, RECORDED), weights)


def test_b10_components_are_weighted_on_their_segments_and_in_the_total() -> None:
    t = scored((Reward("outcome", 1.0), Reward("milestone", 0.0)))
    weights = {"outcome": 0.7, "milestone": 0.3}
    assert total(t, weights) == pytest.approx(0.7)
    assert summarise_trajectory(t, RECORDED).rewards == {"outcome": 1.0, "milestone": 0.0}


def test_rewards_stay_on_the_segment_that_earned_them() -> None:
    t = scored((Reward("milestone", 0.5),), (Reward("milestone", 0.5), Reward("outcome", 1.0)))
    composed = compose(t, {"outcome": 1.0, "milestone": 0.2})
    assert composed is not None
    np.testing.assert_allclose(composed, [0.0, 0.1, 1.1])
    assert total(t, {"outcome": 1.0, "milestone": 0.2}) == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("ended", "cause"),
    [
        (Outcome(status="failed", cause="env"), "env"),
        (Outcome(status="failed", cause="grader"), "grader"),
        (Outcome(status="completed"), "not_scored"),
    ],
)
def test_b04_a_missing_component_is_absent_with_its_cause_and_not_zero(ended: Outcome, cause: str) -> None:
    t = scored((Reward("milestone", 0.5),), (), outcome=ended)
    assert t.segments[-1].rewards[0] == Reward("outcome", None, cause)  # type: ignore[arg-type]
    composed = compose(t, {"outcome": 1.0})
    assert composed is not None
    assert np.isnan(composed).tolist() == [False, False, True]
    assert total(t, {"outcome": 1.0}) is None
    assert compose(scored(), {"outcome": 1.0}) is None
    assert total(scored(), {"outcome": 1.0}) is None


def test_b04_an_episode_that_infrastructure_failed_loses_the_milestones_that_it_had() -> None:
    t = scored((Reward("milestone", 0.5),), outcome=Outcome(status="failed", cause="env"))
    assert summarise_trajectory(t, RECORDED).rewards == {"outcome": None, "milestone": None}


def test_a_component_without_weight_does_not_count_even_when_it_is_absent() -> None:
    t = scored((Reward("outcome", 1.0),))
    assert summarise_trajectory(t, RECORDED).rewards == {"outcome": 1.0, "milestone": None}
    assert total(t, {"outcome": 1.0, "milestone": 0.0}) == 1.0
    composed = compose(t, {"outcome": 1.0, "milestone": 0.0})
    assert composed is not None
    assert composed.tolist() == [0.0, 1.0]
    never_given = compose(t, {"brevity": 1.0})
    assert never_given is not None
    assert np.isnan(never_given).tolist() == [False, True]


def test_a_reward_function_may_give_numbers_rewards_or_nothing() -> None:
    t = trajectory((), ())
    given: RewardFunction = lambda task, of: [None, -0.5, Reward.absent("other", "budget")]  # noqa: E731
    assert evaluate("mine", given, t) == [None, Reward("mine", -0.5), Reward.absent("mine", "budget")]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda task, of: [0.0], "1 entries, 2 segments"),
        (lambda task, of: [0.0, float("nan")], "is nan"),
        (lambda task, of: [0.0, "much"], "could not convert"),
        (lambda task, of: 1 / 0, "ZeroDivisionError"),
        (lambda task, of: None, "TypeError"),
    ],
)
def test_what_is_no_reward_is_an_error_that_names_the_component(function: RewardFunction, words: str) -> None:
    with pytest.raises(RewardError, match=rf"reward 'mine': .*{words}"):
        evaluate("mine", function, trajectory(()))


def test_reward_functions_are_found_by_import_path_and_mistakes_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "k3rl_my_rewards.py").write_text(
        "def short(task, t):\n    return [1.0] * len(t.segments)\n\n\nclass Long:\n"
        "    def __call__(self, task, t):\n        return [2.0] * len(t.segments)\n\n\nNUMBER = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for attribute, value in (("short", 1.0), ("Long", 2.0)):
        function = load_reward("mine", f"k3rl_my_rewards:{attribute}")
        assert evaluate("mine", function, trajectory(())) == [Reward("mine", value)] * 2
    for path, words in (
        ("k3rl_my_rewards:shrt", "Did you mean 'short'"),
        ("k3rl_my_rewards:NUMBER", "cannot be called"),
        ("k3rl_my_rewards", "has no 'attribute'"),
        ("k3rl_no_rewards:short", "No module named"),
    ):
        with pytest.raises(ConfigError, match=rf"reward_functions\.mine: .*{words}"):
            load_reward("mine", path)


@pytest.mark.parametrize(
    ("outcomes", "reason"),
    [
        ([1.0, 0.0], None),
        ([1.0, 0.0, None], None),
        ([1.0, 1.0], "all_solved"),
        ([0.0, 0.0, None], "none_solved"),
        ([0.1 + 0.2, 0.3], "all_same"),
        ([1.0, None], "too_small"),
        ([None, None], "all_absent"),
    ],
)
def test_a_group_whose_rewards_do_not_vary_has_no_signal_and_says_why(
    outcomes: list[float | None], reason: str | None
) -> None:
    group = [make_summary(KEY, outcome=value) for value in outcomes]
    assert signal_reason(group, {"outcome": 1.0}) == reason


def test_the_signal_may_be_one_component_of_the_sum() -> None:
    group = [make_summary(KEY, rewards={"outcome": 1.0, "milestone": m}) for m in (0.0, 0.5)]
    weights = {"outcome": 1.0, "milestone": 0.2}
    assert signal_reason(group, weights) is None
    assert signal_reason(group, weights, "milestone") is None
    assert signal_reason(group, weights, "outcome") == "all_solved"
