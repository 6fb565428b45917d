"""One optimiser step from trajectories: build the batch, two passes, clip, guard, step."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from k3rl.config import LearnerConfig, OptimizerConfig
from k3rl.errors import CheckpointError, ConfigError, TrainingError
from k3rl.learner.forward import compute_gradients, compute_vectors
from k3rl.learner.optim import build_optimizer, lr_factor
from k3rl.learner.policy import Policy
from k3rl.learner.token_tree import Walk, plan_walk
from k3rl.metrics import Mean, Metrics
from k3rl.objective import Objective, ObjectiveBatch, build_batch
from k3rl.trajectory import Trajectory


class Learner:
    """Owns a policy's optimiser. Deterministic: the same state and the same batch give the same next weights."""

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        config: LearnerConfig,
        total_steps: int,
        reference: Policy | Mapping[str, Policy] | None = None,
    ) -> None:
        """``total_steps`` is the number of updates over which the learning rate decays.

        ``reference`` is what a KL is against, or the teacher: one, or one for each environment by its id.
        """
        if objective.needs_value and not policy.capabilities.value:
            raise ConfigError(f"objective.preset: {objective.preset!r} needs a value head; set model.value_head: true")
        if objective.needs_reference and reference is None:
            key = objective.key_that_needs("reference")
            raise ConfigError(f"objective.{key}: it needs a reference policy or a teacher, and there is none")
        self.policy = policy
        self.objective = objective
        self.config = config
        self.reference = reference
        self.total_optimizer_steps = total_steps * objective.epochs
        self.optimizer = build_optimizer(policy, config.optimizer)
        self.step = 0  # optimiser steps taken; the position in the schedule
        self.skipped = 0  # updates that the guard refused, ever
        self.skipped_in_a_row = 0

    def restart(self, optimizer: OptimizerConfig, total_steps: int) -> None:
        """Begin another schedule with the moments that there are: ``total_steps`` updates with another peak rate."""
        self.config = dataclasses.replace(self.config, optimizer=optimizer)
        self.total_optimizer_steps = total_steps * self.objective.epochs
        self.step = 0

    def update(self, trajectories: Sequence[Trajectory], rewards: Sequence[np.ndarray | None]) -> Metrics:
        """Train on a whole global batch.

        ``rewards[j]`` is the composed reward of each segment of trajectory j: 0 where nothing was earned, NaN (or None
        for all) where absent. Raises TrainingError after ``max_skipped_updates`` refused updates in a row.
        """
        started = time.perf_counter()
        objective, batch = self.objective, build_batch(trajectories, rewards)
        metrics = Metrics()
        walk = self._plan(self.policy, batch, with_value=objective.needs_value)
        metrics.sum("train/tokens", batch.num_trained)
        metrics.sum("train/input_tokens", sum(len(batch.samples[n].ids) for n in walk.tree.rows))
        metrics.sum("train/computed_tokens", walk.num_tokens)
        metrics.sum("train/empty_updates", int(not walk.waves))
        metrics.sum("train/unscored_trajectories", int((~batch.scored).sum()))
        if not walk.waves:
            self._zero_gradients()
            return metrics
        if objective.needs_reference:
            batch = dataclasses.replace(batch, reference_logprobs=self.score_by_reference(batch, trajectories))
        for _ in range(objective.epochs):
            self._zero_gradients()
            is_first = batch.weights is None
            loss, batch, found = compute_gradients(self.policy, objective, batch, walk)
            metrics = Metrics.merge([metrics, found])
            if is_first and "rollout" in objective.needs:
                metrics.sum("train/no_signal_groups", batch.num_no_signal)
            if not self._guarded_step(float(loss), metrics):
                break  # the same batch on the same weights would be refused again
        metrics.sum("train/update_s", time.perf_counter() - started)
        return metrics

    def score_by_reference(self, batch: ObjectiveBatch, trajectories: Sequence[Trajectory]) -> torch.Tensor:
        """Log-probabilities of what is trained by the reference policy that each trajectory has, [T]; 0 elsewhere."""
        environments = [t.task.environment for t in trajectories]
        own = self.reference if isinstance(self.reference, Mapping) else dict.fromkeys(environments, self.reference)
        logprobs = torch.zeros(batch.num_tokens)
        for environment in sorted(set(environments)):
            policy = own.get(environment)
            if policy is None:
                known = ", ".join(sorted(own))
                raise TrainingError(f"no reference policy for environment {environment!r}; there are: {known}")
            here = torch.tensor([e == environment for e in environments])[batch.trajectory] & batch.action_mask
            part = dataclasses.replace(batch, action_mask=here)
            found = compute_vectors(policy, part, self._plan(policy, part, with_value=False)).logprob
            logprobs = torch.where(here, found, logprobs)
        return logprobs

    def loss_on(self, trajectories: Sequence[Trajectory]) -> Mean:
        """Negative log-likelihood of all actions together, in nats, and how many tokens they are."""
        batch = build_batch(trajectories, [np.zeros(len(t.segments)) for t in trajectories])
        vectors = compute_vectors(self.policy, batch, self._plan(self.policy, batch, with_value=False))
        logprobs = vectors.logprob[batch.action_mask]
        return Mean(-float(logprobs.double().sum()), len(logprobs))

    def _plan(self, policy: Policy, batch: ObjectiveBatch, *, with_value: bool) -> Walk:
        limit, chunked = self.config.micro_batch_tokens, policy.capabilities.chunk
        return plan_walk(batch, limit, with_value=with_value, chunked=chunked)

    def _zero_gradients(self) -> None:
        """Zeros, not None: an idle rank must have something to reduce."""
        for _, parameter in self.policy.named_parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def _guarded_step(self, loss: float, metrics: Metrics) -> bool:
        """Clip and step; a loss or gradient norm that is not finite leaves weights, optimiser and schedule alone.

        Returns whether the step was taken.
        """
        optimizer = self.config.optimizer
        gradients = [p.grad for _, p in self.policy.named_parameters() if p.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.float()) for g in gradients])))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._refuse(loss, norm, metrics)
            return False
        most = optimizer.max_grad_norm
        scale = min(1.0, most / norm) if most > 0 and norm > 0 else 1.0
        if scale < 1.0:
            for gradient in gradients:
                gradient.mul_(scale)
        lr = optimizer.lr * lr_factor(self.step, self.total_optimizer_steps, optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.step += 1
        self.skipped_in_a_row = 0
        metrics.sum("train/skipped_updates", 0)
        metrics.mean("train/grad_norm", norm)
        metrics.mean("train/grad_clipped_frac", float(scale < 1.0))
        metrics.mean("train/lr", lr)
        return True

    def _refuse(self, loss: float, norm: float, metrics: Metrics) -> None:
        self.skipped += 1
        self.skipped_in_a_row += 1
        self._zero_gradients()
        metrics.sum("train/skipped_updates", 1)
        if self.skipped_in_a_row >= self.config.max_skipped_updates:
            raise TrainingError(
                f"{self.skipped_in_a_row} updates in a row were not finite (last loss {loss}, gradient norm {norm}); "
                "the weights are those of the last sound step"
            )

    def state_dict(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Optimiser tensors named ``<parameter>/<slot>``, and counters that JSON can hold. Weights are not in it."""
        names = {id(p): name for name, p in self.policy.named_parameters()}
        tensors = {
            f"{names[id(parameter)]}/{slot}": tensor.detach().clone()
            for parameter, slots in self.optimizer.state.items()
            for slot, tensor in slots.items()
        }
        counters = {
            "optimizer": self.config.optimizer.name,
            "step": self.step,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }
        return tensors, counters

    def load_state_dict(self, tensors: dict[str, torch.Tensor], counters: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`; the policy's weights are loaded apart."""
        if counters["optimizer"] != self.config.optimizer.name:
            raise CheckpointError(
                f"the state is of optimizer {counters['optimizer']!r}, the run uses {self.config.optimizer.name!r}"
            )
        parameters = dict(self.policy.named_parameters())
        self.optimizer.state.clear()
        for key, tensor in tensors.items():
            name, slot = key.rsplit("/", 1)
            if name not in parameters:
                raise CheckpointError(f"optimizer state for {name!r}, which the policy does not have")
            if tensor.ndim and tensor.shape != parameters[name].shape:
                raise CheckpointError(
                    f"optimizer state {key!r} has shape {tuple(tensor.shape)}, not {tuple(parameters[name].shape)}"
                )
            device = parameters[name].device if tensor.ndim else tensor.device
            self.optimizer.state[parameters[name]][slot] = tensor.detach().clone().to(device)
        self.step = int(counters["step"])
        self.skipped = int(counters["skipped"])
        self.skipped_in_a_row = int(counters["skipped_in_a_row"])
