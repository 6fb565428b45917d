"""Demonstrations for supervised fine-tuning: an environment's demonstrator, rendered as trajectories."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from k3rl.envs.registry import make
from k3rl.trajectory import Outcome, PolicyVersion, Reward, Segment, SegmentKind, Trajectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3rl.config import EnvironmentConfig
    from k3rl.rollout.agent_loop import EpisodeSpec
    from k3rl.rollout.chat_format import ChatFormat

DEMONSTRATOR = PolicyVersion(incarnation=0, step=-1, digest="demonstrator")
"""Stands for whoever demonstrates. Its logprobs are recorded as 0 (certain): nothing but imitation may use them."""


def demonstrate(
    specs: Sequence[EpisodeSpec], chat_format: ChatFormat, config: EnvironmentConfig, run_seed: int
) -> list[Trajectory]:
    """Let the environment's demonstrator play each episode, slips included."""
    return [_demonstrate_one(spec, chat_format, config, run_seed) for spec in specs]


def _demonstrate_one(
    spec: EpisodeSpec, chat_format: ChatFormat, config: EnvironmentConfig, run_seed: int
) -> Trajectory:
    env: Any = make(config.id, **config.options)
    segments: list[Segment] = []

    def append(kind: SegmentKind, ids: list[int]) -> None:
        n = len(ids)
        is_action = kind == "action"
        last = len(segments) - 1 if segments else None
        segments.append(
            Segment(
                kind=kind,
                token_ids=np.asarray(ids, dtype=np.int32),
                context=last,
                follows=last,
                rollout_logprobs=np.zeros(n, dtype=np.float32) if is_action else None,
                version_index=np.zeros(n, dtype=np.int32) if is_action else None,
                stop_reason="stop" if is_action else None,
            )
        )

    try:
        observation, _ = env.reset(options={"task": spec.task})
        policy = env.unwrapped.demonstrator(np.random.default_rng(spec.seed(run_seed, "demonstrator")))
        append("prompt", chat_format.render_prompt(observation, env.unwrapped.tool_schemas))
        history = list(observation)
        outcome = Outcome(status="truncated", limit="max_turns")
        for _ in range(config.max_turns):
            action = policy.act(history)
            turn = chat_format.render_action(action)
            room = config.max_episode_tokens - sum(len(segment) for segment in segments)
            if len(turn) > min(config.max_tokens_per_turn, room):
                # The policy could not play this; it must not be taught to.
                limit = "context_full" if len(turn) > room else "turn_tokens"
                outcome = Outcome(status="truncated", limit=limit)
                break
            append("action", turn)
            observation, _, terminated, truncated, info = env.step(action)
            segments[-1] = replace(segments[-1], rewards=tuple(info["k3rl"].rewards))
            if terminated:
                outcome = Outcome(status="completed")
                break
            history += observation
            append("observation", chat_format.render_observation(observation))
            if truncated:
                outcome = Outcome(status="truncated", limit="environment")
                break
        if outcome.status == "truncated" and not any(r.name == "outcome" for s in segments for r in s.rewards):
            # As in the agent loop: what was cut before it was graded is not done.
            at = max((i for i, segment in enumerate(segments) if segment.kind == "action"), default=0)
            segments[at] = replace(segments[at], rewards=(*segments[at].rewards, Reward("outcome", 0.0)))
    finally:
        env.close()
    return Trajectory(key=spec.key, task=spec.task, segments=tuple(segments), outcome=outcome, versions=(DEMONSTRATOR,))
