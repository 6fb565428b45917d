"""Evaluation reports pool episodes and state their uncertainty."""

from __future__ import annotations

import pytest

from k3rl.errors import EnvError
from k3rl.evaluation.report import report, wilson_interval
from k3rl.testing.records import make_summary
from k3rl.trajectory import Summary, TrajectoryKey


def episode(index: int, outcome: float | None, calls: int, invalid: int, turns: int = 1) -> Summary:
    stats = {"tool_calls": calls, "invalid_calls": invalid}
    return make_summary(TrajectoryKey(ordinal=index, sample=0), outcome=outcome, num_turns=turns, stats=stats)


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_the_wilson_interval_has_its_published_values(successes: int, total: int, low: float, high: float) -> None:
    assert wilson_interval(successes, total) == pytest.approx((low, high), abs=1e-4)


def test_nothing_scored_tells_nothing() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_an_episode_that_infrastructure_failed_is_no_failure_of_the_policy() -> None:
    found = report([episode(0, 1.0, 2, 0), episode(1, None, 0, 0)])
    assert (found.success, found.num_tasks, found.num_failed) == (1.0, 2, 1)


def test_b10_call_validity_is_pooled_over_calls_and_turns_over_episodes() -> None:
    found = report([episode(0, 1.0, 1, 1, turns=2), episode(1, 0.0, 9, 0, turns=8)])
    assert found.valid_call_frac == pytest.approx(0.9)
    assert found.success == 0.5
    assert found.turns == 5.0


def test_an_evaluation_in_which_nothing_was_scored_is_an_error_and_not_zero() -> None:
    with pytest.raises(EnvError, match="not one of 2 episodes was scored"):
        report([episode(0, None, 0, 0), episode(1, None, 0, 0)])
