"""The ledger: one row per attempt in SQLite, and what became of it. It is why every trajectory counts exactly once.

States::

    issued -> sealed -> leased(step) -> committed(step)
       |        |           |
       +--------+-----------+---------> dropped(reason)

A *step* is the number of the update, and of the weights that it makes: the batch leased for step 7 turns weights 6 into
weights 7, and a checkpoint of step 7 has consumed every lease up to 7. A checkpoint publishes its :class:`ConsumedSet`
in the same manifest as the weights; after a crash :meth:`Ledger.restore` makes the ledger agree with the manifest that
was loaded. A lease that the manifest does not contain changed only weights that are gone.

Calls are idempotent where a retry may repeat them (seal, lease, drop, commit) and durable when they return.
"""

from __future__ import annotations

import dataclasses
import itertools
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from k3rl.errors import LedgerError
from k3rl.trajectory import Summary, Task, TrajectoryKey

State = Literal["issued", "sealed", "leased", "committed", "dropped"]
SealResult = Literal["sealed", "duplicate"]

ALLOWED: dict[str, frozenset[str]] = {
    "issued": frozenset({"sealed", "dropped"}),
    "sealed": frozenset({"leased", "dropped"}),
    "leased": frozenset({"committed", "dropped"}),
    "committed": frozenset(),
    "dropped": frozenset(),
}
LIVE = ("sealed", "leased", "committed")
FINAL_REASONS = ("duplicate", "lost")
"""Drops that a rollback never undoes: another attempt won, or there is no payload."""
REPEATABLE = ("lost", "future")
"""Drops that have nothing to do with what was sampled: the next attempt repeats the random stream."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS attempts (
    ordinal INTEGER NOT NULL, sample INTEGER NOT NULL, attempt INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('issued', 'sealed', 'leased', 'committed', 'dropped')),
    step INTEGER, reason TEXT, uri TEXT, digest TEXT, policy_step INTEGER, summary TEXT,
    environment TEXT NOT NULL, split TEXT NOT NULL, task_index INTEGER NOT NULL,
    PRIMARY KEY (ordinal, sample, attempt)
) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS one_live_attempt ON attempts (ordinal, sample)
    WHERE state IN ('sealed', 'leased', 'committed');
CREATE INDEX IF NOT EXISTS by_state ON attempts (state, ordinal);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT OR IGNORE INTO counters VALUES ('issued', 0);
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One row of the ledger."""

    key: TrajectoryKey
    task: Task
    state: State
    step: int | None
    """Update that leased or consumed it, or for which it was dropped; None otherwise."""
    reason: str | None
    uri: str | None
    digest: str | None
    policy_step: int | None
    """Step of the oldest weights among the sampled tokens; None when nothing was sampled."""
    summary: Summary | None
    """What it was; None before it is sealed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerCounts:
    """How many attempts there are: in all, by state, and by reason among the dropped."""

    issued: int
    by_state: dict[str, int]
    dropped: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreReport:
    """What a restore did."""

    committed: int
    """Attempts that the manifest holds."""
    returned: int
    """Attempts that went back to sealed: leases, commits and drops of a future that is gone."""
    lost: tuple[TrajectoryKey, ...]
    """Attempts that never finished; :meth:`Ledger.next_attempts` names their successors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumedSet:
    """Sample keys that the weights of ``step`` were trained on.

    Below the ``frontier`` a key is consumed unless it is an exception; from the frontier on only exceptions are.
    """

    step: int = -1
    count: int = 0
    """How many keys are consumed."""
    frontier: int = 0
    exceptions: frozenset[tuple[int, int]] = frozenset()
    """(ordinal, sample) pairs."""

    def __contains__(self, key: TrajectoryKey) -> bool:
        return (key.ordinal < self.frontier) != ((key.ordinal, key.sample) in self.exceptions)

    def to_json(self) -> dict[str, Any]:
        """Plain form, with the exceptions by ordinal."""
        by_ordinal = itertools.groupby(sorted(self.exceptions), key=lambda pair: pair[0])
        exceptions = {str(ordinal): [sample for _, sample in pairs] for ordinal, pairs in by_ordinal}
        return {"step": self.step, "count": self.count, "frontier": self.frontier, "exceptions": exceptions}

    @staticmethod
    def from_json(values: dict[str, Any]) -> ConsumedSet:
        """Inverse of :meth:`to_json`."""
        pairs = {(int(ordinal), sample) for ordinal, samples in values["exceptions"].items() for sample in samples}
        return ConsumedSet(
            step=values["step"], count=values["count"], frontier=values["frontier"], exceptions=frozenset(pairs)
        )


class Ledger:
    """The ledger of one run, in the SQLite file ``path`` (made when it does not exist).

    Several processes may hold it open; each call is one transaction, and one fsync however many keys it carries.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._depth = 0
        try:
            self._db = sqlite3.connect(self.path, timeout=60.0, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            verdict = self._db.execute("PRAGMA quick_check").fetchone()[0]
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            self._db.executescript("BEGIN IMMEDIATE;" + _SCHEMA + "COMMIT;")
        except sqlite3.Error as error:
            raise LedgerError(f"cannot open the ledger {self.path}: {error}") from error

    def close(self) -> None:
        """Close the file. Nothing is pending: every call was durable when it returned."""
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make the calls inside one transaction with one fsync; an exception undoes all of them."""
        self._depth += 1
        try:
            if self._depth > 1:
                yield
                return
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException as error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise LedgerError(f"{self.path}: {error}; the transaction was undone") from error
                raise
        finally:
            self._depth -= 1

    def issue(self, keys: Sequence[TrajectoryKey], tasks: Sequence[Task]) -> None:
        """Record that ``keys`` are about to run on ``tasks`` (one each). A key is issued once."""
        with self.transaction():
            for key, task in zip(keys, tasks, strict=True):
                old = self.get(key)
                if old is not None:
                    raise _illegal(key, old.state, "issued")
                self._db.execute(
                    "INSERT INTO attempts (ordinal, sample, attempt, state, environment, split, task_index) "
                    "VALUES (?, ?, ?, 'issued', ?, ?, ?)",
                    (*dataclasses.astuple(key), task.environment, task.split, task.index),
                )
            self._db.execute("UPDATE counters SET value = value + ? WHERE name = 'issued'", (len(keys),))

    def seal(self, summaries: Sequence[Summary]) -> list[SealResult]:
        """Seal attempts whose payloads are durable. The first seal of a sample key wins, a later attempt is
        dropped("duplicate").

        Sealing the same attempt again changes nothing: "sealed" when the digest is the same, "duplicate" when the work
        was done twice with another result.
        """
        with self.transaction():
            return [self._seal(summary) for summary in summaries]

    def lease(self, keys: Sequence[TrajectoryKey], step: int) -> None:
        """Give ``keys`` to the update ``step``."""
        with self.transaction():
            for key in keys:
                old = self._require(key, "leased")
                if (old.state, old.step) != ("leased", step):
                    self._move(old, "leased", step=step)

    def drop(self, keys: Sequence[TrajectoryKey], reason: str, step: int | None = None) -> None:
        """Give ``keys`` up for ``reason``. With ``step``, a rollback to before that step undoes it."""
        with self.transaction():
            for key in keys:
                old = self._require(key, "dropped")
                if (old.state, old.reason) != ("dropped", reason):
                    self._move(old, "dropped", step=step, reason=reason)

    def commit(self, step: int) -> int:
        """Commit every lease up to ``step``: call it once the manifest of ``step`` is published. Returns how many."""
        with self.transaction():
            return self._db.execute(_COMMIT, (step,)).rowcount

    def consumed(self, step: int) -> ConsumedSet:
        """What the weights of ``step`` have been trained on: every lease and commit up to ``step``."""
        query = (
            "SELECT min(ordinal) FROM attempts WHERE state IN ('issued', 'sealed') "
            "OR (state IN ('leased', 'committed') AND step > ?)"
        )
        first_open = self._db.execute(query, (step,)).fetchone()[0]
        frontier = self.next_ordinal if first_open is None else first_open
        used = "state IN ('leased', 'committed') AND step <= ?"
        beyond = self._db.execute(
            f"SELECT ordinal, sample FROM attempts WHERE ordinal >= ? AND {used}", (frontier, step)
        ).fetchall()
        unused = self._db.execute(
            f"SELECT ordinal, sample FROM attempts WHERE ordinal < ? GROUP BY ordinal, sample HAVING NOT max({used})",
            (frontier, step),
        ).fetchall()
        count = self._db.execute(f"SELECT count(*) FROM attempts WHERE {used}", (step,)).fetchone()[0]
        return ConsumedSet(step=step, count=count, frontier=frontier, exceptions=frozenset(beyond + unused))

    def restore(self, consumed: ConsumedSet) -> RestoreReport:
        """Make the ledger agree with the manifest that was loaded (``ConsumedSet()`` when there is none).

        Leases, commits and drops after ``consumed.step`` return to sealed; what was running is dropped("lost"), and
        what weights after ``consumed.step`` sampled, a future that is gone, is dropped("future") to be sampled again.
        Raises LedgerError when manifest and ledger are not of one run.
        """
        with self.transaction():
            self._compare(consumed)
            self._db.execute(_COMMIT, (consumed.step,))
            returned = self._db.execute(
                "UPDATE attempts SET state = 'sealed', step = NULL WHERE state IN ('leased', 'committed') AND step > ?",
                (consumed.step,),
            ).rowcount
            for attempt in self.attempts(states=("dropped",)):
                undone = attempt.step is not None and attempt.step > consumed.step and attempt.uri is not None
                if undone and attempt.reason not in FINAL_REASONS and not self._is_live(attempt.key):
                    self._write(attempt.key, state="sealed", step=None, reason=None)
                    returned += 1
            lost = tuple(attempt.key for attempt in self.attempts(states=("issued",)))
            self.drop(lost, "lost")
            last = max(consumed.step, 0)  # before the first manifest the weights of step 0 are the initial ones
            sealed = self.attempts(states=("sealed",))
            self.drop([a.key for a in sealed if a.policy_step is not None and a.policy_step > last], "future")
            committed = self._db.execute("SELECT count(*) FROM attempts WHERE state = 'committed'").fetchone()[0]
            return RestoreReport(committed=committed, returned=returned, lost=lost)

    @property
    def next_ordinal(self) -> int:
        """The first ordinal that was never issued: the cursor into the run's stream of tasks."""
        return self._db.execute("SELECT coalesce(max(ordinal) + 1, 0) FROM attempts").fetchone()[0]

    def get(self, key: TrajectoryKey) -> Attempt | None:
        """The attempt ``key``, or None when it was never issued."""
        query = f"{_SELECT} WHERE ordinal = ? AND sample = ? AND attempt = ?"
        row = self._db.execute(query, dataclasses.astuple(key)).fetchone()
        return None if row is None else _attempt(row)

    def attempts(self, *, states: Collection[str] = tuple(ALLOWED), ordinal: int | None = None) -> list[Attempt]:
        """Attempts in order of key, in one of ``states``, of one group when ``ordinal`` is given."""
        where, values = f"state IN ({','.join('?' * len(states))})", [*states]
        if ordinal is not None:
            where, values = where + " AND ordinal = ?", [*values, ordinal]
        rows = self._db.execute(f"{_SELECT} WHERE {where} ORDER BY ordinal, sample, attempt", values)
        return [_attempt(row) for row in rows]

    def next_attempts(self, ordinal: int, group_size: int) -> list[tuple[TrajectoryKey, int]]:
        """What a group still has to issue: for each sample that has nothing running or alive, the next key to try.

        With it comes how often the sample was retried, work that a crash lost or discarded not counted: whoever repeats
        that repeats its random stream.
        """
        attempts = self.attempts(ordinal=ordinal)
        found = []
        for sample in range(group_size):
            earlier = [a for a in attempts if a.key.sample == sample]
            if all(a.state == "dropped" for a in earlier):
                attempt = max((a.key.attempt for a in earlier), default=-1) + 1
                retries = sum(a.reason not in REPEATABLE for a in earlier)
                found.append((TrajectoryKey(ordinal=ordinal, sample=sample, attempt=attempt), retries))
        return found

    def counts(self) -> LedgerCounts:
        """Count the attempts."""
        by_state = dict.fromkeys(ALLOWED, 0) | dict(
            self._db.execute("SELECT state, count(*) FROM attempts GROUP BY state").fetchall()
        )
        dropped = dict(
            self._db.execute(
                "SELECT reason, count(*) FROM attempts WHERE state = 'dropped' GROUP BY reason ORDER BY reason"
            ).fetchall()
        )
        issued = self._db.execute("SELECT value FROM counters WHERE name = 'issued'").fetchone()[0]
        return LedgerCounts(issued=issued, by_state=by_state, dropped=dropped)

    def check_laws(self) -> None:
        """Raise LedgerError that lists every broken law of L1 to L3 (see reliability in the documentation).

        L1: a sample key is committed at most once. L2: what was sealed has a payload, and ends committed, dropped for a
        reason, or still here. L3: issued = running + sealed + leased + committed + dropped.
        """
        broken = [
            f"L1: sample {ordinal}.{sample} is committed {times} times"
            for ordinal, sample, times in self._db.execute(
                "SELECT ordinal, sample, count(*) FROM attempts WHERE state = 'committed' "
                "GROUP BY ordinal, sample HAVING count(*) > 1"
            )
        ]
        for attempt in self.attempts():
            if attempt.state in LIVE and (attempt.uri is None or attempt.digest is None):
                broken.append(f"L2: {attempt.key} is {attempt.state} without a payload")
            if (attempt.state == "dropped") != (attempt.reason is not None):
                broken.append(f"L2: {attempt.key} is {attempt.state} with reason {attempt.reason}")
            if attempt.state in ("leased", "committed") and attempt.step is None:
                broken.append(f"L2: {attempt.key} is {attempt.state} for no step")
        counts = self.counts()
        if counts.issued != sum(counts.by_state.values()):
            broken.append(f"L3: {counts.issued} were issued, but the states add up to {counts.by_state}")
        if broken:
            raise LedgerError(f"{self.path}: " + "; ".join(broken))

    def _seal(self, seal: Summary) -> SealResult:
        old = self._require(seal.key, "sealed")
        if old.state != "issued":
            if old.state == "dropped" and old.reason != "duplicate":
                raise _illegal(seal.key, f"dropped({old.reason})", "sealed")
            return "sealed" if old.state != "dropped" and old.digest == seal.digest else "duplicate"
        payload = {"uri": seal.uri, "digest": seal.digest, "policy_step": seal.oldest_step, "summary": seal.to_json()}
        if self._is_live(seal.key):
            self._write(seal.key, state="dropped", reason="duplicate", **payload)
            return "duplicate"
        self._write(seal.key, state="sealed", **payload)
        return "sealed"

    def _is_live(self, key: TrajectoryKey) -> bool:
        """Whether an attempt of this sample key is sealed, leased or committed."""
        query = f"SELECT 1 FROM attempts WHERE ordinal = ? AND sample = ? AND state IN {LIVE}"
        return self._db.execute(query, (key.ordinal, key.sample)).fetchone() is not None

    def _require(self, key: TrajectoryKey, target: str) -> Attempt:
        attempt = self.get(key)
        if attempt is None:
            raise _illegal(key, "never issued", target)
        return attempt

    def _move(self, old: Attempt, target: str, **columns: Any) -> None:
        if target not in ALLOWED[old.state]:
            raise _illegal(old.key, old.state if old.step is None else f"{old.state}({old.step})", target)
        self._write(old.key, state=target, **columns)

    def _write(self, key: TrajectoryKey, **columns: Any) -> None:
        names = ", ".join(f"{name} = ?" for name in columns)
        query = f"UPDATE attempts SET {names} WHERE ordinal = ? AND sample = ? AND attempt = ?"
        self._db.execute(query, (*columns.values(), *dataclasses.astuple(key)))

    def _compare(self, consumed: ConsumedSet) -> None:
        """Refuse a manifest that does not hold exactly the leases and commits up to its step."""
        used = [a.key for a in self.attempts(states=("leased", "committed")) if (a.step or 0) <= consumed.step]
        unknown = [str(key) for key in used if key not in consumed]
        have = {(key.ordinal, key.sample) for key in used}
        missing = [pair for pair in sorted(consumed.exceptions) if pair[0] >= consumed.frontier and pair not in have]
        if unknown or missing or len(have) != consumed.count or consumed.frontier > self.next_ordinal:
            raise LedgerError(
                f"{self.path} and the manifest of step {consumed.step} are not of one run: the ledger has leased "
                f"{unknown[:5]} that the manifest lacks, and lacks {missing[:5]} (frontier {consumed.frontier}, "
                f"next ordinal {self.next_ordinal}; {len(have)} samples used there, {consumed.count} here)"
            )


_COMMIT = "UPDATE attempts SET state = 'committed' WHERE state = 'leased' AND step <= ?"
_SELECT = (
    "SELECT ordinal, sample, attempt, environment, split, task_index, state, step, reason, uri, digest, policy_step, "
    "summary FROM attempts"
)


def _attempt(row: tuple[Any, ...]) -> Attempt:
    key = TrajectoryKey(ordinal=row[0], sample=row[1], attempt=row[2])
    task = Task(environment=row[3], split=row[4], index=row[5])
    names = ("state", "step", "reason", "uri", "digest", "policy_step")
    summary = None if row[12] is None else Summary.from_json(row[12])
    return Attempt(key=key, task=task, summary=summary, **dict(zip(names, row[6:12], strict=True)))


def _illegal(key: TrajectoryKey, source: str, target: str) -> LedgerError:
    return LedgerError(f"trajectory {key} cannot go from {source} to {target}")
