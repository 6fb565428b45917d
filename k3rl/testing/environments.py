"""Small environments for tests, found by import path (``k3rl.testing.environments:CoinEnvironment``)."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

from k3rl.envs.base import AssistantAction, Message
from k3rl.envs.tools import ToolEnvironment, tool
from k3rl.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import numpy as np

    from k3rl.envs.base import Observation, Player
    from k3rl.trajectory import Task

_DIGITS = "0123456789"


class CoinEnvironment(ToolEnvironment):
    """Answer an even digit. Every task is the same, the demonstrator succeeds half of the time.

    The smallest task on which imitation and then reinforcement both show: a turn is three tokens, and a digit's parity
    can be learnt from the reward alone.
    """

    name = "coin"
    template_words = ("pick",)

    def start(self, task: Task, rng: np.random.Generator) -> Observation:
        self._seen = str(rng.integers(10))
        return (Message(role="user", content="pick"),)

    def grade(self, answer: str) -> float:
        return float(answer in tuple("02468"))

    def expert(self) -> Player:
        return _Answers(lambda: "4")

    def demonstrator(self, rng: np.random.Generator, slips: Mapping[str, float] | None = None) -> Player:
        return _Answers(lambda: _DIGITS[int(rng.integers(10))])

    @tool
    def look(self) -> str:
        """Show a digit; it need not be even."""
        return self._seen


class _Answers:
    """Answers at once with what ``choose`` gives."""

    def __init__(self, choose: Callable[[], str]) -> None:
        self._choose = choose

    def act(self, history: Sequence[Message]) -> AssistantAction:
        return AssistantAction(answer=self._choose())


class CountEnvironment(ToolEnvironment):
    """Count with ``more``; an answer is right when it equals the count. Each count up to 2 is a milestone.

    ``fault`` names what goes wrong in the tasks with an odd index, all others are sound: ``raise_reset``,
    ``raise_step``, ``raise_grade``, ``raise_close``, ``exit_step``, ``hang_reset``, ``hang_step``, ``no_info`` or
    ``lose_sandbox`` (in the tool). With ``faulty_episodes`` only so many episodes of a task go wrong in this process.
    ``limit`` truncates an episode after so many turns.
    """

    name = "count"
    template_words = ("count", "more")
    closed: ClassVar[list[int]] = []
    """Task indices of the environments that were closed, -1 for one that had no task."""
    started: ClassVar[Counter[int]] = Counter()
    """Episodes by task index."""

    def __init__(
        self, *, fault: str = "", hang_s: float = 30.0, faulty_episodes: int | None = None, limit: int | None = None
    ) -> None:
        super().__init__()
        self._fault = fault
        self._hang_s = hang_s
        self._faulty_episodes = faulty_episodes
        self._limit = limit
        self._index = -1
        self._count = self._turns = 0

    def start(self, task: Task, rng: np.random.Generator) -> Observation:
        self._index, self._count, self._turns = task.index, 0, 0
        self.started[task.index] += 1
        if self._faulty_episodes is not None and self.started[task.index] > self._faulty_episodes:
            self._fault = ""
        self._fail_at("reset")
        return (Message(role="user", content=f"count {task.index}"),)

    def step(self, action: AssistantAction) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self._fail_at("step")
        observation, reward, terminated, truncated, info = super().step(action)
        if self._fault == "no_info" and self._index % 2:
            info = {}
        self._turns += 1
        truncated = not terminated and self._turns == self._limit
        return observation, reward, terminated, truncated, info

    def grade(self, answer: str) -> float:
        self._fail_at("grade")
        return float(answer == str(self._count))

    def milestone_names(self) -> Collection[str]:
        return ("one", "two")

    def milestones(self) -> Collection[str]:
        return ("one", "two")[: self._count]

    def close(self) -> None:
        self.closed.append(self._index)
        self._fail_at("close")

    def expert(self) -> Player:
        return _Answers(lambda: "0")

    @tool
    def more(self) -> str:
        """Count one more."""
        if self._fault == "lose_sandbox" and self._index % 2:
            raise SandboxError("the sandbox is gone")
        self._count += 1
        return str(self._count)

    def _fail_at(self, where: str) -> None:
        if self._index % 2 == 0:
            return
        if self._fault == f"raise_{where}":
            raise OSError(f"{where} broke")
        if self._fault == f"exit_{where}":
            raise SystemExit(3)
        if self._fault == f"hang_{where}":
            time.sleep(self._hang_s)
