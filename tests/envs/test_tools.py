from typing import Any

import gymnasium
import numpy as np

from k3rl.envs.base import AssistantAction, Message, ToolCall
from k3rl.envs.tools import ToolEnvironment, tool
from k3rl.trajectory import Task


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
    def fail(self) -> str:
        """Fail."""
        raise RuntimeError("x" * 10_000)


def step(env: Counter, tool_name: str, **arguments: Any) -> str:
    return env.step(AssistantAction(calls=(ToolCall(name=tool_name, arguments=arguments),)))[0][0].content


def test_arguments_reach_the_tool_without_loss() -> None:
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
