"""Atomic checkpoints: a folder is either whole and proven by its digests, or it is not a checkpoint.

``checkpoints/step_000010/`` holds ``model.safetensors``, ``optimizer.safetensors``, ``state.json`` and, written last,
``manifest.json`` with the sha256 of each file. Everything is written and fsynced in a hidden folder that one rename
makes visible. No step of :func:`save` leaves the run without the previous checkpoint.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3rl.config import ModelConfig
from k3rl.errors import CheckpointError
from k3rl.trajectory import PolicyVersion
from k3rl.weights.base import weights_digest

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
TENSOR_FILES = ("model", "optimizer")
LIBRARIES = ("torch", "safetensors", "numpy", "pyarrow", "ray")
_VISIBLE = re.compile(r"step_(\d{6,})(\.replaced\d+)?")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """All that a run needs to take the identical next step."""

    step: int
    version: PolicyVersion
    model_config: Mapping[str, Any]
    """Plain form of the model's config; a checkpoint of another one is refused."""
    vocabulary: str
    """What the token ids mean: chat format and digest of the tokenizer. A checkpoint of another one is refused."""
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    """Everything else, JSON-able: schedule, counters, cursors."""
    consumed: Mapping[str, Any] = field(default_factory=dict)
    """JSON form of the ledger's consumed set: the trajectories that these weights were trained on."""


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """The newest good checkpoint, and what had to be passed over to find it."""

    checkpoint: Checkpoint
    path: Path
    damaged: tuple[str, ...]
    """One message for each newer checkpoint that is damaged; it names the file."""


class FileOperations:
    """The file operations of :func:`save`. ``before`` is called ahead of each one with its name and path: fault
    injection raises or kills there."""

    def __init__(self, before: Callable[[str, Path], None] | None = None) -> None:
        self._before = before or (lambda _name, _path: None)

    def make_folder(self, path: Path) -> None:
        """Make a new folder and its parents."""
        self._before("make_folder", path)
        path.mkdir(parents=True)

    def write_bytes(self, path: Path, data: bytes) -> None:
        """Write a new file."""
        self._before("write_bytes", path)
        path.write_bytes(data)

    def write_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write a new safetensors file; tensors that share memory are written apart."""
        from safetensors.torch import save_file

        self._before("write_tensors", path)
        save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, path)

    def sync(self, path: Path) -> None:
        """Force a file or a folder to the disk."""
        self._before("sync", path)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a folder; ``target`` does not exist."""
        self._before("rename", source)
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        """Delete a folder with all that it holds."""
        self._before("remove", path)
        shutil.rmtree(path)


def save(directory: str | Path, checkpoint: Checkpoint, *, keep: int = 3, files: FileOperations | None = None) -> Path:
    """Write ``checkpoint`` as ``directory/step_NNNNNN`` and delete old ones down to ``keep``; returns its path.

    When it returns, the checkpoint is on the disk and was read back. An older one is deleted only then, and never the
    last good one.
    """
    if keep < 1:
        raise CheckpointError(f"checkpoints_kept must be at least 1, got {keep}")
    files = files or FileOperations()
    directory = Path(directory)
    if not directory.is_dir():
        files.make_folder(directory)
    for leftover in directory.glob(".*.part"):
        files.remove(leftover)
    final = directory / f"step_{checkpoint.step:06d}"
    draft = directory / f".{final.name}.part"
    _write(draft, checkpoint, files)
    if final.exists():
        others = (final.with_suffix(f".replaced{number}") for number in itertools.count())
        replaced = next(path for path in others if not path.exists())
        files.rename(final, replaced)  # still a checkpoint to load_latest, should we die before the next line
    files.rename(draft, final)
    files.sync(directory)
    _retain(directory, keep, files)
    return final


def load_latest(
    directory: str | Path, model_config: Mapping[str, Any] | None = None, vocabulary: str | None = None
) -> LoadedCheckpoint | None:
    """Load the newest checkpoint whose digests all hold; None when there is none at all.

    Damaged ones are passed over and reported. Raises CheckpointError when every one is damaged, or when the newest good
    one is of another model than ``model_config`` or of another ``vocabulary``.
    """
    path, damaged = find_latest(directory)
    if path is None:
        return None
    return LoadedCheckpoint(checkpoint=load(path, model_config, vocabulary), path=path, damaged=damaged)


def find_latest(directory: str | Path) -> tuple[Path | None, tuple[str, ...]]:
    """The newest checkpoint whose digests all hold, and what is wrong with each newer one; (None, ()) without any.

    Raises CheckpointError when every one is damaged.
    """
    damaged: list[str] = []
    for path in list_checkpoints(directory):
        try:
            verify(path)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        return path, tuple(damaged)
    if damaged:
        raise CheckpointError(f"no checkpoint in {directory} is intact: " + "; ".join(damaged))
    return None, ()


def load(path: str | Path, model_config: Mapping[str, Any] | None = None, vocabulary: str | None = None) -> Checkpoint:
    """Load one checkpoint, to the CPU, after checking every digest.

    Raises CheckpointError that names the damaged file, the fields in which its model differs from ``model_config``, or
    its vocabulary.
    """
    from safetensors.torch import load_file

    path = Path(path)
    manifest = verify(path)
    if model_config is not None:
        _require_same_model(path, manifest["model_config"], model_config)
    if vocabulary is not None and vocabulary != manifest["vocabulary"]:
        raise CheckpointError(
            f"{path} was trained with other token ids ({manifest['vocabulary']}, here {vocabulary}): the chat format is"
            " another one, or the tools or template words of the environment have changed since"
        )
    tensors = {name: load_file(path / f"{name}.safetensors") for name in TENSOR_FILES}
    found = weights_digest(tensors["model"])
    if found != manifest["weights_sha256"]:
        raise CheckpointError(f"{path / 'model.safetensors'}: weights have sha256 {found}, the manifest says otherwise")
    return Checkpoint(
        step=manifest["step"],
        version=PolicyVersion(**manifest["version"]),
        model_config=manifest["model_config"],
        vocabulary=manifest["vocabulary"],
        state=json.loads((path / "state.json").read_text()),
        consumed=manifest["consumed"],
        **tensors,
    )


def list_checkpoints(directory: str | Path) -> list[Path]:
    """Folders that claim to be checkpoints, newest first."""
    directory = Path(directory)
    names = [p.name for p in directory.iterdir() if _VISIBLE.fullmatch(p.name)] if directory.is_dir() else []
    order = sorted(names, key=lambda name: (-int(name.split("_")[1].split(".")[0]), name))
    return [directory / name for name in order]


def verify(path: str | Path) -> dict[str, Any]:
    """Check every digest of a checkpoint and return its manifest; CheckpointError names the file that is wrong."""
    path = Path(path)
    manifest = read_manifest(path / "manifest.json")
    for name, expected in manifest["files"].items():
        try:
            found = _digest_file(path / name)
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error.strerror}") from error
        if found != expected:
            raise CheckpointError(f"{path / name} is damaged: sha256 {found[:16]}, the manifest says {expected[:16]}")
    return manifest


def fingerprint(model_config: Mapping[str, Any]) -> str:
    """sha256 of a model's config, however its keys are ordered."""
    return hashlib.sha256(_canonical(model_config)).hexdigest()


def _write(folder: Path, checkpoint: Checkpoint, files: FileOperations) -> None:
    files.make_folder(folder)
    names = [f"{name}.safetensors" for name in TENSOR_FILES] + ["state.json"]
    for name in TENSOR_FILES:
        files.write_tensors(folder / f"{name}.safetensors", getattr(checkpoint, name))
    files.write_bytes(folder / "state.json", _canonical(checkpoint.state))
    for name in names:
        files.sync(folder / name)
    manifest = {
        "format": FORMAT,
        "step": checkpoint.step,
        "version": asdict(checkpoint.version),
        "weights_sha256": weights_digest(checkpoint.model),
        "model_fingerprint": fingerprint(checkpoint.model_config),
        "model_config": dict(checkpoint.model_config),
        "vocabulary": checkpoint.vocabulary,
        "consumed": dict(checkpoint.consumed),
        "files": {name: _digest_file(folder / name) for name in names},
        "libraries": _library_versions(),
    }
    sealed = {"manifest": manifest, "sha256": hashlib.sha256(_canonical(manifest)).hexdigest()}
    files.write_bytes(folder / "manifest.json", _canonical(sealed))
    files.sync(folder / "manifest.json")
    files.sync(folder)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, provided that the file is byte for byte what :func:`_write` made."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        sealed = json.loads(data)
        manifest = sealed["manifest"]
        intact = _canonical(sealed) == data and sealed["sha256"] == hashlib.sha256(_canonical(manifest)).hexdigest()
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not intact:
        raise CheckpointError(f"{path} is damaged: its sha256 does not hold")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {manifest['format']}; this version of k3rl reads format {FORMAT}")
    return manifest


def _require_same_model(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    # A key that is younger than the checkpoint had its default.
    defaults = {f.name: f.default for f in fields(ModelConfig) if f.default is not MISSING and f.name in wanted}
    saved = {**defaults, **saved}
    if fingerprint(saved) == fingerprint(wanted):
        return
    saved, wanted = json.loads(_canonical(saved)), json.loads(_canonical(wanted))
    names = sorted(name for name in {*saved, *wanted} if saved.get(name) != wanted.get(name))
    listed = ", ".join(f"{n}: {saved.get(n, 'absent')} there, {wanted.get(n, 'absent')} here" for n in names)
    raise CheckpointError(f"{path} is of another model ({listed})")


def _retain(directory: Path, keep: int, files: FileOperations) -> None:
    paths = list_checkpoints(directory)
    kept = [path for path in paths if not path.suffix][:keep]
    if any(_is_good(path) for path in kept):  # newest first, so as a rule it reads one checkpoint
        for path in paths:
            if path not in kept:
                _discard(path, files)


def _is_good(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def _discard(path: Path, files: FileOperations) -> None:
    hidden = path.with_name(f".{path.name}.part")  # out of sight first: half a folder must never be seen
    files.rename(path, hidden)
    files.remove(hidden)


def _digest_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _library_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
