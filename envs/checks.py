"""Conformance of an environment: what training relies on."""

from __future__ import annotations

import itertools
from typing import Any

from gymnasium.utils.env_checker import check_env

from k3rl.envs.base import SPLITS, Message
from k3rl.envs.play import Episode, play
from k3rl.envs.registry import make
from k3rl.errors import EnvError
from k3rl.trajectory import Task


def check_environment(id: str, num_tasks: int = 5, **options: Any) -> None:
    """Check gymnasium's API, determinism, that the expert solves it, no shared state, and disjoint splits.

    Raises:
        EnvError: says which property does not hold.
        AssertionError: one of gymnasium's own checks failed.
    """
    env = make(id, **options).unwrapped
    try:
        check_env(env, skip_render_check=True)
        first = [_solve(env, id, split, i) for split in SPLITS for i in range(num_tasks)]
        again = [_solve(env, id, split, i) for split in SPLITS for i in range(num_tasks)]
    finally:
        env.close()
    _require(first == again, id, "the same task played twice differs")
    for episode in first:
        _require(episode.terminated and episode.total("outcome") == 1.0, id, "the expert does not solve every task")
    starts = [{_prompt(e) for e in first[i * num_tasks : (i + 1) * num_tasks]} for i in range(3)]
    _require(not any(starts[a] & starts[b] for a in range(3) for b in range(a)), id, "two splits share a task")
    _check_no_shared_state(id, num_tasks, options, first)


def _check_no_shared_state(id: str, num_tasks: int, options: dict[str, Any], alone: list[Episode]) -> None:
    """Step several instances in turn; each must say and earn what it did alone."""
    envs = [make(id, **options) for _ in range(num_tasks)]
    said: list[list[Message]] = []
    try:
        for i, env in enumerate(envs):
            observation, _ = env.reset(options={"task": Task(environment=id, split="train", index=i)})
            said.append(list(observation))
        for turn in range(max(len(e.actions) for e in alone[:num_tasks])):
            for env, episode, messages in zip(envs, alone[:num_tasks], said, strict=True):
                if turn < len(episode.actions):
                    observation, _, _, _, info = env.step(episode.actions[turn])
                    messages += observation
                    _require(info["k3rl"] == episode.infos[turn], id, "instances share state")
        for episode, messages in zip(alone[:num_tasks], said, strict=True):
            heard = [m for m in episode.messages if m.role != "assistant"]
            _require(messages == heard, id, "instances share state: one observes what another does")
    finally:
        for env in envs:
            env.close()


def _prompt(episode: Episode) -> tuple[str, ...]:
    """What an episode says before anybody answers."""
    said = itertools.takewhile(lambda message: message.role != "assistant", episode.messages)
    return tuple(message.content for message in said)


def _solve(env: Any, id: str, split: str, index: int) -> Episode:
    return play(env, None, Task(environment=id, split=split, index=index))


def _require(holds: bool, id: str, what: str) -> None:
    if not holds:
        raise EnvError(f"{id}: {what}")
