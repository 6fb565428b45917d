"""The environment API: gymnasium's ``Env`` over messages.

An observation is a tuple of *new* messages, never the history. An action is an :class:`AssistantAction`: tool calls, an
answer, or the error of a parser. ``info["k3rl"]`` is a :class:`StepInfo`; the float reward is the sum of its rewards.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import gymnasium
import numpy as np
from gymnasium import spaces

from k3rl.trajectory import Reward, Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Role = Literal["system", "user", "assistant", "tool"]
SPLITS = ("train", "validation", "test")
_SPLIT_OF_RESIDUE = (*("train",) * 6, "validation", "test")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the policy made it: any name, arguments not yet validated."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    invalid_json: str | None = None
    """In a recorded conversation, arguments that no parser could read; they stand in place of ``arguments``."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message. ``tool`` names the tool that a ``tool`` message comes from; ``calls`` belong to ``assistant``.

    The rest is for conversations that were recorded elsewhere: see ``k3rl.rollout.conversation``.
    """

    role: Role
    content: str = ""
    tool: str | None = None
    calls: tuple[ToolCall, ...] = ()
    text: str = ""
    """The reasoning of an ``assistant`` message, as in :class:`AssistantAction`."""
    name: str | None = None
    """Who of several speaks, in a ``user`` or ``system`` message."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of tools that a ``system`` message adds to those declared so far."""


@dataclass(frozen=True, slots=True)
class ParseError:
    """Why sampled text is no action: data for the episode, not an exception."""

    kind: str
    message: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class AssistantAction:
    """What the policy did: calls (run in order), then an answer (ends the episode), or a parser's error."""

    calls: tuple[ToolCall, ...] = ()
    answer: str | None = None
    error: ParseError | None = None
    text: str = ""

    @staticmethod
    def of(message: Message) -> AssistantAction:
        """The action that an ``assistant`` message reports. Empty content is an answer where there are no calls."""
        answer = message.content if message.content or not message.calls else None
        return AssistantAction(calls=message.calls, answer=answer, text=message.text)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInfo:
    """What one step earned and counted."""

    rewards: tuple[Reward, ...] = ()
    tool_calls: int = 0
    invalid_calls: int = 0
    """Calls that no tool ran, or that failed; an unparsable or empty action counts as one."""
    milestones: tuple[str, ...] = ()
    """Milestones reached for the first time in this step."""


Observation = tuple[Message, ...]


class Player(Protocol):
    """A scripted player."""

    def act(self, history: Sequence[Message]) -> AssistantAction:
        """Choose the next action given every message so far (the policy's own need not be among them)."""
        ...


class MessageSpace(spaces.Space[Observation]):
    """Tuples of messages."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> Observation:
        """Draw a tuple of one user message of a few letters."""
        return (Message(role="user", content=_letters(self.np_random)),)

    def contains(self, x: Any) -> bool:
        """Tell whether ``x`` is a tuple of messages."""
        return isinstance(x, tuple) and all(isinstance(m, Message) for m in x)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    __hash__ = None  # type: ignore[assignment]


class ActionSpace(spaces.Space[AssistantAction]):
    """Assistant actions; samples call one of ``tools`` (schemas) with random text."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = (), seed: int | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)
        self._parameters = {t["name"]: tuple(t["parameters"].get("properties", {})) for t in tools}

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> AssistantAction:
        """Draw a call of a known tool with random strings as arguments; an answer where there are no tools."""
        if not self._parameters:
            return AssistantAction(answer=_letters(self.np_random))
        names = list(self._parameters)
        name = names[int(self.np_random.integers(len(names)))]
        arguments = {p: _letters(self.np_random) for p in self._parameters[name]}
        return AssistantAction(calls=(ToolCall(name=name, arguments=arguments),))

    def contains(self, x: Any) -> bool:
        """Tell whether ``x`` is an action."""
        return isinstance(x, AssistantAction)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActionSpace) and self._parameters == other._parameters

    __hash__ = None  # type: ignore[assignment]


class MessageEnvironment(gymnasium.Env[Observation, AssistantAction]):
    """Base of environments over messages: finds the task of an episode and the random stream of a task."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium declares it so
    name: str = "environment"

    def choose_task(self, seed: int | None, options: Mapping[str, Any] | None) -> Task:
        """``options["task"]``, or row ``seed`` (random without one) of split ``options["split"]`` (default train).

        Raises:
            ValueError: the split is none of SPLITS.
        """
        options = options or {}
        task = options.get("task")
        if task is None:
            index = int(self.np_random.integers(2**31)) if seed is None else seed
            task = Task(environment=self.name, split=options.get("split", "train"), index=index)
        if task.split not in SPLITS:
            raise ValueError(f"no split {task.split!r}; there are {', '.join(SPLITS)}")
        return task

    def task_rng(self, task: Task) -> np.random.Generator:
        """The stream of a task: depends on environment class, split and index alone."""
        text = f"{self.name}/{task.split}/{task.index}"
        return np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def split_of(content: str) -> str:
    """The split that ``content`` belongs to: by hash, so no content is in two splits (6/8, 1/8, 1/8)."""
    return _SPLIT_OF_RESIDUE[hashlib.blake2s(content.encode(), digest_size=1).digest()[0] % 8]


def _letters(rng: np.random.Generator) -> str:
    return "".join(chr(97 + int(i)) for i in rng.integers(26, size=5))
