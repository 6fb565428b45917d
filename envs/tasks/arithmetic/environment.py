"""Arithmetic from reasoning-gym (imported on first use), with a calculator; reasoning-gym scores the answer.

A question's hash decides its split: no question is in two splits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from k3rl.envs.base import Message, Observation, split_of
from k3rl.envs.calculator import CalculatorError, calculate
from k3rl.envs.tasks.arithmetic.expert import SLIPS, ArithmeticPlayer
from k3rl.envs.tools import ToolEnvironment, ToolError, tool
from k3rl.errors import EnvError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from k3rl.trajectory import Task

DATASETS = ("chain_sum", "basic_arithmetic", "products", "leg_counting")
"""Problems that come down to one expression; ``leg_counting`` is the word problem."""
_MAX_DRAWS = 1000


def _vocabulary_words() -> tuple[str, ...]:
    """Words of tools and results."""
    return ("calc", "error", "none")


class ArithmeticEnvironment(ToolEnvironment):
    """One problem an episode; the outcome is reasoning-gym's score, in 0..1."""

    name = "arithmetic"
    template_words = _vocabulary_words()

    def __init__(
        self, *, datasets: Sequence[str] = DATASETS, slips: Mapping[str, float] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        unknown = set(datasets) - set(DATASETS)
        if unknown or not datasets:
            raise ValueError(f"no datasets {sorted(unknown)}; there are {', '.join(DATASETS)}")
        self._datasets = tuple(datasets)
        self._slips = {**SLIPS, **(slips or {})}
        ArithmeticPlayer("0", slips=self._slips)  # refuses unknown slips now, not in the first demonstration
        self._problem: dict[str, Any] = {}
        self._source: Any = None

    def start(self, task: Task, rng: np.random.Generator) -> Observation:
        """Draw problems until one belongs to the task's split and has a right gold answer.

        basic_arithmetic cuts some quotients to whole numbers (about one problem in sixty): those are left out.
        """
        import reasoning_gym

        for _ in range(_MAX_DRAWS):
            name = self._datasets[int(rng.integers(len(self._datasets)))]
            source = reasoning_gym.create_dataset(name, size=1, seed=int(rng.integers(2**31)))
            problem = source[0]
            if split_of(problem["question"]) == task.split and _is_sound(source, problem):
                self._source, self._problem = source, problem
                return (Message(role="user", content=problem["question"]),)
        raise EnvError(f"no problem of split {task.split} among {_MAX_DRAWS}")

    def grade(self, answer: str) -> float:
        """The score of reasoning-gym."""
        return float(self._source.score_answer(answer=answer, entry=self._problem))

    def expert(self) -> ArithmeticPlayer:
        """Calculate what the question comes down to."""
        return ArithmeticPlayer(_expression(self._problem["metadata"]))

    def demonstrator(self, rng: np.random.Generator, slips: Mapping[str, float] | None = None) -> ArithmeticPlayer:
        """Guess with probability ``slips["guess"]``, else do as the expert."""
        return ArithmeticPlayer(_expression(self._problem["metadata"]), rng, self._slips if slips is None else slips)

    @tool
    def calc(self, expression: str) -> str:
        """Evaluate an arithmetic expression such as (3+4)*45."""
        try:
            return calculate(expression)
        except CalculatorError as error:
            raise ToolError(f"error {error}") from None


def _is_sound(source: Any, problem: Mapping[str, Any]) -> bool:
    try:
        value = calculate(_expression(problem["metadata"]))
    except CalculatorError:
        return False
    return source.score_answer(answer=value, entry=problem) == 1.0


def _expression(metadata: Mapping[str, Any]) -> str:
    """The expression that a problem comes down to; a word problem's is made of what the animals have."""
    if "expression" in metadata:
        return metadata["expression"]
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    return "+".join(f"{count}*{ANIMALS[animal]}" for animal, count in metadata["animals"].items())
