"""Waiting for actors: a deadline, a name, and an error that says what happened. Ray itself is played here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ObjectLostError, RayTaskError

from k3rl.errors import CheckpointError, StarvedError, WorkerDiedError
from k3rl.runtime.cluster import wait_for

Results = dict[str, Any]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Results], list[float]]:
    """Answers by reference: a value, an error of Ray, or absent while the actor still works.

    Gives the list of the seconds that Ray would have waited in vain for as many answers as were asked for.
    """

    def set_results(results: Results) -> list[float]:
        waited: list[float] = []

        def wait(refs: Sequence[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
            assert timeout >= 0.0
            ready = [ref for ref in refs if ref in results][:num_returns]
            if len(ready) < num_returns:
                waited.append(timeout)
            return ready, [ref for ref in refs if ref not in ready]

        def get(ref: str) -> Any:
            if isinstance(results[ref], Exception):
                raise results[ref]
            return results[ref]

        monkeypatch.setattr(ray, "wait", wait)
        monkeypatch.setattr(ray, "get", get)
        return waited

    return set_results


def test_answers_come_in_the_order_of_the_questions(play: Callable[[Results], list[float]]) -> None:
    play({"b": 2, "a": 1})
    assert wait_for(["a", "b"], ["x", "y"], 1.0, "work") == [1, 2]
    assert wait_for([], [], 1.0, "work") == []


def test_b55_whoever_is_late_is_named(play: Callable[[Results], list[float]]) -> None:
    play({"a": 1})
    with pytest.raises(StarvedError, match=r"rollouts: no answer from rollout-1, rollout-2 within 0\.5 s"):
        wait_for(["a", "b", "c"], ["rollout-0", "rollout-1", "rollout-2"], 0.5, "rollouts")


def test_b55_a_dead_actor_is_named_although_another_still_works(play: Callable[[Results], list[float]]) -> None:
    waited = play({"b": ActorDiedError()})
    with pytest.raises(WorkerDiedError, match=r"rollouts: rollout-1 died.*--resume"):
        wait_for(["a", "b"], ["rollout-0", "rollout-1"], 60.0, "rollouts")
    assert sum(waited) < 2.0


def test_a_lost_answer_is_an_error_of_ours(play: Callable[[Results], list[float]]) -> None:
    play({"a": ObjectLostError("0" * 56, None, "")})
    with pytest.raises(WorkerDiedError, match="answer of learner is lost"):
        wait_for(["a"], ["learner"], 60.0, "update")


def test_what_an_actor_raised_on_purpose_arrives_as_one_line(play: Callable[[Results], list[float]]) -> None:
    play({"a": RayTaskError("load", "Traceback: long", CheckpointError("no checkpoint is intact"))})
    with pytest.raises(CheckpointError) as caught:
        wait_for(["a"], ["learner"], 60.0, "load")
    assert str(caught.value) == "no checkpoint is intact"


def test_what_an_actor_raised_by_mistake_keeps_its_type_and_its_traceback(
    play: Callable[[Results], list[float]],
) -> None:
    play({"a": RayTaskError("update", "Traceback: long", KeyError("token"))})
    with pytest.raises(KeyError, match="Traceback: long"):
        wait_for(["a"], ["learner"], 60.0, "update")
