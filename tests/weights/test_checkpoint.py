"""A checkpoint is whole or passed over, and a kill at any file operation leaves one to resume from."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from k3rl.buffer.ledger import ConsumedSet
from k3rl.errors import CheckpointError
from k3rl.trajectory import PolicyVersion
from k3rl.weights.base import weights_digest
from k3rl.weights.checkpoint import (
    Checkpoint,
    FileOperations,
    list_checkpoints,
    load,
    load_latest,
    save,
)

ROOT = Path(__file__).parents[2]
MODEL = {"hidden_size": 64, "mla_layers": (1, 3), "num_heads": 2}


def make(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(64, 33, generator=generator)
    return Checkpoint(
        step=step,
        version=PolicyVersion(incarnation=1, step=step, digest="abc"),
        model_config=MODEL,
        vocabulary="compact 0123",
        model={"weight": weight, "bias": weight[0].bfloat16(), "empty": torch.zeros(0), "scalar": torch.tensor(3)},
        optimizer={"momentum": torch.randn(64, 33, generator=generator)},
        state={"learner_step": step, "lr": 1e-3},
        consumed=ConsumedSet(step=step, frontier=2 * step, exceptions=frozenset({(1, 0), (99, 2)})).to_json(),
    )


def require_equal(found: Checkpoint, expected: Checkpoint) -> None:
    assert (found.step, found.version, found.state, found.consumed) == (
        expected.step,
        expected.version,
        expected.state,
        expected.consumed,
    )
    for name in ("model", "optimizer"):
        assert weights_digest(getattr(found, name)) == weights_digest(getattr(expected, name))


def test_what_was_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    path = save(tmp_path, make(10))
    assert path.name == "step_000010"
    require_equal(load(path, MODEL), make(10))
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    assert manifest["libraries"]["torch"] == torch.__version__.split("+")[0] or "torch" in manifest["libraries"]
    assert set(manifest["files"]) == {"model.safetensors", "optimizer.safetensors", "state.json"}


def test_an_empty_folder_holds_no_checkpoint(tmp_path: Path) -> None:
    assert load_latest(tmp_path) is None
    assert load_latest(tmp_path / "absent") is None


@pytest.fixture
def two(tmp_path: Path) -> Path:
    save(tmp_path, make(1))
    save(tmp_path, make(2))
    return tmp_path


def require_fallback(directory: Path, name: str) -> None:
    loaded = load_latest(directory, MODEL)
    assert loaded is not None
    require_equal(loaded.checkpoint, make(1))
    assert len(loaded.damaged) == 1
    assert f"step_000002/{name}" in loaded.damaged[0]


FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
def test_b57_a_truncated_or_missing_file_is_named_and_the_previous_checkpoint_is_used(two: Path, name: str) -> None:
    path = two / "step_000002" / name
    whole = path.read_bytes()
    for cut in sorted({0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 1, *range(0, len(whole), 4096)}):
        path.write_bytes(whole[:cut])
        require_fallback(two, name)
    path.unlink()
    require_fallback(two, name)


def test_b57_every_one_of_1000_bit_flips_is_detected_and_named(two: Path) -> None:
    random = np.random.default_rng(57)
    for number in range(1000):
        name = FILES[number % len(FILES)]
        path = two / "step_000002" / name
        whole = path.read_bytes()
        flipped = bytearray(whole)
        bit = int(random.integers(0, 8 * len(whole)))
        flipped[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(flipped)
        require_fallback(two, name)
        path.write_bytes(whole)


def test_when_every_checkpoint_is_damaged_the_error_names_each_file(two: Path) -> None:
    for step in (1, 2):
        (two / f"step_{step:06d}" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step_000002/model\.safetensors.*step_000001/model\.safetensors"):
        load_latest(two)


def test_a_checkpoint_of_another_model_is_refused_with_the_differing_fields(two: Path) -> None:
    other = {**MODEL, "hidden_size": 128, "value_head": True}
    with pytest.raises(CheckpointError, match="hidden_size: 64 there, 128 here, value_head: False there, True here"):
        load(two / "step_000002", other)
    with pytest.raises(CheckpointError, match="hidden_size"):
        load_latest(two, other)


def test_a_key_younger_than_the_checkpoint_had_its_default(two: Path) -> None:
    assert load(two / "step_000002", {**MODEL, "expert_format": "plain"}).step == 2
    with pytest.raises(CheckpointError, match="expert_format: plain there, mxfp4 here"):
        load(two / "step_000002", {**MODEL, "expert_format": "mxfp4"})


def test_b57_an_earlier_checkpoint_loads_as_it_was_after_a_later_one_was_saved(two: Path) -> None:
    require_equal(load(two / "step_000001"), make(1))


class Killed(BaseException):
    """Stands for the end of the process."""


def killing(at: int) -> tuple[FileOperations, list[str]]:
    done: list[str] = []

    def before(name: str, path: Path) -> None:
        if len(done) == at:
            raise Killed
        done.append(f"{name} {path.name}")

    return FileOperations(before), done


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("step", [1, 2])
def test_b57_a_kill_between_any_two_file_operations_leaves_a_checkpoint_and_the_next_save_works(
    tmp_path: Path, keep: int, step: int
) -> None:
    """``step`` 1 saves over the only checkpoint, as after a rollback; 2 saves the next one."""
    for at in range(100):
        directory = tmp_path / str(at)
        save(directory, make(1), keep=keep)
        files, done = killing(at)
        try:
            save(directory, make(step), keep=keep, files=files)
        except Killed:
            loaded = load_latest(directory)
            assert loaded is not None, done
            assert loaded.damaged == ()
            require_equal(loaded.checkpoint, make(loaded.checkpoint.step))
            save(directory, make(3), keep=1)
            assert [p.name for p in directory.iterdir()] == ["step_000003"]
        else:
            assert at >= 12
            return
        shutil.rmtree(directory)
    pytest.fail("save never finished")


def test_a_failing_write_leaves_the_previous_checkpoint_and_no_visible_new_one(tmp_path: Path) -> None:
    save(tmp_path, make(1))

    def full(name: str, path: Path) -> None:
        if name == "write_bytes" and path.name == "manifest.json":
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, make(2), files=FileOperations(full))
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_000001"]


def test_b33_retention_keeps_n_and_never_deletes_the_last_good_one(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, make(step), keep=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_000005", "step_000004"]

    def spoil(name: str, path: Path) -> None:
        if name == "sync" and path == tmp_path:  # the new checkpoint rots as soon as it is visible
            (tmp_path / "step_000006" / "model.safetensors").write_bytes(b"")
            (tmp_path / "step_000005" / "model.safetensors").write_bytes(b"")

    save(tmp_path, make(6), keep=2, files=FileOperations(spoil))
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert (loaded.checkpoint.step, len(loaded.damaged)) == (4, 2)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, "tests/weights")
from test_checkpoint import make
from k3rl.weights.checkpoint import FileOperations, save
count = 0
def before(name, path):
    global count
    if count == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    count += 1
save(Path(sys.argv[1]), make(2), files=FileOperations(before))
"""


def test_a_real_kill_9_in_the_middle_of_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, make(1))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), "4"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "."},
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    loaded = load_latest(tmp_path)
    assert loaded is not None
    require_equal(loaded.checkpoint, make(1))


def test_a_checkpoint_of_other_token_ids_is_refused_and_both_are_named(tmp_path: Path) -> None:
    save(tmp_path, make(1))
    assert load_latest(tmp_path, MODEL, "compact 0123") is not None
    with pytest.raises(CheckpointError, match=r"other token ids \(compact 0123, here xtml 0123\)"):
        load_latest(tmp_path, MODEL, "xtml 0123")
