"""Demonstrations for supervised fine-tuning: an environment's demonstrator plays, slips included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from k3rl.rollout.agent_loop import Episode, EpisodeLoop
from k3rl.rollout.deadline import call_all
from k3rl.rollout.engine import Completion
from k3rl.trajectory import Outcome, PolicyVersion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3rl.envs.base import Player
    from k3rl.rollout.agent_loop import EpisodeSpec
    from k3rl.trajectory import Trajectory, TrajectoryKey

DEMONSTRATOR = PolicyVersion(incarnation=0, step=-1, digest="demonstrator")
"""Stands for whoever demonstrates. Its logprobs are recorded as 0 (certain): nothing but imitation may use them."""


class DemonstrationLoop(EpisodeLoop):
    """Plays episodes by the rules of the agent loop, with the environment's demonstrator in the policy's place."""

    def run(self, specs: Sequence[EpisodeSpec]) -> list[Trajectory]:
        """Play every episode to its end and return the trajectories in the order of ``specs``."""
        episodes = [Episode(spec=spec) for spec in specs]
        demonstrators: dict[TrajectoryKey, Player] = {}

        def turn(episode: Episode) -> list[int]:
            key = episode.spec.key
            if key not in demonstrators:
                rng = np.random.default_rng(episode.spec.seed(self._run_seed, "demonstrator"))
                demonstrators[key] = episode.env.unwrapped.demonstrator(rng)
            return self._format.render_action(demonstrators[key].act(episode.messages))

        try:
            self._start(episodes)
            while playing := [episode for episode in episodes if episode.outcome is None]:
                turns = call_all([lambda e=episode: turn(e) for episode in playing], self._config.step_timeout_s)
                self._take_turns([pair for pair in map(self._complete, playing, turns) if pair is not None])
        finally:
            self._close(episodes)
        return [episode.to_trajectory(1.0) for episode in episodes]

    def _complete(self, episode: Episode, turn: list[int] | BaseException) -> tuple[Episode, Completion] | None:
        """What the engine would have said; None when the episode ended instead."""
        if isinstance(turn, BaseException):
            self._fail(episode, turn)
            return None
        room = self._config.max_episode_tokens - len(episode.context)
        if len(turn) > min(self._config.max_tokens_per_turn, room):
            # The policy could not play this; it must not be taught to.
            limit = "context_full" if len(turn) > room else "turn_tokens"
            self._end(episode, Outcome(status="truncated", limit=limit))
            return None
        completion = Completion(
            request=0,
            token_ids=np.asarray(turn, dtype=np.int32),
            logprobs=np.zeros(len(turn), dtype=np.float32),
            versions=(DEMONSTRATOR,) * len(turn),
            stop_reason="stop",
            handle=0,
        )
        return episode, completion
