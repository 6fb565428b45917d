"""Who solves arithmetic: an expert with the calculator, and a demonstrator that sometimes guesses instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3rl.envs.base import AssistantAction, Message, ToolCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

SLIPS: dict[str, float] = {"guess": 0.5}
"""``guess``: probability to answer a random number without a calculation."""


class ArithmeticPlayer:
    """Gives ``expression`` to the calculator and answers what it says."""

    def __init__(
        self, expression: str, rng: np.random.Generator | None = None, slips: Mapping[str, float] | None = None
    ) -> None:
        unknown = set(slips or {}) - set(SLIPS)
        if unknown:
            raise ValueError(f"no slip {sorted(unknown)}; there are {', '.join(SLIPS)}")
        self._expression = expression
        self._rng = rng
        self._slips = slips or {}

    def act(self, history: Sequence[Message]) -> AssistantAction:
        """Calculate first, then answer."""
        results = [message.content for message in history if message.role == "tool"]
        if results:
            return AssistantAction(answer=results[-1])
        if self._rng is not None and self._rng.random() < self._slips.get("guess", 0.0):
            return AssistantAction(answer=str(int(self._rng.integers(1000))))
        return AssistantAction(calls=(ToolCall(name="calc", arguments={"expression": self._expression}),))
