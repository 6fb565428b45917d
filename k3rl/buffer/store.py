"""Payload files: one Parquet file per write, whole or absent, and refused when a single bit is wrong."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from k3rl.errors import K3rlError
from k3rl.trajectory import Summary, Trajectory, from_table, to_table


class PayloadError(K3rlError):
    """A payload file is missing or damaged; the message names it."""


class Store:
    """Payload files below ``root``. A URI is a path relative to it, so that a run folder can be moved."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)

    def write(self, trajectories: Sequence[Trajectory]) -> tuple[str, str]:
        """Write ``trajectories`` to one new file; returns its URI and sha256.

        The file has its final name only once its bytes are on the disk. Two writers never share a name.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        sink = pa.BufferOutputStream()
        pq.write_table(to_table(trajectories), sink, compression="zstd")
        data = sink.getvalue().to_pybytes()
        first = trajectories[0].key.ordinal if trajectories else 0
        uri = f"{first:08d}-{uuid.uuid4().hex[:12]}.parquet"
        temporary = self.root / f".{uri}.tmp"
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, self.root / uri)
        _sync_folder(self.root)
        return uri, hashlib.sha256(data).hexdigest()

    def verify(self, uri: str, digest: str) -> None:
        """Raise PayloadError when the file is missing or not the file that was sealed."""
        self._bytes(uri, digest)

    def read(self, uri: str, digest: str) -> list[Trajectory]:
        """Read every trajectory of a file; PayloadError when it is missing or not the file that was sealed."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        return from_table(pq.read_table(pa.BufferReader(self._bytes(uri, digest))))

    def read_all(self, summaries: Sequence[Summary]) -> list[Trajectory]:
        """The trajectories of ``summaries``, in their order, each file read once."""
        places = sorted({(s.uri, s.digest) for s in summaries})
        found = {trajectory.key: trajectory for place in places for trajectory in self.read(*place)}
        return [found[s.key] for s in summaries]

    def _bytes(self, uri: str, digest: str) -> bytes:
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
        return data

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
