"""A rollout worker: one engine, its environments, and the agent loop. Runs as a Ray actor or in process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3rl.rollout.agent_loop import AgentLoop, EpisodeSpec
from k3rl.rollout.chat_format import build_chat_format
from k3rl.rollout.demonstrations import DemonstrationLoop
from k3rl.rollout.k3_engine import K3Engine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from k3rl.config import RunConfig
    from k3rl.trajectory import PolicyVersion, Trajectory


class RolloutWorker:
    """Answers the controller's calls. It holds no state that a new worker could not rebuild."""

    def __init__(self, config: RunConfig) -> None:
        import torch

        torch.set_num_threads(config.rollout.threads_per_worker)
        self._config = config
        self._format = build_chat_format(config)
        self._engine: K3Engine | None = None

    def update_weights(self, version: PolicyVersion, tensors: Mapping[str, torch.Tensor]) -> str:
        """Take new weights and return their digest, computed from what was received."""
        if self._engine is None:
            self._engine = K3Engine(self._config.model, version, tensors)
        else:
            self._engine.update_weights(version, tensors)
        return self._engine.version.digest

    def rollout(self, specs: Sequence[EpisodeSpec], temperature: float, seed: int) -> list[Trajectory]:
        """Play episodes with the current weights. Temperature 0 is greedy."""
        assert self._engine is not None, "update_weights comes first"
        loop = AgentLoop(self._engine, self._format, self._config.environment, seed)
        return loop.run(specs, temperature)

    def demonstrate(self, specs: Sequence[EpisodeSpec]) -> list[Trajectory]:
        """Play episodes with the environment's demonstrator."""
        return DemonstrationLoop(self._format, self._config.environment, self._config.seed).run(specs)
