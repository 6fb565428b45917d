"""``k3rl sft``: training on datasets in stages, each with a length of context of its own (K3 report §3.4).

    for each stage:   encode the dataset once   ->   update, now and then validate and checkpoint

Weights and optimiser go through all stages; the schedule of the learning rate starts anew in each. Everything that the
next step depends on is in the checkpoint or a function of the configuration, so that a run which was killed takes the
identical next step.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from k3rl.buffer.corpus import Corpus, write_corpus
from k3rl.config import to_dict
from k3rl.learner.worker import LearnerWorker
from k3rl.metrics import Mean
from k3rl.model.config import count_parameters
from k3rl.observe.console import progress, table
from k3rl.observe.tracker import MetricsWriter, to_jsonable, write_whole
from k3rl.rollout.chat_format import build_chat_format, vocabulary_of
from k3rl.runtime.checks import check_source, check_vocabulary
from k3rl.runtime.datasets import encode_dataset, open_rows
from k3rl.runtime.job import open_run, with_absolute_paths

if TYPE_CHECKING:
    from pathlib import Path

    from k3rl.config import SftJobConfig, StageConfig

LAST = 0.1
"""Share of a stage's steps over which its training loss is averaged for the summary."""
PROBED_ROWS = 100
"""Rows that a dry run encodes of each dataset."""


@dataclass(slots=True)
class StageReport:
    """What became of a stage so far."""

    tokens: int = 0
    seconds: float = 0.0
    left_out: int = 0
    """Rows that were too long or empty."""
    loss_total: float = 0.0
    loss_tokens: float = 0.0
    """Of the stage's last steps together, in nats, and the tokens that it is of."""
    validation: list[tuple[int, float]] = field(default_factory=list)
    """Steps of the stage, and the loss on its validation set after them."""

    @property
    def loss(self) -> float | None:
        return self.loss_total / self.loss_tokens if self.loss_tokens else None


@dataclass(slots=True)
class SftProgress:
    """Where a job stands: the part of a checkpoint that is no tensor."""

    step: int = 0
    """Updates of all stages."""
    stages: dict[str, StageReport] = field(default_factory=dict)

    @staticmethod
    def from_state(state: dict[str, Any]) -> SftProgress:
        """Inverse of ``asdict``."""
        return SftProgress(state["step"], {name: StageReport(**report) for name, report in state["stages"].items()})


def run_sft(config: SftJobConfig, *, resume: bool = False) -> dict[str, Any]:
    """Run a job of ``k3rl sft`` to its end and return its summary (also written to ``summary.json``).

    Raises ConfigError before anything is started or changed; after any other error the job can be resumed.
    """
    config = with_absolute_paths(config)
    with open_run(config, resume=resume, check=lambda: check_sft(config)) as summary:
        if summary is not None:
            return summary
        job = SftJob(config)
        try:
            job.start()
            return job.run()
        finally:
            job.metrics.close()


def check_sft(config: SftJobConfig) -> None:
    """Raise ConfigError for a job that could not run: its vocabulary, its weights, a dataset's first row."""
    check_vocabulary(config)
    check_source(config)
    chat_format = build_chat_format(config)
    for name, stage in config.stages.items():
        for key, dataset in _datasets(stage).items():
            if not _encoded(config, name, key).exists():
                next(encode_dataset(open_rows(dataset, f"stages.{name}.{key}"), chat_format, stage.length), None)


class SftJob:
    """One job: its folder on disk and its learner."""

    def __init__(self, config: SftJobConfig) -> None:
        self.config = config
        self.progress = SftProgress()
        self.vocabulary = vocabulary_of(config)
        self.learner = LearnerWorker(config, "cuda" if torch.cuda.is_available() else "cpu")
        self.metrics = MetricsWriter(config.run_dir)

    def start(self) -> None:
        """Go back to the last good checkpoint, or start from the weights that the job starts from."""
        self.learner.claim(self.config.run_dir)
        loaded = self.learner.load(self.config.run_dir / "checkpoints", self.vocabulary)
        if loaded is not None:
            state, _, damaged = loaded
            for message in damaged:
                print(f"passed over a damaged checkpoint: {message}")
            self.progress = SftProgress.from_state(state)

    def run(self) -> dict[str, Any]:
        """Go through the stages that are left."""
        first = 0
        for index, (name, stage) in enumerate(self.config.stages.items()):
            if self.progress.step < first + stage.steps:
                self._stage(index, name, stage, self.progress.step - first)
            first += stage.steps
        return self._write_summary()

    def _stage(self, index: int, name: str, stage: StageConfig, done: int) -> None:
        config, at = self.config, self.progress
        self.learner.begin(name)
        corpora = {key: self._corpus(index, name, key, dataset) for key, dataset in _datasets(stage).items()}
        corpus, validation = corpora["dataset"], corpora.get("validation")
        report = at.stages.setdefault(name, StageReport(left_out=corpus.num_left_out))
        averaged = max(1, round(LAST * stage.steps))
        started = time.perf_counter()
        with progress(name, stage.steps - done) as bar:
            for step in range(done, stage.steps):
                metrics = self.learner.update_on(corpus.batch(step))
                at.step += 1
                report.tokens += int(metrics["train/input_tokens"])
                logprob = dict(metrics).get("train/logprob")
                if isinstance(logprob, Mean) and step >= stage.steps - averaged:
                    report.loss_total -= logprob.total
                    report.loss_tokens += logprob.count
                self.metrics.write(at.step, metrics)
                bar.advance(note=f"loss {-logprob.value:.3f}" if logprob is not None else "")
                is_over = step + 1 == stage.steps
                if validation is not None and (is_over or (config.eval_every and (step + 1) % config.eval_every == 0)):
                    self._validate(name, step + 1, validation)
                if is_over or at.step % config.checkpoint_every == 0:
                    report.seconds += time.perf_counter() - started
                    started = time.perf_counter()
                    self._checkpoint()

    def _corpus(self, index: int, name: str, key: str, dataset: str) -> Corpus:
        """What ``dataset`` became, encoded once a run: a resumed one trains on the very same."""
        path = _encoded(self.config, name, key)
        stage = self.config.stages[name]
        if not path.exists():
            started = time.perf_counter()
            rows = open_rows(dataset, f"stages.{name}.{key}")
            write_corpus(path, encode_dataset(rows, build_chat_format(self.config), stage.length))
            print(f"{name}: encoded {dataset} in {time.perf_counter() - started:.1f} s")
        corpus = Corpus(path, batch_tokens=stage.batch_tokens, seed=(self.config.seed, index))
        left_out = f", {corpus.num_left_out} rows left out (too long or empty)" if corpus.num_left_out else ""
        print(f"{name}: {key} has {corpus.num_sequences} sequences, {corpus.num_tokens} tokens{left_out}")
        return corpus

    def _validate(self, name: str, steps: int, validation: Corpus) -> None:
        loss = sum((self.learner.loss_on(batch) for batch in validation.in_order()), Mean(0.0, 0.0)).value
        self.progress.stages[name].validation.append((steps, loss))
        self.metrics.write(self.progress.step, {"validation/loss": loss})
        print(f"{name} step {steps}: validation loss {loss:.4f}")

    def _checkpoint(self) -> None:
        at = self.progress
        self.learner.save(
            self.config.run_dir / "checkpoints",
            step=at.step,
            version=self.learner.weights(0, at.step).version,
            vocabulary=self.vocabulary,
            state=to_jsonable(asdict(at)),
            consumed={},
            keep=self.config.checkpoints_kept,
        )

    def _write_summary(self) -> dict[str, Any]:
        at, run_dir = self.progress, self.config.run_dir
        stages = {name: {**asdict(report), "loss": report.loss} for name, report in at.stages.items()}
        summary = to_jsonable({"steps": at.step, "seed": self.config.seed, "stages": stages})
        path = run_dir / "summary.json"
        write_whole(path, json.dumps(summary, indent=1) + "\n")
        rows = [
            {
                "stage": name,
                "length": stage.length,
                "steps": stage.steps,
                "tokens": f"{report.tokens:,}",
                "loss": report.loss,
                "validation": report.validation[-1][1] if report.validation else None,
                "s": round(report.seconds, 1),
            }
            for (name, stage), report in zip(self.config.stages.items(), at.stages.values(), strict=True)
        ]
        table("Stages; losses in nats a token", rows)
        print(f"run folder: {run_dir}\nsummary:    {path}\ncurves:     tensorboard --logdir {run_dir}")
        print(f"go on with: k3rl train CONFIG init_from={run_dir}")
        return summary


def print_stages(config: SftJobConfig) -> None:
    """What a job would do, from the first rows of its datasets. Raises ConfigError for what cannot run."""
    import yaml

    check_sft(config)
    print(yaml.safe_dump(to_dict(config), sort_keys=False, default_flow_style=None, width=120))
    chat_format = build_chat_format(config)
    optimizer = config.learner.optimizer
    total, active = count_parameters(config.model)
    rows = []
    for name, stage in config.stages.items():
        source = open_rows(stage.dataset, f"stages.{name}.dataset").first(PROBED_ROWS)
        probed = list(encode_dataset(source, chat_format, stage.length))
        sizes = [len(sequence.ids) for sequence in probed]
        kept = sum(size > 0 for size in sizes)
        rows.append(
            {
                "stage": name,
                "length": stage.length,
                "batch tokens": stage.batch_tokens,
                "steps": stage.steps,
                "tokens": f"{stage.steps * stage.batch_tokens:,}",
                "peak lr": optimizer.lr if stage.lr is None else stage.lr,
                "mean length": sum(sizes) / kept if kept else None,
                "left out": f"{1 - kept / len(sizes):.0%}" if sizes else None,
            }
        )
    table(f"Stages; mean length and what is left out: of the first {PROBED_ROWS} rows", rows)
    table("Model", [{"parameters": f"{total:,}", "active": f"{active:,}"}])


def _datasets(stage: StageConfig) -> dict[str, str]:
    """By key of the stage."""
    given = {"dataset": stage.dataset, "validation": stage.validation}
    return {key: dataset for key, dataset in given.items() if dataset is not None}


def _encoded(config: SftJobConfig, name: str, key: str) -> Path:
    """Where a run keeps what a dataset of stage ``name`` became."""
    return config.run_dir / "datasets" / f"{name}.{key}.arrow"
