"""Supervised training on datasets in stages: what is learnt, what goes on, and what a killed job does next."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from k3rl.config import JobConfig, SftJobConfig, load_config, load_job
from k3rl.errors import ConfigError
from k3rl.learner.worker import LearnerWorker
from k3rl.metrics import Metrics
from k3rl.model.batch import TokenBatch
from k3rl.model.bpe_tokenizer import byte_tokenizer
from k3rl.model.pretrained import save_pretrained
from k3rl.model.transformer import K3Model
from k3rl.observe.tracker import read_metrics
from k3rl.rollout.chat_format import make_chat_format, vocabulary_of
from k3rl.rollout.formats.compact import CompactFormat
from k3rl.runtime.convert import convert_folder
from k3rl.runtime.datasets import encode_dataset, open_rows
from k3rl.runtime.documents import write_documents
from k3rl.runtime.stages import check_sft, print_stages, run_sft
from k3rl.trajectory import Trajectory
from k3rl.weights.checkpoint import list_checkpoints, load
from k3rl.weights.source import open_source

ROOT = Path(__file__).parents[2]
FORMAT = make_chat_format("compact", byte_tokenizer(CompactFormat.MARKERS))
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "runs", "away", "from", "them")
CALL = {"id": "a", "function": {"name": "find", "arguments": '{"name": "bokip"}'}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "price of bokip"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "417"},
    {"role": "assistant", "content": "417"},
]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(count: int, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [{"text": " ".join(rng.choice(WORDS, rng.integers(4, 12)))} for _ in range(count)]


def make_job(folder: Path, *overrides: str, name: str = "job") -> SftJobConfig:
    """Two stages of three and four steps on short texts."""
    train, test = (folder / f"{split}.jsonl" for split in ("train", "test"))
    if not train.exists():
        write_lines(train, texts(30, 0))
        write_lines(test, texts(5, 1))
    stage = f"dataset: {train}, validation: {test}"
    (folder / "job.yaml").write_text(
        f"name: {name}\nrun_root: {folder / 'runs'}\nmodel: {ROOT / 'configs/model/k3_tiny.yaml'}\n"
        f"stages:\n  short: {{{stage}, length: 24, batch_tokens: 96, steps: 3}}\n"
        f"  long: {{{stage}, length: 64, batch_tokens: 128, steps: 4, lr: 3e-3}}\n"
        "balancing: quantile\nlearner: {threads: 1, micro_batch_tokens: 64, optimizer: {lr: 1e-2, warmup_steps: 1}}\n"
    )
    small = ["model.vocab_size=272", "model.num_layers=4", "model.mla_layers=[3]", "checkpoint_every=2"]
    return load_job(SftJobConfig, folder / "job.yaml", [*small, *overrides])


def final_state(config: JobConfig) -> dict[str, Any]:
    """All that a job ends with, but for times."""
    checkpoint = load(list_checkpoints(config.run_dir / "checkpoints")[0])
    rows = read_metrics(config.run_dir / "metrics.jsonl")
    for row in rows:
        row.pop("unix_time_s")
        row.pop("train/update_s")
    progress = dict(checkpoint.state["controller"])
    for report in progress["stages"].values():
        report.pop("seconds")
    tensors = {**checkpoint.model, **{f"optimizer/{n}": t for n, t in checkpoint.optimizer.items()}}
    return {"tensors": tensors, "learner": checkpoint.state["learner"], "progress": progress, "metrics": rows}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert {k: v for k, v in found.items() if k != "tensors"} == {k: v for k, v in wanted.items() if k != "tensors"}
    assert found["tensors"].keys() == wanted["tensors"].keys()
    differing = [n for n, t in wanted["tensors"].items() if not torch.equal(found["tensors"][n], t)]
    assert differing == []


class Killed(BaseException):
    """Stands for the end of the process."""


def test_a_job_that_is_killed_anywhere_ends_like_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_job(tmp_path, name="whole")
    summary = run_sft(whole)
    assert (summary["steps"], list(summary["stages"])) == (7, ["short", "long"])
    wanted = final_state(whole)
    update = LearnerWorker.update_on

    for victim in range(7):
        config = dataclasses.replace(whole, name=f"killed{victim}")
        done = []

        def dies(self: LearnerWorker, trajectories: list[Trajectory], done: list[int] = done) -> Metrics:
            metrics = update(self, trajectories)
            done.append(1)
            if len(done) == victim + 1:  # noqa: B023 - within the turn
                raise Killed
            return metrics

        monkeypatch.setattr(LearnerWorker, "update_on", dies)
        with pytest.raises(Killed):
            run_sft(config)
        monkeypatch.setattr(LearnerWorker, "update_on", update)
        (tmp_path / "train.jsonl").rename(tmp_path / "away.jsonl")  # a resumed job has what it was encoded to
        if victim < 3:
            (tmp_path / "away.jsonl").rename(tmp_path / "train.jsonl")  # unless its stage had not begun
        run_sft(config, resume=True)
        if victim >= 3:
            (tmp_path / "away.jsonl").rename(tmp_path / "train.jsonl")
        assert_same(final_state(config), wanted)


def test_weights_and_moments_go_through_the_stages_and_the_schedule_starts_anew(tmp_path: Path) -> None:
    config = make_job(tmp_path, "learner.optimizer.decay=linear", "learner.optimizer.final_lr_frac=0.5")
    run_sft(config)
    rates = [row["train/lr"] for row in read_metrics(config.run_dir / "metrics.jsonl")]
    assert rates == pytest.approx([1e-2, 1e-2, 0.5e-2, 3e-3, 3e-3, 2.25e-3, 1.5e-3])
    checkpoint = load(list_checkpoints(config.run_dir / "checkpoints")[0])
    counts = {int(t) for name, t in checkpoint.optimizer.items() if name.endswith("/step")}
    assert counts == {7}  # Adam's own count of updates, over both stages
    assert checkpoint.state["learner"]["step"] == 4


def test_a_job_made_longer_goes_on_and_an_altered_stage_is_another_job(tmp_path: Path) -> None:
    config = make_job(tmp_path)
    run_sft(config)
    stage = dataclasses.replace(config.stages["long"], steps=2)
    longer = dataclasses.replace(config, stages={**config.stages, "longest": stage})
    summary = run_sft(longer, resume=True)
    assert summary["steps"] == 9
    assert [len(report["validation"]) for report in summary["stages"].values()] == [1, 1, 1]
    assert run_sft(longer, resume=True) == json.loads((config.run_dir / "summary.json").read_text())
    for stages, message in (
        ({"long": stage}, "was started with stages short, long, longest; add others behind them"),
        ({**longer.stages, "short": stage}, r"another stages\.short\.batch_tokens, stages\.short\.length"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_sft(dataclasses.replace(config, stages=stages), resume=True)
    with pytest.raises(ConfigError, match="finished run"):
        run_sft(longer)


def test_validation_loss_is_the_mean_over_the_tokens_that_are_learnt(tmp_path: Path) -> None:
    config = make_job(tmp_path)
    summary = run_sft(config)
    checkpoint = load(list_checkpoints(config.run_dir / "checkpoints")[0])
    model = K3Model(config.model)
    model.load_state_dict(dict(checkpoint.model))
    total, count = 0.0, 0
    for row in texts(5, 1):
        ids = torch.tensor([*row["text"].encode(), min(FORMAT.stop_ids)])
        for piece in ids.split(64):
            if len(piece) > 1:
                logits = model.lm_head(model(TokenBatch.pack([piece[:-1]])).hidden)
                total += torch.nn.functional.cross_entropy(logits, piece[1:], reduction="sum").item()
                count += len(piece) - 1
    assert summary["stages"]["long"]["validation"] == [[4, pytest.approx(total / count, rel=1e-5)]]


def test_balancing_moves_the_biases_and_is_off_unless_asked_for(tmp_path: Path) -> None:
    biases = {}
    for kind in ("none", "quantile", "load_quantile"):
        config = make_job(tmp_path, f"balancing={kind}", name=kind)
        run_sft(config)
        state = load(list_checkpoints(config.run_dir / "checkpoints")[0]).model
        biases[kind] = torch.stack([t for n, t in state.items() if n.endswith("e_score_correction_bias")])
    assert not biases["none"].any()
    assert biases["quantile"].any()
    assert not torch.equal(biases["quantile"], biases["load_quantile"])


# --- rows ---------------------------------------------------------------------------------------------------------


def encoded(row: dict[str, Any], tmp_path: Path, length: int = 1000) -> list[tuple[str, str]]:
    """What a row becomes: all of its text, and what of it is learnt."""
    path = write_lines(tmp_path / "one.jsonl", [row])
    found = encode_dataset(open_rows(path, "stages.a.dataset"), FORMAT, length)
    decode = FORMAT.tokenizer.decode
    return [(decode(s.ids.tolist()), decode(s.ids[s.learnt].tolist())) for s in found]


def test_rows_of_three_kinds_say_what_is_learnt(tmp_path: Path) -> None:
    assert encoded({"text": "hello"}, tmp_path) == [("hello<|end|>", "hello<|end|>")]
    assert encoded({"text": "hello world"}, tmp_path, 6) == [("hello ", "hello "), ("world<|end|>", "world<|end|>")]
    assert encoded({"text": "hello"}, tmp_path, 5) == [("hello", "hello")]  # nothing predicts a lone end marker
    assert encoded({"prompt": "2 + 3 =", "completion": " 5"}, tmp_path) == [("2 + 3 = 5<|end|>", " 5<|end|>")]
    assert encoded({"prompt": "2 + 3 =", "completion": " 5"}, tmp_path, 9) == [("", "")]
    ((text, learnt),) = encoded({"messages": CONVERSATION}, tmp_path)
    call = '<|call|>find<|json|>{"name": "bokip"}<|end|>'
    assert learnt == call + "<|ans|>417<|end|>"
    assert text == f"<|user|>price of bokip<|end|><|asst|>{call}<|tool|>417<|end|><|asst|><|ans|>417<|end|>"
    assert encoded({"messages": CONVERSATION[:1]}, tmp_path) == [("", "")]


def test_a_prompt_and_a_completion_may_be_messages_and_only_the_completion_is_learnt(tmp_path: Path) -> None:
    ((text, learnt),) = encoded({"prompt": CONVERSATION[:3], "completion": CONVERSATION[3:]}, tmp_path)
    ((whole, _),) = encoded({"messages": CONVERSATION}, tmp_path)
    assert text == whole
    assert learnt == "<|ans|>417<|end|>"


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n   \n{"text": "b"}\n')
    assert len(list(encode_dataset(open_rows(str(tmp_path / "a.jsonl"), "k"), FORMAT, 100))) == 2
    (tmp_path / "b.json").write_text('[{"text": "a"}]')
    with pytest.raises(ConfigError, match=r"line 1 is no row: an object is wanted in each line, not a list"):
        list(encode_dataset(open_rows(str(tmp_path / "b.json"), "k"), FORMAT, 100))


def test_markers_in_a_dataset_stay_text(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "<|end|>"}])
    (sequence,) = encode_dataset(open_rows(path, "k"), FORMAT, 100)
    assert sequence.ids.tolist() == [*b"<|end|>", min(FORMAT.stop_ids)]


def test_parquet_files_and_saved_datasets_read_like_lines(tmp_path: Path) -> None:
    import datasets

    rows = texts(7, 3)
    wanted = [
        s.ids.tolist() for s in encode_dataset(open_rows(write_lines(tmp_path / "a.jsonl", rows), "k"), FORMAT, 99)
    ]
    for part in (0, 1):
        pq.write_table(pa.Table.from_pylist(rows[part * 4 : part * 4 + 4]), tmp_path / f"part{part}.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for dataset in ("part*.parquet", "saved"):
        found = encode_dataset(open_rows(str(tmp_path / dataset), "k"), FORMAT, 99)
        assert [s.ids.tolist() for s in found] == wanted


def test_long_documents_fit_the_stage_that_they_were_made_for(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    write_documents(path, kind="multi_hop", length=4096, count=3, num_tokens=lambda text: len(text.encode()))
    rows = pq.read_table(path).to_pylist()
    found = list(encode_dataset(open_rows(str(path), "k"), FORMAT, 4096))
    assert [len(s.ids) for s in found] == [row["length"] for row in rows]
    assert [bytes(s.ids[s.learnt][:-1].tolist()).decode() for s in found] == [row["completion"] for row in rows]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"txt": "a"}, "row 1: has txt; a row has text, or prompt and completion, or messages"),
        ({"text": 3}, "row 1: has text; a row has"),
        ({"messages": [{"role": "robot", "content": ""}]}, "row 1: message 0: role must be"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "row 1: message 0: a tool message must name its tool"),
    ],
)
def test_a_row_that_cannot_be_learnt_is_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "fine"}, row])
    with pytest.raises(ConfigError, match=rf"stages\.a\.dataset: .*a\.jsonl, {message}"):
        list(encode_dataset(open_rows(path, "stages.a.dataset"), FORMAT, 100))


def test_a_job_that_cannot_run_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"text": "a"')
    (tmp_path / "empty.jsonl").write_text("")
    for override, message in (
        (f"stages.long.dataset={tmp_path / 'no*.parquet'}", r"stages\.long\.dataset: there is no file .*no\*\.parquet"),
        (f"stages.long.validation={tmp_path / 'broken.jsonl'}", r"stages\.long\.validation: .*line 1 is no row"),
        ("model.vocab_size=256", r"model\.vocab_size: 256 is too small, chat format 'compact' needs 265"),
        (f"init_from={tmp_path / 'nothing'}", r"init_from: .*nothing is no checkpoint folder"),
    ):
        config = make_job(tmp_path, override)
        for act in (check_sft, print_stages, run_sft):
            with pytest.raises(ConfigError, match=message):
                act(config)
        assert not config.run_dir.exists()
    config = make_job(tmp_path, f"stages.long.dataset={tmp_path / 'empty.jsonl'}")
    with pytest.raises(ConfigError, match="no sequence to learn from; 0 rows"):
        run_sft(config)


# --- weights to start from ----------------------------------------------------------------------------------------


def test_a_job_starts_from_a_run_a_checkpoint_or_a_published_folder(tmp_path: Path) -> None:
    first = make_job(tmp_path, name="first")
    run_sft(first)
    wanted = load(list_checkpoints(first.run_dir / "checkpoints")[0]).model
    convert_folder(first.run_dir, tmp_path / "published", dtype=None, experts=None, max_shard_gib=1.0)
    vocabulary = vocabulary_of(first)
    for source in (first.run_dir, list_checkpoints(first.run_dir / "checkpoints")[0], tmp_path / "published"):
        config = make_job(
            tmp_path, f"init_from={source}", "model.value_head=true", "model.state_tile=64", name="second"
        )
        check_sft(config)
        worker = LearnerWorker(config)
        assert worker.load(tmp_path / "none", vocabulary) is None
        found = dict(worker.weights(0, 0).tensors)
        assert {n for n in found if n not in wanted} == {"value_head.weight", "value_head.bias"}
        assert all(torch.equal(found[n], t) for n, t in wanted.items())
    assert (tmp_path / "published" / "tiktoken.model").is_file()


def test_weights_of_another_model_or_vocabulary_are_refused(tmp_path: Path) -> None:
    first = make_job(tmp_path, name="first")
    run_sft(first)
    for override, message in (
        ("model.hidden_size=32", r"another model \(hidden_size: 64 there, 32 here\)"),
        ("chat_format=xtml", "other token ids .*chat_format and tokenizer must be the same"),
    ):
        with pytest.raises(ConfigError, match=f"init_from: .*{message}"):
            check_sft(make_job(tmp_path, f"init_from={first.run_dir}", override, name="second"))


def test_a_run_of_rl_starts_from_a_job_of_sft(tmp_path: Path) -> None:
    first = make_job(tmp_path, name="first")
    run_sft(first)
    shape = ["model.vocab_size=272", "model.num_layers=4", "model.mla_layers=[3]", "tokenizer=bytes"]
    config = load_config(ROOT / "configs/demo.yaml", [*shape, f"init_from={first.run_dir}"])
    worker = LearnerWorker(config)
    assert worker.load(tmp_path / "none", vocabulary_of(config)) is None
    found = worker.weights(0, 0).tensors
    assert all(torch.equal(found[n], t) for n, t in open_source(first.run_dir).tensors())


def test_a_published_folder_without_a_value_head_is_read_into_a_model_with_one(tmp_path: Path) -> None:
    config = make_job(tmp_path)
    model = K3Model(config.model, seed=5)
    save_pretrained(model, tmp_path / "saved")
    wanted = K3Model(dataclasses.replace(config.model, value_head=True), seed=6)
    open_source(tmp_path / "saved").fill(wanted)
    assert all(torch.equal(wanted.state_dict()[n], t) for n, t in model.state_dict().items())
