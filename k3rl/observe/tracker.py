"""Metrics on disk: one JSON line a step, and the same numbers in TensorBoard."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3rl.metrics import Metrics


class JsonLines:
    """An append-only file of JSON objects. A line that a crash tore is cut off when the file is opened again."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        whole = self.path.read_bytes().rfind(b"\n") + 1
        if whole < os.fstat(self._descriptor).st_size:
            os.ftruncate(self._descriptor, whole)

    def append(self, record: Mapping[str, Any], *, durable: bool = False) -> None:
        """Append one line; with ``durable`` it is on the disk when this returns. NaN and inf become strings."""
        data = json.dumps(to_jsonable(record), allow_nan=False).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]
        if durable:
            self.sync()

    def sync(self) -> None:
        """Force what was appended to the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Sync and close; closing twice is fine."""
        if self._descriptor >= 0:
            self.sync()
            os.close(self._descriptor)
            self._descriptor = -1


class MetricsWriter:
    """Writes the metrics of a run to ``run_dir/metrics.jsonl`` and, unless switched off, to ``run_dir/tensorboard/``.

    Example:
        >>> with MetricsWriter("runs/example", tensorboard=False) as writer:  # doctest: +SKIP
        ...     writer.write(1, {"train/loss": 0.5})
    """

    def __init__(self, run_dir: str | Path, *, tensorboard: bool = True) -> None:
        self._run_dir = Path(run_dir)
        self._lines = JsonLines(self._run_dir / "metrics.jsonl")
        self._board: Any = None
        self._wants_board = tensorboard

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def write(self, step: int, metrics: Metrics | Mapping[str, float]) -> None:
        """Write one line for ``step``. A mean over nothing is left out; non-finite numbers become "nan" or "inf"."""
        scalars = metrics.scalars() if isinstance(metrics, Metrics) else dict(metrics)
        self._lines.append({"step": step, "unix_time_s": round(time.time(), 3), **scalars})
        board = self._open_board()
        if board is not None:
            for name, value in scalars.items():
                board.add_scalar(name, float(value), step)

    def flush(self) -> None:
        """Force everything to the disk."""
        self._lines.sync()
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Flush and close."""
        self._lines.close()
        if self._board is not None:
            self._board.close()
            self._board = None

    def _open_board(self) -> Any:
        if self._board is None and self._wants_board:
            from torch.utils.tensorboard import SummaryWriter  # here, since it takes seconds to import

            self._board = SummaryWriter(str(self._run_dir / "tensorboard"))
        return self._board


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a ``metrics.jsonl``, one a step. Lines of one step are merged; of a number written twice the last counts,
    since a resumed run takes steps again."""
    by_step: dict[int, dict[str, Any]] = {}
    for row in read_lines(path):
        by_step[row["step"]] = by_step.get(row["step"], {}) | row
    return [by_step[step] for step in sorted(by_step)]


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file; a last line that a crash tore is ignored, any other bad line is a ValueError."""
    rows: list[dict[str, Any]] = []
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is torn, or empty
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is damaged: {error}") from error
    return rows


def write_whole(path: str | Path, text: str) -> None:
    """Replace the file ``path``: whoever reads it, whenever we die, finds the old text or the new one."""
    path = Path(path)
    draft = path.with_name(f".{path.name}.part")
    with open(draft, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def to_jsonable(value: Any) -> Any:
    """``value`` with every non-finite number as one of the strings "nan", "inf", "-inf"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): to_jsonable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    return value if value is None or isinstance(value, str | bool | int) else to_jsonable(float(value))
