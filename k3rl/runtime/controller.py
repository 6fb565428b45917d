"""The controller of a run. It owns the schedule and the record of what happened; it holds no tensor and no token.

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

from k3rl.buffer.ledger import REPEATABLE, ConsumedSet
from k3rl.buffer.sampler import Buffer
from k3rl.errors import StarvedError
from k3rl.evaluation.report import EvaluationReport, report
from k3rl.learner.worker import BEFORE_RL
from k3rl.metrics import Max
from k3rl.objective import resolve
from k3rl.observe.console import progress
from k3rl.observe.tracker import MetricsWriter, to_jsonable
from k3rl.rewards.compose import signal_reason
from k3rl.rollout.agent_loop import EpisodeSpec
from k3rl.rollout.chat_format import vocabulary_of
from k3rl.runtime.actors import Actors
from k3rl.runtime.event_log import EventLog
from k3rl.runtime.rollout_metrics import check_failures, rollout_metrics
from k3rl.runtime.summary import write_summary
from k3rl.trajectory import PolicyVersion, Summary, Task, TrajectoryKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3rl.config import RunConfig

MAX_STARVED_STEPS = 10
"""RL steps in a row without a single group to learn from, after which the run stops."""


@dataclass(slots=True)
class Progress:
    """Where a run stands: the part of a checkpoint that is no tensor."""

    phase: Literal["sft", "rl", "final"] = "sft"
    sft_step: int = 0
    rl_step: int = 0
    incarnation: int = 0
    ended_of_steps: int = 0
    """The run's ``steps`` when RL ended, by then or earlier for want of anything to learn."""
    best_success: float = -1.0
    evals_without_best: int = 0
    sft_curve: list[list[float]] = field(default_factory=list)
    rl_curve: list[list[float]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    max_logprob_gap: float | None = None
    gap_steps: int = 0
    """Steps whose rollouts were of the very weights that trained on them: only there the gap is disagreement."""

    def __post_init__(self) -> None:
        if isinstance(self.max_logprob_gap, str):  # JSON has no "nan"
            self.max_logprob_gap = float(self.max_logprob_gap)

    def spend(self, what: str, started: float) -> None:
        """Book the time since ``started`` (``time.perf_counter``) under ``what``."""
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - started


@dataclass(slots=True)
class Starvation:
    """Steps in a row without a group to learn from, and whether all was solved in them."""

    steps: int = 0
    all_solved: bool = True

    def count(self, sampled: Sequence[Summary], *, is_trained: bool) -> None:
        """Take another step into account."""
        solved = bool(sampled) and all((s.rewards.get("outcome") or 0.0) >= 1.0 for s in sampled)
        self.steps, self.all_solved = (0, True) if is_trained else (self.steps + 1, self.all_solved and solved)

    @property
    def is_over(self) -> bool:
        """There is nothing left to learn."""
        return self.steps >= MAX_STARVED_STEPS and self.all_solved

    @property
    def is_hopeless(self) -> bool:
        """There would be something to learn, but nothing says what."""
        return self.steps >= MAX_STARVED_STEPS and not self.all_solved

    def message(self, dropped: dict[str, int]) -> str:
        """What to tell the user."""
        return f"no group to learn from in {self.steps} steps in a row; dropped so far: {dropped}"


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
        self.vocabulary = vocabulary_of(config)
        self.said: set[str] = set()

    def start(self) -> None:
        """Load the last good checkpoint, if there is one, and give its weights to the rollout workers."""
        self.actors.ask_learner("claim", self.config.run_dir)
        loaded = self.actors.ask_learner("load", self.config.run_dir / "checkpoints", self.vocabulary)
        consumed = ConsumedSet()
        if loaded is not None:
            state, consumed_json, damaged = loaded
            for message in damaged:
                print(f"passed over a damaged checkpoint: {message}")
            self.progress = Progress(**state)
            if self.progress.phase == "final" and self.config.steps > self.progress.ended_of_steps:
                self.progress.phase = "rl"  # it was given more of them, perhaps in a life that saved nothing
            consumed = ConsumedSet.from_json(consumed_json)
        self.progress.incarnation = self.events.num_restores
        self.buffer.store.remove_leftovers()
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
            at.reports["demonstrator"] = report(demonstrated).to_dict()
            print(f"demonstrator: success {at.reports['demonstrator']['success']:.3f}")
        if config.max_steps:
            self._sft_steps(config.max_steps)
            self._publish()
            self._evaluate_into("after_sft")
        self.actors.ask_learner("save", self.config.run_dir / BEFORE_RL, **self._checkpoint_state(), keep=1)
        at.phase = "rl"
        self.actors.ask_learner("begin", "rl")
        self._checkpoint()

    def _sft_steps(self, max_steps: int, for_seconds: float | None = None) -> None:
        """Imitate until validation success stops rising; or, given ``for_seconds``, for that long without looking."""
        config, at = self.config.sft, self.progress
        self.actors.ask_learner("begin", "sft")
        started = time.perf_counter()
        folder = self.config.run_dir / "demonstrations"
        demonstrations = self.actors.start("demonstrate", self._sft_specs(at.sft_step), folder)
        with progress("SFT", max_steps) as bar:
            while at.sft_step < max_steps:
                batch = self.actors.collect(demonstrations, "demonstrations")
                demonstrations = self.actors.start("demonstrate", self._sft_specs(at.sft_step + 1), folder)
                scalars = self.actors.ask_learner("update", batch, folder).scalars()
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
        success = self.evaluate("validation", config.eval_tasks, self.config.rollout.temperature).success
        at.sft_curve.append([at.sft_step, success])
        self.metrics.write(at.sft_step, {"sft/validation_success": success})
        print(f"SFT step {at.sft_step:4d}: validation success {success:.3f}")
        at.evals_without_best = 0 if success > at.best_success else at.evals_without_best + 1
        at.best_success = max(at.best_success, success)
        return at.sft_step >= config.min_steps and at.evals_without_best >= config.patience

    def _rl(self) -> None:
        config, at = self.config, self.progress
        if not config.steps:
            self._end_rl()
            return
        print(self.actors.ask_learner("formula"))
        is_async = config.schedule == "one_step_async"
        pending: list[Any] = []
        starved = Starvation()
        with progress("RL", config.steps - at.rl_step) as bar:
            while at.rl_step < config.steps and not starved.is_over:
                started = time.perf_counter()
                sampled = self._seal(at.rl_step, pending or self._start_rollouts(at.rl_step))
                # One step ahead: the next rollouts run on the weights of now while the learner changes them.
                ahead = is_async and at.rl_step + 1 < config.steps
                pending = self._start_rollouts(at.rl_step + 1) if ahead else []
                starved.count(sampled, is_trained=self._train_step(sampled))
                if starved.is_hopeless:
                    raise StarvedError(starved.message(self.buffer.ledger.counts().dropped))
                self._publish()  # takes effect behind the rollouts that run, which keep the weights that they began on
                at.spend("rl", started)
                reward = rollout_metrics(sampled, config.rewards).scalars().get("rollout/reward", math.nan)
                bar.advance(note=f"reward {reward:.3f}")
                self._after_rl_step()
        if starved.is_over:
            print(f"every attempt succeeded for {starved.steps} steps: nothing is left to learn from these tasks")
        if pending:
            unused = self.actors.collect(pending, "rollouts")
            self.buffer.ledger.drop([s.key for s in unused], "unused")
        self._end_rl()
        self._checkpoint()

    def _end_rl(self) -> None:
        self.progress.phase, self.progress.ended_of_steps = "final", self.config.steps

    def _train_step(self, sampled: Sequence[Summary]) -> bool:
        """Lease a batch, update on it and record both. False when no group could be trained on."""
        at = self.progress
        groups = self.buffer.take(self._step_ordinals(at.rl_step), at.rl_step)
        batch = [summary for group in groups for summary in group]
        # Durable before the optimizer moves: what a step trains on is known whatever happens next.
        self.events.lease(at.rl_step + 1, [s.key for s in batch], [s.digest for s in batch])
        metrics = rollout_metrics(sampled, self.config.rewards)
        if batch:
            for name, metric in self.actors.ask_learner("update", batch, self.buffer.store.root):
                metrics.add(name, metric)
            if "train/logprob_gap_max" in metrics and all(s.oldest_step in (at.rl_step, None) for s in batch):
                # Of older rollouts the gap is mostly what was learned since.
                gap = Max(metrics["train/logprob_gap_max"])
                at.max_logprob_gap = (gap if at.max_logprob_gap is None else Max(at.max_logprob_gap) + gap).value
                at.gap_steps += 1
        at.rl_step += 1
        self.metrics.write(at.rl_step, metrics)
        self.events.step(at.rl_step, metrics.scalars())
        return bool(batch)

    def _after_rl_step(self) -> None:
        config, at = self.config, self.progress
        every = config.evaluation.every
        if every and at.rl_step % every == 0:
            found = self.evaluate(config.evaluation.split, config.evaluation.num_tasks, config.rollout.temperature)
            at.rl_curve.append([at.rl_step, found.success])
            self.metrics.write(at.rl_step, {"eval/success": found.success})
        if at.rl_step % config.checkpoint_every == 0 and at.rl_step < config.steps:
            self._checkpoint()

    def _final(self) -> None:
        config, at = self.config, self.progress
        self._publish()
        if config.steps:
            self._evaluate_into("after_rl")
        if config.steps and config.sft.max_steps and config.evaluation.sft_only_baseline:
            print(f"for comparison: SFT alone, for the {at.seconds['rl']:.0f} s that RL took")
            self.actors.ask_learner("load", config.run_dir / BEFORE_RL, self.vocabulary)
            self._sft_steps(at.sft_step + 1_000_000, for_seconds=at.seconds["rl"])
            self._publish()
            self._evaluate_into("sft_only")

    # --- what the phases are made of ----------------------------------------------------------------------------------

    def evaluate(self, split: str, num_tasks: int, temperature: float) -> EvaluationReport:
        """Play held-out tasks with the seeds of every other evaluation."""
        specs = self._specs(split, num_tasks)
        return report(self.actors.play("rollout", specs, "evaluation", temperature, self.config.evaluation.seed))

    def _evaluate_into(self, name: str) -> None:
        """Evaluate sampled and greedy; keep both reports under ``name``."""
        config, at = self.config, self.progress
        started = time.perf_counter()
        for suffix, temperature in (("", config.rollout.temperature), ("_greedy", 0.0)):
            found = self.evaluate(config.evaluation.split, config.evaluation.num_tasks, temperature)
            at.reports[name + suffix] = found.to_dict()
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
        folder = self.buffer.store.root
        return self.actors.start("rollout", specs, config.rollout.temperature, config.seed, folder)

    def _missing(self, ordinal: int) -> list[EpisodeSpec]:
        """Next attempts of the samples of a group that have none alive."""
        # Tasks that no demonstration has shown.
        index = self.config.sft.max_steps * self.config.sft.batch_size + ordinal
        task = Task(environment=self.config.environment.id, split="train", index=index)
        attempts = self.buffer.ledger.next_attempts(ordinal, self.config.rollout.group_size)
        return [EpisodeSpec(key=key, task=task, seed_attempt=retries) for key, retries in attempts]

    def _step_ordinals(self, step: int) -> range:
        groups = self.config.rollout.groups_per_step
        return range(step * groups, (step + 1) * groups)

    def _seal(self, step: int, pending: list[Any]) -> list[Summary]:
        """Record what was sampled; return all that the step has, also from before a restart.

        What infrastructure failed is sampled again, up to ``max_attempts`` times; then it is sealed without a reward.
        """
        while pending:
            summaries = self.actors.collect(pending, "rollouts")
            again = [s for s in summaries if self._may_retry(s)]
            done = [s for s in summaries if s not in again]
            self.buffer.seal(done)
            self.events.seal([s.key for s in done], [s.digest for s in done])
            self._say_once(summaries)
            for summary in again:
                self.buffer.ledger.drop([summary.key], f"failed_{summary.outcome.cause}")
                self.events.fail(summary.key, summary.outcome)
            pending = self._start_rollouts(step) if again else []
        sampled = self.buffer.summaries(self._step_ordinals(step))
        check_failures(sampled, self.config.rewards, self.config.rollout.max_failed_frac)
        return sampled

    def _say_once(self, summaries: Sequence[Summary]) -> None:
        """Print each kind of failure when it is met for the first time: a run may go on with a few of them."""
        for summary in summaries:
            failed = {summary.outcome.detail} if summary.outcome.is_infrastructure_failure else set()
            for text in (failed | set(summary.reward_errors.values())) - self.said:
                self.said.add(text)
                print(f"task {summary.task.index}: {text}")

    def _may_retry(self, summary: Summary) -> bool:
        if not summary.outcome.is_infrastructure_failure:
            return False
        tried = self.buffer.ledger.attempts(ordinal=summary.key.ordinal)
        tried = [a for a in tried if a.key.sample == summary.key.sample and a.reason not in REPEATABLE]
        return len(tried) < self.config.rollout.max_attempts

    def _no_signal(self, group: Sequence[Summary]) -> str | None:
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
            "vocabulary": self.vocabulary,
            "state": to_jsonable(asdict(at)),
            "consumed": self.buffer.ledger.consumed(at.rl_step).to_json(),
        }
