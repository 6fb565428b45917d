import datetime
import enum
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from k3rl.envs.base import AssistantAction, Message, ToolCall
from k3rl.envs.tools import ToolEnvironment, tool
from k3rl.trajectory import Task


class Colour(enum.Enum):
    RED = "red"


class Counter(ToolEnvironment):
    """Counts, and shows what its tools are given."""

    def start(self, task: Task, rng: np.random.Generator) -> tuple[Message, ...]:
        self.count = 0
        return (Message(role="user", content="count to 4"),)

    def grade(self, answer: str) -> float:
        return float(answer == str(self.count))

    @tool
    def increase(self) -> int:
        """Add one."""
        self.count += 1
        return self.count

    @tool
    def show(self, number: int | None = None, text: int | str = "", flag: bool = False) -> str:
        """Show the arguments."""
        return repr((number, text, flag))

    @tool
    def paint(self, colour: Colour, at: tuple[int, int], day: datetime.date) -> str:
        """Show what JSON has no form of its own for."""
        return repr((colour, at, day))

    @tool
    def fail(self) -> str:
        """Fail."""
        raise RuntimeError("x" * 10_000)


def step(env: Counter, tool_name: str, **arguments: Any) -> str:
    return env.step(AssistantAction(calls=(ToolCall(name=tool_name, arguments=arguments),)))[0][0].content


def test_enumerations_tuples_and_dates_are_made_of_what_json_says() -> None:
    env = Counter()
    env.reset(options={"task": Task(environment="", split="train", index=0)})
    found = step(env, "paint", colour="red", at=[1, 2], day="2026-12-01")
    assert found == repr((Colour.RED, (1, 2), datetime.date(2026, 12, 1)))
    assert "colour" in step(env, "paint", colour="blue", at=[1, 2], day="2026-12-01")


def test_b30_arguments_reach_the_tool_without_loss() -> None:
    env = Counter()
    env.reset(seed=0)
    assert step(env, "show", number="42", text="007", flag=1) == "(42, '007', True)"
    assert step(env, "show", number=None) == "(None, '', False)"
    assert step(env, "show", number="2026-01-15").startswith("error bad_arguments number")
    assert step(env, "show", number=float("inf")).startswith("error bad_arguments number")


def test_a_failing_tool_is_an_observation_cut_in_the_middle() -> None:
    env = Counter(max_output_chars=100)
    env.reset(seed=0)
    text = step(env, "fail")
    assert text.startswith("error tool_failed RuntimeError")
    assert "characters cut" in text
    assert len(text) < 150


def test_b19_the_last_observation_is_of_the_episode_that_ends() -> None:
    env = gymnasium.wrappers.TimeLimit(Counter(), max_episode_steps=4)
    seen: list[str] = []
    for _ in range(2):
        env.reset(seed=0)
        truncated = False
        while not truncated:
            action = AssistantAction(calls=(ToolCall(name="increase"),))
            (message,), _, _, truncated, _ = env.step(action)
            seen.append(message.content)
    assert seen == ["1", "2", "3", "4"] * 2


@pytest.mark.parametrize("ending", ["truncated", "terminated"])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_b19_a_vector_of_environments_keeps_last_observations_and_plays_no_action_on_a_reset(
    mode: AutoresetMode, ending: str
) -> None:
    """Episodes of 4 steps beside episodes of 3. A reset step is sent the action that counts and ends an episode."""
    limits = (4, 3)
    made = [lambda n=n: gymnasium.wrappers.TimeLimit(Counter(), n) for n in limits]
    vector: Any = SyncVectorEnv(made, autoreset_mode=mode)
    vector.reset(seed=0)
    next_observations: list[list[str]] = [[], []]
    is_reset_step = [False, False]
    while min(len(seen) for seen in next_observations) < 8:
        actions = [
            AssistantAction(
                calls=(ToolCall(name="increase"),),
                answer="4" if ending == "terminated" and (is_reset or len(seen) % limit == limit - 1) else None,
            )
            for seen, limit, is_reset in zip(next_observations, limits, is_reset_step, strict=True)
        ]
        observations, _, terminated, truncated, infos = vector.step(tuple(actions))
        for n, seen in enumerate(next_observations):
            is_done = bool(terminated[n] or truncated[n])
            if is_reset_step[n]:
                assert [m.content for m in observations[n]] == ["count to 4"]
                assert not is_done
            else:
                shows_next_episode = is_done and mode is AutoresetMode.SAME_STEP
                (message,) = infos["final_obs"][n] if shows_next_episode else observations[n]
                seen.append(message.content)
                assert is_done == (len(seen) % limits[n] == 0)
            is_reset_step[n] = is_done and mode is AutoresetMode.NEXT_STEP
    vector.close()
    for seen, limit in zip(next_observations, limits, strict=True):
        assert seen == [str(1 + i % limit) for i in range(len(seen))]
