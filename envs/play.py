"""Let a scripted policy play an episode: for tests, and for demonstrations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3rl.envs.base import AssistantAction, Message, StepInfo

if TYPE_CHECKING:
    from k3rl.envs.base import Player
    from k3rl.trajectory import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """A played episode. ``messages`` include the policy's own; ``reward`` is the sum over steps of every component."""

    messages: tuple[Message, ...]
    actions: tuple[AssistantAction, ...]
    infos: tuple[StepInfo, ...]
    reward: float
    terminated: bool

    def total(self, component: str) -> float:
        """Sum of the rewards called ``component``; absent ones count nothing."""
        return sum(r.value or 0.0 for info in self.infos for r in info.rewards if r.name == component)


def play(env: Any, policy: Player | None, task: Task, max_turns: int = 32) -> Episode:
    """Play ``task`` with ``policy`` (None: the environment's expert) until it ends or ``max_turns`` are used."""
    observation, _ = env.reset(options={"task": task})
    player: Player = policy or env.unwrapped.expert()
    messages, actions, infos = list(observation), [], []
    reward, terminated = 0.0, False
    for _ in range(max_turns):
        action = player.act(messages)
        actions.append(action)
        messages.append(Message(role="assistant", content=action.answer or "", calls=action.calls))
        observation, earned, terminated, truncated, info = env.step(action)
        messages += observation
        infos.append(info["k3rl"])
        reward += earned
        if terminated or truncated:
            break
    return Episode(
        messages=tuple(messages), actions=tuple(actions), infos=tuple(infos), reward=reward, terminated=terminated
    )
