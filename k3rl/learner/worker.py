"""A learner worker: the policy, its optimiser and its checkpoints. Runs as a Ray actor or in process."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from k3rl.buffer.store import Store
from k3rl.config import ObjectiveConfig, RunConfig, SftJobConfig, to_dict
from k3rl.errors import CheckpointError, ConfigError
from k3rl.learner.update import Learner
from k3rl.metrics import Mean, Metrics
from k3rl.model.moe import BALANCERS, Balancer
from k3rl.model.transformer import K3Model
from k3rl.objective import Objective, resolve
from k3rl.rewards.compose import compose
from k3rl.trajectory import PolicyVersion
from k3rl.weights import object_store
from k3rl.weights.base import LocalWeights, weights_digest
from k3rl.weights.checkpoint import Checkpoint, load_latest, save
from k3rl.weights.lock import lock_folder
from k3rl.weights.source import open_source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3rl.config import JobConfig, OptimizerConfig
    from k3rl.trajectory import Summary, Trajectory
    from k3rl.weights.object_store import StoredWeights


BEFORE_RL = "after_sft"
"""Folder of a run that keeps the weights which RL begins with."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a job that has an objective and a schedule of its own."""

    objective: Objective
    optimizer: OptimizerConfig
    steps: int
    imitates: bool
    """What is learnt from is right, whatever it earned."""
    keeps_moments: bool
    """It goes on with the optimiser of the phase before."""


def phases_of(config: JobConfig) -> dict[str, Phase]:
    """Phases by name: ``sft`` and ``rl`` of a run, the stages of a job of ``k3rl sft``."""
    imitation = resolve(ObjectiveConfig(preset="sft"))
    peak = config.learner.optimizer
    if isinstance(config, SftJobConfig):
        return {
            name: Phase(
                objective=imitation,
                optimizer=peak if stage.lr is None else dataclasses.replace(peak, lr=stage.lr),
                steps=stage.steps,
                imitates=True,
                keeps_moments=True,
            )
            for name, stage in config.stages.items()
        }
    assert isinstance(config, RunConfig)
    objective = resolve(config.objective, horizon=config.environment.max_episode_tokens)
    sft, own = config.sft, {"keeps_moments": False}
    return {
        "sft": Phase(objective=imitation, optimizer=sft.optimizer, steps=sft.max_steps, imitates=True, **own),
        "rl": Phase(objective=objective, optimizer=peak, steps=config.steps, imitates=False, **own),
    }


class LearnerWorker:
    """Answers the controller's calls."""

    def __init__(self, config: JobConfig, device: str = "cpu") -> None:
        torch.set_num_threads(config.learner.threads)
        self._config = config
        self._policy = K3Model(config.model, seed=config.seed, device=device)
        self._phases = phases_of(config)
        self._phase = next(iter(self._phases))
        self._claim = ExitStack()
        self._folder: Path | None = None
        self._learner = self._make_learner()
        kind = BALANCERS[config.balancing] if isinstance(config, SftJobConfig) else None
        self._balancer: Balancer | None = None if kind is None else kind(self._policy.moe_layers)

    def begin(self, phase: str) -> None:
        """Enter a phase; entering the phase one is in already changes nothing."""
        if phase == self._phase:
            return
        self._phase = phase
        at = self._phases[phase]
        if at.keeps_moments:
            self._learner.restart(at.optimizer, at.steps)
        else:
            self._learner = self._make_learner()

    def formula(self) -> str:
        """The resolved objective of the current phase."""
        return self._learner.objective.formula()

    def update(self, batch: Sequence[Summary], folder: Path) -> Metrics:
        """One update on a whole batch, read from the payload files below ``folder``."""
        return self.update_on(Store(folder).read_all(batch))

    def update_on(self, trajectories: Sequence[Trajectory]) -> Metrics:
        """One update on a whole batch, with the objective of the current phase."""
        rewards = [self._rewards(t) for t in trajectories]
        if self._balancer is None:
            return self._learner.update(trajectories, rewards)
        skipped = self._learner.skipped
        with self._balancer.observe():
            metrics = self._learner.update(trajectories, rewards)
        if self._learner.skipped == skipped:
            self._balancer.step()
        else:
            self._balancer.forget()  # scores that are not finite say nothing about the load
        return metrics

    def loss_on(self, trajectories: Sequence[Trajectory]) -> Mean:
        """Negative log-likelihood of all actions together, in nats, and how many tokens they are."""
        return self._learner.loss_on(trajectories)

    def publish(self, incarnation: int, step: int, timeout_s: float) -> StoredWeights:
        """Put the current weights into the object store, for the engines to read within ``timeout_s``."""
        weights = self.weights(incarnation, step)
        return object_store.put(weights.version, weights.tensors, timeout_s)

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
        # Shorter than the driver waits for us, so that it hears who holds the folder.
        self._claim.enter_context(lock_folder(folder / "checkpoints", timeout_s=self._config.learner.timeout_s / 2))
        self._folder = folder

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

        Returns the controller's state, the consumed set and what was passed over as damaged; None when there is none:
        then the weights are those that the job starts from.
        """
        loaded = load_latest(directory, to_dict(self._config.model), vocabulary)
        if loaded is None:
            if self._config.init_from is not None:
                source = open_source(Path(self._config.init_from))
                source.require(self._config.model, vocabulary)
                source.fill(self._policy)
            return None
        checkpoint = loaded.checkpoint
        self._policy.load_state_dict(dict(checkpoint.model))
        self._phase = checkpoint.state["phase"]
        self._learner = self._make_learner()
        self._learner.load_state_dict(dict(checkpoint.optimizer), checkpoint.state["learner"])
        return checkpoint.state["controller"], dict(checkpoint.consumed), loaded.damaged

    def _make_learner(self) -> Learner:
        at = self._phases[self._phase]
        config = dataclasses.replace(self._config.learner, optimizer=at.optimizer)
        reference = self._read_reference() if at.objective.needs_reference else None
        return Learner(self._policy, at.objective, config, total_steps=max(at.steps, 1), reference=reference)

    def _read_reference(self) -> K3Model:
        """The policy that RL began with, frozen: what a KL term is about."""
        assert self._folder is not None, "claim comes first"
        loaded = load_latest(self._folder / BEFORE_RL, to_dict(self._config.model))
        if loaded is None:
            raise CheckpointError(f"{self._folder / BEFORE_RL} holds no checkpoint, and a KL term needs it")
        model = K3Model(self._config.model, device=next(self._policy.parameters()).device)
        model.load_state_dict(dict(loaded.checkpoint.model))
        return model.eval().requires_grad_(False)

    def _rewards(self, trajectory: Trajectory) -> np.ndarray | None:
        if self._phases[self._phase].imitates:
            return np.zeros(len(trajectory.segments))
        assert isinstance(self._config, RunConfig)
        return compose(trajectory, self._config.rewards)
