"""Encoded sequences of a dataset in one Arrow file, and the batch of any step: a pure function of seed and step.

An epoch goes through the sequences in an order of its own, and a batch is those that begin within the next
``batch_tokens`` tokens of that endless row. So nothing is padded, every sequence is read once an epoch, and a resumed
run finds its place without reading what came before.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from k3rl.errors import ConfigError
from k3rl.trajectory import Outcome, Segment, Task, Trajectory, TrajectoryKey

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pyarrow as pa

GROUP_TOKENS = 2**22
"""Tokens after which a record batch is written: memory does not grow with the dataset."""


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """What a row of a dataset became; of no tokens when it was left out."""

    row: int
    ids: np.ndarray  # [n] int32
    learnt: np.ndarray  # [n] bool: the loss is on these


def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema([("row", pa.int64()), ("ids", pa.list_(pa.int32())), ("learnt", pa.list_(pa.bool_()))])


def write_corpus(path: Path, sequences: Iterable[Sequence]) -> None:
    """Write the new file ``path``; it has its name only once it is whole and on the disk."""
    import pyarrow as pa

    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    schema = _schema()
    with open(draft, "wb") as file:
        with pa.ipc.new_stream(file, schema) as writer:
            group: list[Sequence] = []
            tokens = 0
            for sequence in sequences:
                group.append(sequence)
                tokens += len(sequence.ids)
                if tokens >= GROUP_TOKENS:
                    writer.write_batch(_record_batch(group, schema))
                    group, tokens = [], 0
            writer.write_batch(_record_batch(group, schema))
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def _record_batch(group: list[Sequence], schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    columns = [
        pa.array([s.row for s in group], pa.int64()),
        pa.array([s.ids for s in group], schema.field("ids").type),
        pa.array([s.learnt for s in group], schema.field("learnt").type),
    ]
    return pa.record_batch(columns, schema=schema)


class Corpus:
    """Reads what :func:`write_corpus` wrote; the file is mapped, not loaded.

    Raises:
        ConfigError: it has no sequence to learn from, or one that is longer than ``batch_tokens``.
    """

    def __init__(self, path: Path, *, batch_tokens: int, seed: tuple[int, ...]) -> None:
        import pyarrow as pa

        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        self.path, self.batch_tokens, self._seed = path, batch_tokens, seed
        self._rows, self._ids, self._learnt = table["row"], table["ids"], table["learnt"]
        lengths = np.concatenate([np.diff(part.offsets.to_numpy()) for part in self._ids.chunks])
        self._kept = np.flatnonzero(lengths)
        self._lengths = lengths[self._kept].astype(np.int64)
        if not len(self._kept):
            raise ConfigError(f"{path} has no sequence to learn from; {self.num_left_out} rows were too long or empty")
        longest = self._lengths.max()
        if longest > batch_tokens:
            raise ConfigError(f"{path} has a sequence of {longest} tokens, more than the {batch_tokens} of a batch")

    @property
    def num_sequences(self) -> int:
        return len(self._kept)

    @property
    def num_left_out(self) -> int:
        """Rows that were too long or empty."""
        return len(self._ids) - len(self._kept)

    @cached_property
    def num_tokens(self) -> int:
        return int(self._lengths.sum())

    def batch(self, step: int) -> list[Trajectory]:
        """Sequences of update ``step`` (from 0) as trajectories whose actions are what is to be learnt."""
        low, high = step * self.batch_tokens, (step + 1) * self.batch_tokens
        out: list[Trajectory] = []
        for epoch in range(low // self.num_tokens, (high - 1) // self.num_tokens + 1):
            order, starts = self._epoch(epoch)
            first, last = np.searchsorted(starts, [low - epoch * self.num_tokens, high - epoch * self.num_tokens])
            out += [self._trajectory(int(order[i]), epoch * self.num_sequences + i) for i in range(first, last)]
        return out

    def in_order(self) -> Iterable[list[Trajectory]]:
        """All sequences once, as they stand in the file, in batches of at most ``batch_tokens``."""
        batch: list[Trajectory] = []
        tokens = 0
        for i, length in enumerate(self._lengths):
            if tokens + length > self.batch_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(self._trajectory(i, i))
            tokens += length
        yield batch

    @lru_cache(maxsize=2)  # noqa: B019 - a corpus lives as long as its stage
    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Order of the sequences, and the token at which each begins."""
        order = np.random.default_rng([*self._seed, epoch]).permutation(self.num_sequences)
        lengths = self._lengths[order]
        return order, np.cumsum(lengths) - lengths

    def _trajectory(self, index: int, ordinal: int) -> Trajectory:
        at = int(self._kept[index])
        ids = self._ids[at].values.to_numpy()
        learnt = self._learnt[at].values.to_numpy(zero_copy_only=False)
        borders = [0, *(np.flatnonzero(np.diff(learnt)) + 1).tolist(), len(ids)]
        segments: list[Segment] = []
        for start, end in itertools.pairwise(borders):
            link = len(segments) - 1 if segments else None
            recorded = {}
            if learnt[start]:
                # Certain, as a demonstrator's: nothing but imitation may use them.
                size = end - start
                recorded = {"rollout_logprobs": np.zeros(size, np.float32), "version_index": np.zeros(size, np.int32)}
            kind = "action" if learnt[start] else "observation" if segments else "prompt"
            segments.append(Segment(kind=kind, token_ids=ids[start:end], context=link, follows=link, **recorded))
        return Trajectory(
            key=TrajectoryKey(ordinal=ordinal, sample=0),
            task=Task(environment=self.path.stem, split="train", index=self._rows[at].as_py()),
            segments=tuple(segments),
            outcome=Outcome(status="completed"),
        )
