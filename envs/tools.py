"""Environments whose tools are typed, documented methods.

Nothing that a policy does raises: an unknown tool, bad arguments, a failing tool and text that no parser could read all
become observations that begin with ``error <kind>``. Only :class:`~k3rl.errors.EnvError` (the environment's own fault)
leaves ``step``.

Example:
    >>> class Echo(ToolEnvironment):
    ...     def start(self, task, rng): return (Message(role="user", content="say hi"),)
    ...     def grade(self, answer): return float(answer == "hi")
    ...     @tool
    ...     def echo(self, text: str) -> str:
    ...         "Return the text."
    ...         return text
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from k3rl.envs.base import (
    ActionSpace,
    AssistantAction,
    Message,
    MessageEnvironment,
    MessageSpace,
    Observation,
    Player,
    StepInfo,
    ToolCall,
)
from k3rl.envs.schema import ArgumentError, Parameters
from k3rl.errors import EnvError, RewardError, SandboxError
from k3rl.trajectory import Reward, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import numpy as np

_Method = TypeVar("_Method", bound="Callable[..., Any]")
_MAX_NAME_CHARS = 40


class ToolError(Exception):
    """Raised by a tool to tell the policy what it did wrong; the text is the observation."""


def tool(method: _Method) -> _Method:
    """Mark a method as a tool. Its docstring is the description, its typed parameters are the schema.

    Raises:
        TypeError: the method has no docstring.
    """
    if not inspect.getdoc(method):
        raise TypeError(f"tool {method.__name__} has no docstring: the policy reads it")
    method.__k3rl_tool__ = True  # type: ignore[attr-defined]
    return method


@dataclass(frozen=True, slots=True)
class _Tool:
    name: str
    description: str
    parameters: Parameters


class ToolEnvironment(MessageEnvironment):
    """One episode at a time; instances share nothing that changes.

    Subclasses give ``start`` and ``grade``; those with dense rewards also ``milestones`` and ``milestone_names``.
    """

    _tools: ClassVar[dict[str, _Tool]] = {}
    template_words: tuple[str, ...] = ()
    """Words of the environment's texts that are worth a token of their own."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        tools = dict(cls._tools)
        for name, method in vars(cls).items():
            if getattr(method, "__k3rl_tool__", False):
                tools[name] = _Tool(name, inspect.getdoc(method) or "", Parameters(method))
        cls._tools = tools

    def __init__(self, *, max_output_chars: int = 4000) -> None:
        self.action_space = ActionSpace(self.tool_schemas)
        self.observation_space = MessageSpace()
        self._max_output_chars = max_output_chars
        self._reached: set[str] = set()
        self._playing = False

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """Name, description and JSON schema of the parameters of every tool, in order of definition."""
        return [
            {"name": t.name, "description": t.description, "parameters": t.parameters.schema}
            for t in self._tools.values()
        ]

    def start(self, task: Task, rng: np.random.Generator) -> Observation:
        """Begin the episode of ``task`` from nothing; all randomness comes from ``rng``."""
        raise NotImplementedError(f"{type(self).__name__} must define start")

    def grade(self, answer: str) -> float:
        """Score an answer, given the state of the episode; in 0..1."""
        raise NotImplementedError(f"{type(self).__name__} must define grade")

    def milestone_names(self) -> Collection[str]:
        """Milestones that this task has; empty when the environment has no dense reward."""
        return ()

    def milestones(self) -> Collection[str]:
        """Milestones reached so far; each is worth 1 / number of names, once."""
        return ()

    def expert(self) -> Player:
        """A policy that solves the task; it sees messages only."""
        raise NotImplementedError(f"{type(self).__name__} must define expert")

    def demonstrator(self, rng: np.random.Generator, slips: Mapping[str, float] | None = None) -> Player:
        """An imperfect policy; ``slips`` are probabilities by name (None: the environment's)."""
        return self.expert()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start the task of ``options["task"]``, or row ``seed`` of split ``options["split"]``."""
        super().reset(seed=seed)
        task = self.choose_task(seed, options)
        self._reached, self._playing = set(), True
        return self.start(task, self.task_rng(task)), {"k3rl": StepInfo(), "task": task}

    def step(self, action: AssistantAction) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Run the calls in order, then grade the answer, which ends the episode.

        Raises:
            EnvError: there is no episode to step, or the environment itself failed.
            RewardError: ``grade`` failed, so nobody knows what the answer is worth.
        """
        if not self._playing:
            raise EnvError("no episode is running: call reset first")
        observation, num_calls, num_invalid = self._respond(action)
        new = tuple(m for m in self.milestones() if m not in self._reached)
        self._reached.update(new)
        rewards: list[Reward] = []
        if names := self.milestone_names():
            rewards.append(Reward("milestone", len(new) / len(names)))
        terminated = action.error is None and action.answer is not None
        if terminated:
            rewards.append(self._graded(action.answer or ""))
        self._playing = not terminated
        info = StepInfo(rewards=tuple(rewards), tool_calls=num_calls, invalid_calls=num_invalid, milestones=new)
        total = float(sum(r.value or 0.0 for r in rewards))
        return observation, total, terminated, False, {"k3rl": info}

    def _graded(self, answer: str) -> Reward:
        try:
            return Reward("outcome", float(self.grade(answer)))
        except EnvError:
            raise
        except Exception as error:
            raise RewardError(f"grade: {type(error).__name__}: {error}") from error

    def _respond(self, action: AssistantAction) -> tuple[Observation, int, int]:
        """Messages that answer the action, number of calls, number of invalid ones (no action at all is one)."""
        if action.error is not None:
            return (self._error(None, action.error.kind, action.error.message),), 1, 1
        if not action.calls and action.answer is None:
            return (self._error(None, "empty_action", "call a tool or answer"),), 1, 1
        results = [self._call(call) for call in action.calls]
        return tuple(m for m, _ in results), len(results), sum(not valid for _, valid in results)

    def _call(self, call: ToolCall) -> tuple[Message, bool]:
        found = self._tools.get(call.name)
        if found is None:
            shown = call.name if len(call.name) <= _MAX_NAME_CHARS else call.name[:_MAX_NAME_CHARS] + "..."
            return self._error(None, "unknown_tool", f"{shown!r}; tools: {', '.join(self._tools)}"), False
        try:
            arguments = found.parameters.validate(call.arguments)
        except ArgumentError as error:
            return self._error(found.name, "bad_arguments", str(error)), False
        try:
            content = str(getattr(self, found.name)(**arguments))
        except (EnvError, SandboxError):
            raise
        except ToolError as error:
            return Message(role="tool", content=self._cap(str(error)), tool=found.name), False
        except Exception as error:
            # A tool's fault is what the policy sees next; it does not cost the run.
            return self._error(found.name, "tool_failed", f"{type(error).__name__}: {error}"), False
        return Message(role="tool", content=self._cap(content), tool=found.name), True

    def _error(self, name: str | None, kind: str, text: str) -> Message:
        return Message(role="tool", content=self._cap(f"error {kind} {text}"), tool=name)

    def _cap(self, text: str) -> str:
        """Cut the middle out of a text that is too long: the tail often says how it ended."""
        limit = self._max_output_chars
        if len(text) <= limit:
            return text
        head, tail = limit - limit // 4, limit // 4
        return f"{text[:head]}\n[{len(text) - head - tail} characters cut]\n{text[len(text) - tail :]}"
