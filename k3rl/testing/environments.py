"""Small environments for tests, found by import path (``k3rl.testing.environments:CoinEnvironment``)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from k3rl.envs.base import AssistantAction, Message, ToolCall
from k3rl.envs.tools import ToolEnvironment, ToolError, tool

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import numpy as np

    from k3rl.envs.base import Observation, Policy
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

    def expert(self) -> Policy:
        return _Answers(lambda: "4")

    def demonstrator(self, rng: np.random.Generator, slips: Mapping[str, float] | None = None) -> Policy:
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
