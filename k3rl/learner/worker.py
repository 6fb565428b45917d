"""A learner worker: the policy, its optimiser and its checkpoints. Runs as a Ray actor or in process."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from k3rl.buffer.store import Store
from k3rl.config import ObjectiveConfig, to_dict
from k3rl.errors import ConfigError
from k3rl.learner.update import Learner
from k3rl.model.transformer import K3Model
from k3rl.objective import Objective, resolve
from k3rl.rewards.compose import compose
from k3rl.trajectory import PolicyVersion
from k3rl.weights import object_store
from k3rl.weights.base import LocalWeights, weights_digest
from k3rl.weights.checkpoint import Checkpoint, load_latest, save
from k3rl.weights.lock import lock_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from k3rl.config import RunConfig
    from k3rl.metrics import Metrics
    from k3rl.trajectory import Summary, Trajectory
    from k3rl.weights.object_store import StoredWeights

Phase = Literal["sft", "rl"]


class LearnerWorker:
    """Answers the controller's calls."""

    def __init__(self, config: RunConfig) -> None:
        torch.set_num_threads(config.learner.threads)
        self._config = config
        self._policy = K3Model(config.model, seed=config.seed)
        self._phase: Phase = "sft"
        self._claim = ExitStack()
        self._learner = self._make_learner("sft")

    def begin(self, phase: Phase) -> None:
        """Enter a phase with a fresh optimiser; entering the phase one is in already changes nothing."""
        if phase != self._phase:
            self._phase = phase
            self._learner = self._make_learner(phase)

    def formula(self) -> str:
        """The resolved objective of RL."""
        return self._objective("rl").formula()

    def update(self, batch: Sequence[Summary], folder: Path) -> Metrics:
        """One update on a whole batch, read from the payload files below ``folder``."""
        return self.update_on(Store(folder).read_all(batch))

    def update_on(self, trajectories: Sequence[Trajectory]) -> Metrics:
        """One update on a whole batch, with the objective of the current phase."""
        return self._learner.update(trajectories, [self._rewards(t) for t in trajectories])

    def publish(self, incarnation: int, step: int) -> StoredWeights:
        """Put the current weights into the object store, for the engines to read."""
        weights = self.weights(incarnation, step)
        return object_store.put(weights.version, weights.tensors, self._config.rollout.timeout_s)

    def weights(self, incarnation: int, step: int) -> LocalWeights:
        """A copy of the current weights, with their version."""
        tensors = {name: t.detach().clone() for name, t in self._policy.state_dict().items()}
        return LocalWeights(PolicyVersion(incarnation=incarnation, step=step, digest=weights_digest(tensors)), tensors)

    def claim(self, folder: Path) -> None:
        """Become the only writer of checkpoints below ``folder``, for this process's life.

        A learner that outlives its driver may still be writing: wait for it, up to a deadline.
        """
        if not folder.is_dir():
            raise ConfigError(f"run_root: the learner's machine does not see {folder}; it must lie on shared storage")
        self._claim.enter_context(lock_folder(folder / "checkpoints", timeout_s=self._config.learner.timeout_s))

    def save(
        self,
        directory: Path,
        *,
        step: int,
        version: PolicyVersion,
        vocabulary: str,
        state: dict[str, Any],
        consumed: dict[str, Any],
        keep: int,
    ) -> Path:
        """Write a checkpoint of everything that the next step depends on; return its folder."""
        tensors, counters = self._learner.state_dict()
        checkpoint = Checkpoint(
            step=step,
            version=version,
            model_config=to_dict(self._config.model),
            vocabulary=vocabulary,
            model=dict(self._policy.state_dict()),
            optimizer=tensors,
            state={"controller": state, "learner": counters, "phase": self._phase},
            consumed=consumed,
        )
        return save(directory, checkpoint, keep=keep)

    def load(self, directory: Path, vocabulary: str) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]] | None:
        """Load the last good checkpoint below ``directory``.

        Returns the controller's state, the consumed set and what was passed over as damaged; None when there is none.
        """
        loaded = load_latest(directory, to_dict(self._config.model), vocabulary)
        if loaded is None:
            return None
        checkpoint = loaded.checkpoint
        self._policy.load_state_dict(dict(checkpoint.model))
        self._phase = checkpoint.state["phase"]
        self._learner = self._make_learner(self._phase)
        self._learner.load_state_dict(dict(checkpoint.optimizer), checkpoint.state["learner"])
        return checkpoint.state["controller"], dict(checkpoint.consumed), loaded.damaged

    def _objective(self, phase: Phase) -> Objective:
        config = ObjectiveConfig(preset="sft") if phase == "sft" else self._config.objective
        return resolve(config, horizon=self._config.environment.max_episode_tokens)

    def _make_learner(self, phase: Phase) -> Learner:
        config = self._config
        learner = config.learner
        if phase == "sft":
            learner = dataclasses.replace(learner, optimizer=config.sft.optimizer)
        steps = config.sft.max_steps if phase == "sft" else config.steps
        return Learner(self._policy, self._objective(phase), learner, total_steps=max(steps, 1))

    def _rewards(self, trajectory: Trajectory) -> np.ndarray | None:
        # A demonstration is imitated, whatever it earned.
        return np.zeros(len(trajectory.segments)) if self._phase == "sft" else compose(trajectory, self._config.rewards)
