"""Who solves arithmetic: an expert that is handed the gold answer, and one that slips."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3rl.envs.base import AssistantAction, Message

if TYPE_CHECKING:
    from collections.abc import Sequence

SLIPS: dict[str, float] = {"wrong": 0.5}
"""Probability that the demonstrator answers one that is wrong."""


class ArithmeticPolicy:
    """Answers ``answer``."""

    def __init__(self, answer: str) -> None:
        self._answer = answer

    def act(self, history: Sequence[Message]) -> AssistantAction:
        """Answer at once."""
        return AssistantAction(answer=self._answer)
