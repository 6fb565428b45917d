"""What the controller did, in order: an append-only file from which a run can be explained and replayed.

Law L6: the batch of a step (keys and digests) is on the disk before the optimizer steps; :func:`check_order` verifies.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from k3rl.errors import LedgerError
from k3rl.observe.tracker import JsonLines, read_lines
from k3rl.trajectory import Outcome, PolicyVersion, Task, TrajectoryKey


class EventLog:
    """Appends events to ``path``; each has a running number ``seq`` that goes on after a restart.

    ``unix_time_s`` is for people; the order is that of ``seq``.
    """

    def __init__(self, path: str | Path) -> None:
        self._lines = JsonLines(path)
        events = read_events(path)
        self._next = events[-1]["seq"] + 1 if events else 0
        self.num_restores = sum(event["kind"] == "restore" for event in events)
        """How often the run was started before: the next incarnation."""

    def write(self, kind: str, *, durable: bool = False, **fields: Any) -> None:
        """Append an event of any kind; with ``durable`` it is on the disk when this returns."""
        head = {"seq": self._next, "kind": kind, "unix_time_s": round(time.time(), 3)}
        self._lines.append(head | fields, durable=durable)
        self._next += 1

    def issue(self, keys: Sequence[TrajectoryKey], tasks: Sequence[Task], version: PolicyVersion) -> None:
        """Attempts were handed out, to be sampled by ``version``."""
        names = [f"{task.environment}/{task.split}/{task.index}" for task in tasks]
        self.write("issue", keys=_texts(keys), tasks=names, **_version(version))

    def seal(self, keys: Sequence[TrajectoryKey], digests: Sequence[str]) -> None:
        """Attempts became durable."""
        self.write("seal", keys=_texts(keys), digests=list(digests))

    def fail(self, key: TrajectoryKey, outcome: Outcome) -> None:
        """An attempt was failed by the infrastructure and is given up; the next one takes its place."""
        self.write("fail", key=str(key), cause=outcome.cause, detail=outcome.detail)

    def lease(self, step: int, keys: Sequence[TrajectoryKey], digests: Sequence[str]) -> None:
        """The batch of update ``step``, in order. It is on the disk when this returns: call it before the update."""
        self.write("lease", durable=True, step=step, keys=_texts(keys), digests=list(digests))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The optimizer made update ``step``."""
        self.write("step", step=step, metrics=dict(metrics))

    def publish(self, step: int, version: PolicyVersion) -> None:
        """Weights went to the engines."""
        self.write("publish", durable=True, at_step=step, **_version(version))

    def checkpoint(self, step: int, path: str | Path) -> None:
        """The manifest of ``step`` is visible."""
        self.write("checkpoint", durable=True, step=step, path=str(path))

    def restore(self, step: int, lost: Sequence[TrajectoryKey]) -> None:
        """The run went back to the checkpoint of ``step`` (-1: to its beginning)."""
        self.write("restore", durable=True, step=step, lost=_texts(lost))

    def close(self) -> None:
        """Sync and close."""
        self._lines.close()


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Events in order. A last line that a crash tore is ignored; LedgerError names any other bad line."""
    try:
        return read_lines(path)
    except ValueError as error:
        raise LedgerError(str(error)) from error


def check_order(events: Sequence[Mapping[str, Any]]) -> None:
    """Raise LedgerError unless every step has its batch written down before it, once per step (L6)."""
    leased: set[int] = set()
    for event in events:
        if event["kind"] == "lease":
            leased.add(event["step"])
        elif event["kind"] == "step":
            if event["step"] not in leased:
                raise LedgerError(f"event {event['seq']}: step {event['step']} was taken before its batch was written")
            leased.discard(event["step"])


def _texts(keys: Sequence[TrajectoryKey]) -> list[str]:
    return [str(key) for key in keys]


def _version(version: PolicyVersion) -> dict[str, Any]:
    return {"incarnation": version.incarnation, "version": version.step, "digest": version.digest}
