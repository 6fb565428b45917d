"""A rollout worker: one engine, its environments, and the agent loop. Runs as a Ray actor or in process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3rl.buffer.store import Store
from k3rl.rollout.agent_loop import AgentLoop, EpisodeSpec
from k3rl.rollout.chat_format import build_chat_format
from k3rl.rollout.demonstrations import DemonstrationLoop
from k3rl.rollout.k3_engine import K3Engine
from k3rl.rollout.scoring import Scorer
from k3rl.trajectory import summarise_trajectory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from k3rl.config import RunConfig
    from k3rl.trajectory import Summary, Trajectory
    from k3rl.weights.base import WeightsHandle


class RolloutWorker:
    """Answers the controller's calls. It holds no state that a new worker could not rebuild.

    Trajectories go from here to payload files, and from there to the learner; the controller gets their summaries.
    """

    def __init__(self, config: RunConfig) -> None:
        import torch

        torch.set_num_threads(config.rollout.threads_per_worker)
        self._config = config
        self._format = build_chat_format(config)
        self._scorer = Scorer(config)
        self._engine: K3Engine | None = None

    def update_weights(self, weights: WeightsHandle) -> str:
        """Take new weights and return their digest, computed from what was received."""
        if self._engine is None:
            self._engine = K3Engine(self._config.model, weights.version, weights.read())
        else:
            self._engine.update_weights(weights.version, weights.read())
        return self._engine.version.digest

    def rollout(
        self, specs: Sequence[EpisodeSpec], temperature: float, seed: int, folder: Path | None = None
    ) -> list[Summary]:
        """Play episodes with the current weights; temperature 0 is greedy. Payloads go to ``folder``, if given."""
        assert self._engine is not None, "update_weights comes first"
        loop = AgentLoop(self._engine, self._format, self._config.environment, seed)
        return self._finish(loop.run(specs, temperature), folder)

    def demonstrate(self, specs: Sequence[EpisodeSpec], folder: Path | None = None) -> list[Summary]:
        """Play episodes with the environment's demonstrator."""
        loop = DemonstrationLoop(self._format, self._config.environment, self._config.seed)
        return self._finish(loop.run(specs), folder)

    def _finish(self, trajectories: Sequence[Trajectory], folder: Path | None) -> list[Summary]:
        scored = self._scorer.score(trajectories)
        uri, digest = "", ""
        if folder is not None and scored:
            uri, digest = Store(folder).write([trajectory for trajectory, _ in scored])
        return [
            summarise_trajectory(t, self._scorer.components, reward_errors=errors, uri=uri, digest=digest)
            for t, errors in scored
        ]
