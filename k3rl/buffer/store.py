"""Payload files: one Parquet file per write, whole or absent, and refused when a single bit is wrong."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from k3rl.errors import K3rlError
from k3rl.trajectory import Trajectory, TrajectoryKey, from_table, to_table


class PayloadError(K3rlError):
    """A payload file is missing or damaged; the message names it."""


class Store:
    """Payload files below ``root``. A URI is a path relative to it, so that a run folder can be moved."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self._parsed: tuple[str, list[Trajectory]] | None = None  # the last file: its groups are asked for one by one

    def write(self, trajectories: Sequence[Trajectory]) -> list[tuple[TrajectoryKey, str, str]]:
        """Write ``trajectories`` to one new file; returns (key, uri, sha256 of the file) of each.

        The file has its final name only once its bytes are on the disk. Two writers never share a name.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not trajectories:
            return []
        sink = pa.BufferOutputStream()
        pq.write_table(to_table(trajectories), sink, compression="zstd")
        data = sink.getvalue().to_pybytes()
        uri = f"{trajectories[0].key.ordinal:08d}-{uuid.uuid4().hex[:12]}.parquet"
        temporary = self.root / f".{uri}.tmp"
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, self.root / uri)
        _sync_folder(self.root)
        digest = hashlib.sha256(data).hexdigest()
        return [(trajectory.key, uri, digest) for trajectory in trajectories]

    def read(self, uri: str, digest: str) -> list[Trajectory]:
        """Read every trajectory of a file; PayloadError when it is missing or not the file that was sealed."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.root / uri
        try:
            data = path.read_bytes()
        except OSError as error:
            raise PayloadError(f"payload {path} cannot be read: {error.strerror}") from error
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            raise PayloadError(
                f"payload {path} is damaged: {len(data)} bytes with sha256 {found[:16]}, sealed as {digest[:16]}"
            )
        if self._parsed is None or self._parsed[0] != digest:
            self._parsed = (digest, from_table(pq.read_table(pa.BufferReader(data))))
        return self._parsed[1]

    def remove_leftovers(self) -> int:
        """Delete half-written files of processes that are gone (call it when no other process writes)."""
        leftovers = list(self.root.glob(".*.tmp"))
        for path in leftovers:
            path.unlink()
        return len(leftovers)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
