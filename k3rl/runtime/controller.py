"""The controller of a run. It owns the schedule and the record of what happened; it holds no tensor.

    SFT:   until validation success stops rising:   demonstrate -> update
    RL:    for each step:   issue -> roll out -> seal -> lease -> update -> publish, now and then checkpoint + commit
    then:  evaluate on held-out tasks, and say where everything is

The groups of step s are the ordinals [s G, (s + 1) G), whatever happened before. So a run in the synchronous schedule
that was killed takes the identical next step: what was lost is sampled again, from the same seeds, by the same weights.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from k3rl.buffer.ledger import ConsumedSet
from k3rl.buffer.sampler import Buffer
from k3rl.errors import StarvedError
from k3rl.evaluation.report import EvaluationReport, summarise
from k3rl.objective import resolve
from k3rl.observe.console import progress
from k3rl.observe.tracker import MetricsWriter
from k3rl.rewards.compose import signal_reason
from k3rl.rollout.agent_loop import EpisodeSpec
from k3rl.runtime.actors import Actors
from k3rl.runtime.event_log import EventLog
from k3rl.runtime.rollout_metrics import check_failures, is_infrastructure_failure, rollout_metrics
from k3rl.runtime.summary import write_summary
from k3rl.trajectory import PolicyVersion, Task, Trajectory, TrajectoryKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3rl.config import RunConfig

REPEATABLE = ("lost", "future", "damaged")
"""Reasons of a drop that have nothing to do with what was sampled: the next attempt repeats the random stream."""
MAX_STARVED_STEPS = 10
"""RL steps in a row without a single group to learn from, after which the run stops."""


@dataclass(slots=True)
class Progress:
    """Where a run stands: the part of a checkpoint that is no tensor."""

    phase: Literal["sft", "rl", "final", "done"] = "sft"
    sft_step: int = 0
    rl_step: int = 0
    incarnation: int = 0
    best_success: float = -1.0
    evals_without_best: int = 0
    sft_curve: list[list[float]] = field(default_factory=list)
    rl_curve: list[list[float]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    max_logprob_gap: float = 0.0

    def spend(self, what: str, started: float) -> None:
        """Book the time since ``started`` (``time.perf_counter``) under ``what``."""
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - started


class Controller:
    """One run: its folder on disk and its actors."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.progress = Progress()
        self.actors = Actors(config)  # before any file is open
        self.metrics = MetricsWriter(config.run_dir)
        self.events = EventLog(config.run_dir / "events.jsonl")
        compares = "group" in resolve(config.objective, horizon=config.environment.max_episode_tokens).needs
        self.buffer = Buffer(
            config.run_dir,
            max_staleness=config.buffer.max_staleness,
            no_signal=self._no_signal if config.buffer.drop_no_signal and compares else None,
        )
        self.version = PolicyVersion(incarnation=0, step=0, digest="")

    def start(self) -> None:
        """Load the last good checkpoint, if there is one, and give its weights to the rollout workers."""
        loaded = self.actors.ask_learner("load", self.config.run_dir / "checkpoints")
        consumed = ConsumedSet()
        if loaded is not None:
            state, consumed_json, damaged = loaded
            for message in damaged:
                print(f"passed over a damaged checkpoint: {message}")
            self.progress = Progress(**state)
            if self.progress.phase in ("final", "done") and self.progress.rl_step < self.config.steps:
                self.progress.phase = "rl"  # the run was made longer
            self.progress.incarnation += 1
            consumed = ConsumedSet.from_json(consumed_json)
        lost = self.buffer.ledger.restore(consumed).lost
        self.events.restore(consumed.step, lost)
        self._publish()

    def close(self) -> None:
        """Close the files of the run."""
        self.metrics.close()
        self.events.close()
        self.buffer.close()

    def run(self) -> dict[str, Any]:
        """Go through the phases that are left."""
        if self.progress.phase == "sft":
            self._sft()
        if self.progress.phase == "rl":
            self._rl()
        if self.progress.phase == "final":
            self._final()
        return write_summary(self.config, self.progress, self.buffer.ledger.counts())

    # --- phases -------------------------------------------------------------------------------------------------------

    def _sft(self) -> None:
        config, at = self.config.sft, self.progress
        if config.max_steps and "demonstrator" not in at.reports:
            demonstrated = self.actors.play(
                "demonstrate", self._specs("validation", self.config.evaluation.num_tasks), "demonstrations"
            )
            at.reports["demonstrator"] = summarise(demonstrated).to_dict()
            print(f"demonstrator: success {at.reports['demonstrator']['success']:.3f}")
        if config.max_steps:
            self._sft_steps(config.max_steps)
            self._publish()
            self._evaluate_into("after_sft")
        self.actors.ask_learner("save", self.config.run_dir / "after_sft", **self._checkpoint_state(), keep=1)
        at.phase = "rl"
        self.actors.ask_learner("begin", "rl")
        self._checkpoint()

    def _sft_steps(self, max_steps: int, for_seconds: float | None = None) -> None:
        """Imitate until validation success stops rising; or, given ``for_seconds``, for that long without looking."""
        config, at = self.config.sft, self.progress
        self.actors.ask_learner("begin", "sft")
        started = time.perf_counter()
        demonstrations = self.actors.start("demonstrate", self._sft_specs(at.sft_step))
        with progress("SFT", max_steps) as bar:
            while at.sft_step < max_steps:
                batch = self.actors.collect(demonstrations, "demonstrations")
                demonstrations = self.actors.start("demonstrate", self._sft_specs(at.sft_step + 1))
                scalars = self.actors.ask_learner("update", batch).scalars()
                at.sft_step += 1
                self.metrics.write(at.sft_step, {f"sft/{name}": value for name, value in scalars.items()})
                bar.advance(note=f"loss {scalars.get('train/loss', math.nan):.3f}")
                if for_seconds is not None:
                    if time.perf_counter() - started > for_seconds:
                        break
                elif at.sft_step % config.eval_every == 0:
                    if self._sft_has_peaked():
                        break
                    at.spend("sft", started)
                    started = time.perf_counter()
                    self._checkpoint()
        self.actors.collect(demonstrations, "demonstrations")
        at.spend("sft" if for_seconds is None else "sft_only", started)

    def _sft_has_peaked(self) -> bool:
        config, at = self.config.sft, self.progress
        self._publish()
        report = self.evaluate("validation", config.eval_tasks, self.config.rollout.temperature)
        at.sft_curve.append([at.sft_step, report.success])
        self.metrics.write(at.sft_step, {"sft/validation_success": report.success})
        print(f"SFT step {at.sft_step:4d}: validation success {report.success:.3f}")
        at.evals_without_best = 0 if report.success > at.best_success else at.evals_without_best + 1
        at.best_success = max(at.best_success, report.success)
        return at.sft_step >= config.min_steps and at.evals_without_best >= config.patience

    def _rl(self) -> None:
        config, at = self.config, self.progress
        if not config.steps:
            at.phase = "final"
            return
        print(self.actors.ask_learner("formula"))
        is_async = config.schedule == "one_step_async"
        pending = None
        starved = 0
        with progress("RL", config.steps - at.rl_step) as bar:
            while at.rl_step < config.steps:
                started = time.perf_counter()
                batch = self._seal(at.rl_step, pending or self._start_rollouts(at.rl_step))
                # One step ahead: the next rollouts run on the weights of now while the learner changes them.
                pending = self._start_rollouts(at.rl_step + 1) if is_async and at.rl_step + 1 < config.steps else None
                starved = 0 if self._train_step(batch) else starved + 1
                if starved == MAX_STARVED_STEPS:
                    if all((t.total_reward(["outcome"]) or 0.0) >= 1.0 for t in batch):
                        print(f"every attempt succeeded for {starved} steps: nothing is left to learn from these tasks")
                        break
                    dropped = self.buffer.ledger.counts().dropped
                    raise StarvedError(f"no group to learn from in {starved} steps in a row; dropped so far: {dropped}")
                self._publish()  # takes effect behind the rollouts that run, which keep the weights that they began on
                at.spend("rl", started)
                reward = rollout_metrics(batch, config.rewards).scalars().get("rollout/reward", math.nan)
                bar.advance(note=f"reward {reward:.3f}")
                self._after_rl_step()
        at.phase = "final"
        self._checkpoint()

    def _train_step(self, sampled: Sequence[Trajectory]) -> bool:
        """Lease a batch, update on it and record both. False when no group could be trained on."""
        at = self.progress
        groups = self.buffer.take(self.config.rollout.groups_per_step, at.rl_step)
        batch = [trajectory for group in groups for trajectory in group]
        keys = [t.key for t in batch]
        # Durable before the optimizer moves: what a step trains on is known whatever happens next.
        self.events.lease(at.rl_step + 1, keys, self.buffer.digests(keys))
        metrics = rollout_metrics(sampled, self.config.rewards)
        if batch:
            for name, metric in self.actors.ask_learner("update", batch):
                metrics.add(name, metric)
            if all(t.oldest_step == at.rl_step for t in batch):
                # Of older rollouts the gap is mostly what was learned since.
                at.max_logprob_gap = max(at.max_logprob_gap, metrics.scalars().get("train/logprob_gap_max", 0.0))
        at.rl_step += 1
        self.metrics.write(at.rl_step, metrics)
        self.events.step(at.rl_step, metrics.scalars())
        return bool(batch)

    def _after_rl_step(self) -> None:
        config, at = self.config, self.progress
        every = config.evaluation.every
        if every and at.rl_step % every == 0:
            report = self.evaluate(config.evaluation.split, config.evaluation.num_tasks, config.rollout.temperature)
            at.rl_curve.append([at.rl_step, report.success])
            self.metrics.write(at.rl_step, {"eval/success": report.success})
        if at.rl_step % config.checkpoint_every == 0 and at.rl_step < config.steps:
            self._checkpoint()

    def _final(self) -> None:
        config, at = self.config, self.progress
        self._publish()
        if config.steps:
            self._evaluate_into("after_rl")
        if config.steps and config.sft.max_steps and config.evaluation.sft_only_baseline:
            self.actors.ask_learner("load", config.run_dir / "after_sft")
            self._sft_steps(at.sft_step + 1_000_000, for_seconds=at.seconds["rl"])
            self._publish()
            self._evaluate_into("sft_only")
        at.phase = "done"

    # --- what the phases are made of ----------------------------------------------------------------------------------

    def evaluate(self, split: str, num_tasks: int, temperature: float) -> EvaluationReport:
        """Play held-out tasks with the seeds of every other evaluation."""
        specs = self._specs(split, num_tasks)
        return summarise(self.actors.play("rollout", specs, "evaluation", temperature, self.config.evaluation.seed))

    def _evaluate_into(self, name: str) -> None:
        """Evaluate sampled and greedy; keep both reports under ``name``."""
        config, at = self.config, self.progress
        started = time.perf_counter()
        for suffix, temperature in (("", config.rollout.temperature), ("_greedy", 0.0)):
            report = self.evaluate(config.evaluation.split, config.evaluation.num_tasks, temperature)
            at.reports[name + suffix] = report.to_dict()
        at.spend("eval", started)
        print(
            f"{name}: success {at.reports[name]['success']:.3f} (greedy {at.reports[name + '_greedy']['success']:.3f})"
        )

    def _start_rollouts(self, step: int) -> list[Any]:
        """Issue the attempts of a step that are not sealed yet, and start them."""
        config = self.config
        specs = [spec for ordinal in self._step_ordinals(step) for spec in self._missing(ordinal)]
        keys, tasks = [spec.key for spec in specs], [spec.task for spec in specs]
        self.buffer.ledger.issue(keys, tasks)
        self.events.issue(keys, tasks, self.version)
        return self.actors.start("rollout", specs, config.rollout.temperature, config.seed)

    def _missing(self, ordinal: int) -> list[EpisodeSpec]:
        """Next attempts of the samples of a group that have none alive."""
        # Tasks that no demonstration has shown.
        index = self.config.sft.max_steps * self.config.sft.batch_size + ordinal
        task = Task(environment=self.config.environment.id, split="train", index=index)
        attempts = self.buffer.ledger.attempts(ordinal=ordinal)
        specs = []
        for sample in range(self.config.rollout.group_size):
            earlier = [a for a in attempts if a.key.sample == sample]
            if all(a.state == "dropped" for a in earlier):
                attempt = max((a.key.attempt for a in earlier), default=-1) + 1
                retries = sum(a.reason not in REPEATABLE for a in earlier)
                key = TrajectoryKey(ordinal=ordinal, sample=sample, attempt=attempt)
                specs.append(EpisodeSpec(key=key, task=task, seed_attempt=retries))
        return specs

    def _step_ordinals(self, step: int) -> range:
        groups = self.config.rollout.groups_per_step
        return range(step * groups, (step + 1) * groups)

    def _seal(self, step: int, pending: list[Any]) -> list[Trajectory]:
        """Make what was sampled durable; return all that the step has, also from before a restart.

        What infrastructure failed is sampled again, up to ``max_attempts`` times; then it is sealed without a reward.
        """
        config = self.config.rollout
        latest: dict[tuple[int, int], Trajectory] = {}
        while pending:
            trajectories = self.actors.collect(pending, "rollouts")
            latest |= {(t.key.ordinal, t.key.sample): t for t in trajectories}
            again = [t for t in trajectories if self._may_retry(t)]
            done = [t for t in trajectories if t not in again]
            self.buffer.add_group(done)
            self.events.seal([t.key for t in done], self.buffer.digests([t.key for t in done]))
            for trajectory in again:
                self.buffer.ledger.drop([trajectory.key], f"failed_{trajectory.outcome.cause}")
                self.events.fail(trajectory.key, trajectory.outcome)
            check_failures(list(latest.values()), config.max_failed_frac)
            pending = self._start_rollouts(step) if again else []
        ordinals = self._step_ordinals(step)
        is_whole = len(latest) == len(ordinals) * config.group_size
        return [latest[key] for key in sorted(latest)] if is_whole else self.buffer.sealed(ordinals)

    def _may_retry(self, trajectory: Trajectory) -> bool:
        if not is_infrastructure_failure(trajectory):
            return False
        tried = self.buffer.ledger.attempts(ordinal=trajectory.key.ordinal)
        tried = [a for a in tried if a.key.sample == trajectory.key.sample and a.reason not in REPEATABLE]
        return len(tried) < self.config.rollout.max_attempts

    def _no_signal(self, group: Sequence[Trajectory]) -> str | None:
        return signal_reason(group, self.config.rewards, self.config.buffer.signal)

    def _sft_specs(self, step: int) -> list[EpisodeSpec]:
        size = self.config.sft.batch_size
        return self._specs("train", size, first=step * size)

    def _specs(self, split: str, num: int, first: int = 0) -> list[EpisodeSpec]:
        return [
            EpisodeSpec(
                key=TrajectoryKey(ordinal=i, sample=0),
                task=Task(environment=self.config.environment.id, split=split, index=i),
            )
            for i in range(first, first + num)
        ]

    def _publish(self) -> None:
        """Give the learner's weights to every rollout worker."""
        at = self.progress
        self.version = self.actors.publish(at.incarnation, at.rl_step)
        self.events.publish(at.rl_step, self.version)

    def _checkpoint(self) -> None:
        """Publish weights, optimizer and consumed set in one manifest, then commit what it names."""
        at = self.progress
        path = self.actors.ask_learner(
            "save",
            self.config.run_dir / "checkpoints",
            **self._checkpoint_state(),
            keep=self.config.checkpoints_kept,
        )
        self.buffer.ledger.commit(at.rl_step)
        self.events.checkpoint(at.rl_step, path)

    def _checkpoint_state(self) -> dict[str, Any]:
        at = self.progress
        return {
            "step": at.rl_step,
            "version": self.version,
            "state": asdict(at),
            "consumed": self.buffer.ledger.consumed(at.rl_step).to_json(),
        }
