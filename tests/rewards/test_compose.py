import numpy as np
import pytest

from k3rl.metrics import Metrics
from k3rl.rewards.compose import compose, compose_value, signal_reason
from k3rl.trajectory import Outcome, Reward, Segment, Task, Trajectory, TrajectoryKey


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
    )


def test_components_are_weighted_and_logged_apart() -> None:
    metrics = Metrics()
    t = trajectory((Reward("outcome", 1.0), Reward("milestone", 0.0)))
    weights = {"outcome": 0.7, "milestone": 0.3}
    assert compose_value(t, weights, metrics=metrics).value == pytest.approx(0.7)
    assert metrics["reward/total"] == pytest.approx(0.7)
    assert (metrics["reward/outcome"], metrics["reward/milestone"]) == (1.0, 0.0)


def test_mean_reward_counts_trajectories_not_turns() -> None:
    metrics = Metrics()
    for turns, value in ((2, 1.0), (8, 0.0)):
        t = trajectory(*[()] * (turns - 1), (Reward("outcome", value),))
        compose_value(t, {"outcome": 1.0}, metrics=metrics)
    assert metrics["reward/total"] == 0.5


def test_rewards_stay_on_the_segment_that_earned_them() -> None:
    t = trajectory((Reward("milestone", 0.5),), (Reward("milestone", 0.5), Reward("outcome", 1.0)))
    composed = compose(t, {"outcome": 1.0, "milestone": 0.2})
    assert composed is not None
    np.testing.assert_allclose(composed, [0.0, 0.1, 1.1])


def test_a_missing_component_is_absent_with_its_cause_and_not_zero() -> None:
    t = trajectory((), outcome=Outcome(status="failed", cause="env"))
    assert compose_value(t, {"outcome": 1.0}) == Reward.absent("total", "env")
    composed = compose(t, {"outcome": 1.0})
    assert composed is not None
    assert np.isnan(composed).any()
    assert compose_value(trajectory(()), {"outcome": 1.0}) == Reward.absent("total", "not_scored")
    assert compose(trajectory(), {"outcome": 1.0}) is None


@pytest.mark.parametrize(
    ("outcomes", "reason"),
    [
        ([1.0, 0.0], None),
        ([1.0, 0.0, None], None),
        ([1.0, 1.0], "all_same"),
        ([0.1 + 0.2, 0.3], "all_same"),
        ([1.0, None], "too_small"),
        ([None, None], "all_absent"),
    ],
)
def test_a_group_whose_rewards_do_not_vary_has_no_signal_and_says_why(
    outcomes: list[float | None], reason: str | None
) -> None:
    group = [trajectory(() if value is None else (Reward("outcome", value),)) for value in outcomes]
    assert signal_reason(group, {"outcome": 1.0}) == reason


def test_the_signal_may_be_one_component_of_the_sum() -> None:
    group = [trajectory((Reward("outcome", 1.0), Reward("milestone", m))) for m in (0.0, 0.5)]
    weights = {"outcome": 1.0, "milestone": 0.2}
    assert signal_reason(group, weights) is None
    assert signal_reason(group, weights, "milestone") is None
    assert signal_reason(group, weights, "outcome") == "all_same"
