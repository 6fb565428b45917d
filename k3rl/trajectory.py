"""The records that everything else passes around: tasks, segments, trajectories, outcomes and rewards.

A trajectory is a tree of segments with two links. ``context`` names the segment whose tokens precede this one in the
model's input (the token tree: what the forward pass sees). ``follows`` names the segment after which this one happened
(the credit chain: what returns and advantages run along). They differ after compaction or dropped observations.

Invariants, checked when a record is made:
  * a link points to an earlier segment, so the order of ``segments`` is a topological order of both trees;
  * an ``action`` segment has a behaviour logprob and a policy version for every token, other kinds have neither;
  * a reward is a finite number or absent with a cause. A missing reward is not a zero.

Nothing here imports torch or ray; arrays are NumPy.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pyarrow as pa

SegmentKind = Literal["prompt", "observation", "action"]
StopReason = Literal["stop", "length", "context_full"]
OutcomeStatus = Literal["completed", "truncated", "failed"]
FailureCause = Literal["policy", "env", "tool", "grader", "engine", "budget"]
AbsentCause = Literal["env", "tool", "grader", "engine", "budget", "not_scored"]

NO_ROUTE = np.uint16(0xFFFF)
"""Route entry of a token whose routing was never computed (the last token of a trajectory): the learner routes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What an episode starts from. ``index`` is the seed or row within (environment, split)."""

    environment: str
    split: str
    index: int


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class TrajectoryKey:
    """Identity of one attempt. The *sample key* is the same without ``attempt``; it is trained at most once."""

    ordinal: int
    """Running number of the task in the run's order of issue; also the identity of the group."""
    sample: int
    """Index within the group."""
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.ordinal:08d}.{self.sample:04d}.{self.attempt:02d}"

    def seed(self, run_seed: int, *purpose: object) -> int:
        """A 64-bit seed for ``purpose``: no two attempts share a stream, and a re-run repeats it."""
        text = "/".join(str(part) for part in (run_seed, self, *purpose))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    @staticmethod
    def parse(text: str) -> TrajectoryKey:
        """Inverse of ``str``; ValueError when ``text`` is no key."""
        ordinal, sample, attempt = (int(part) for part in text.split("."))
        return TrajectoryKey(ordinal=ordinal, sample=sample, attempt=attempt)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyVersion:
    """Which weights sampled a token. A rollback after a crash starts a new incarnation."""

    incarnation: int
    step: int
    digest: str


@dataclass(frozen=True, slots=True)
class Reward:
    """A named reward: a finite ``value``, or absent (``value`` None) with the ``cause`` of its absence."""

    name: str
    value: float | None
    cause: AbsentCause | None = None

    def __post_init__(self) -> None:
        if (self.value is None) == (self.cause is None):
            raise ValueError(f"reward {self.name!r}: give a value or a cause of absence, one of the two")
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"reward {self.name!r} is {self.value}; a reward is finite or absent(cause)")

    @staticmethod
    def absent(name: str, cause: AbsentCause) -> Reward:
        """Make a reward that is missing because of ``cause``."""
        return Reward(name, None, cause)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Why a trajectory ended. ``truncated`` names the limit that cut it; ``failed`` names who failed."""

    status: OutcomeStatus
    limit: str | None = None
    cause: FailureCause | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        if (self.status == "truncated") != (self.limit is not None):
            raise ValueError("an outcome has a limit exactly when it is truncated")
        if (self.status == "failed") != (self.cause is not None):
            raise ValueError("an outcome has a cause exactly when it failed")

    @property
    def is_infrastructure_failure(self) -> bool:
        """It failed, and not by the policy: nobody knows what the episode would have been worth."""
        return self.status == "failed" and self.cause != "policy"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """A run of tokens appended at once."""

    kind: SegmentKind
    token_ids: np.ndarray  # [n] int32
    context: int | None = None
    follows: int | None = None
    rollout_logprobs: np.ndarray | None = None  # [n] float32, of the distribution sampled from; action only
    version_index: np.ndarray | None = None  # [n] int32, rows of Trajectory.versions; action only
    routes: np.ndarray | None = None  # [n, moe_layers, top_k] uint16 expert ids; None when the model has none
    stop_reason: StopReason | None = None  # action only
    rewards: tuple[Reward, ...] = ()  # earned by this segment; they sit on its last token

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        is_action = self.kind == "action"
        if is_action != (self.rollout_logprobs is not None) or is_action != (self.version_index is not None):
            raise ValueError(
                f"{self.kind} segment: logprobs and versions belong to action segments, and to all of them"
            )
        for name in ("rollout_logprobs", "version_index", "routes"):
            array = getattr(self, name)
            if array is not None and len(array) != n:
                raise ValueError(f"{self.kind} segment: {n} tokens but {len(array)} {name}")
        if self.rollout_logprobs is not None and not np.isfinite(self.rollout_logprobs).all():
            raise ValueError("action segment: a rollout logprob is not finite")

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """One attempt at a task."""

    key: TrajectoryKey
    task: Task
    segments: tuple[Segment, ...]
    outcome: Outcome
    versions: tuple[PolicyVersion, ...] = ()
    temperature: float = 1.0
    """The sampler's transform; learner and reference apply the same."""
    stats: Mapping[str, float] = field(default_factory=dict)
    """Plain numbers about the episode (tool calls, invalid calls, milestones), summed for reports."""

    def __post_init__(self) -> None:
        for i, segment in enumerate(self.segments):
            for link in (segment.context, segment.follows):
                if link is not None and not 0 <= link < i:
                    raise ValueError(f"segment {i} of {self.key} links to segment {link}; links point backwards")

    @property
    def num_action_tokens(self) -> int:
        return sum(len(s) for s in self.segments if s.kind == "action")

    @property
    def num_tokens(self) -> int:
        return sum(len(s) for s in self.segments)

    @property
    def num_turns(self) -> int:
        return sum(s.kind == "action" for s in self.segments)

    @property
    def oldest_step(self) -> int | None:
        """Learner step of the oldest weights among the trained tokens; None when nothing was sampled."""
        used = {int(i) for s in self.segments if s.version_index is not None for i in np.unique(s.version_index)}
        return min((self.versions[i].step for i in used), default=None)

    def total_reward(self, names: Iterable[str] | None = None) -> float | None:
        """Sum of the rewards (those in ``names``, or all); None when one of them is absent or none was given."""
        wanted = None if names is None else set(names)
        rewards = [r for s in self.segments for r in s.rewards if wanted is None or r.name in wanted]
        if not rewards or any(r.value is None for r in rewards):
            return None
        return sum(r.value for r in rewards if r.value is not None)

    def paths(self) -> list[tuple[int, ...]]:
        """Root-to-leaf paths of the token tree, each a tuple of segment indices: the samples of this trajectory."""
        parents = {s.context for s in self.segments}
        leaves = [i for i in range(len(self.segments)) if i not in parents]
        return [self.path_to(leaf) for leaf in leaves]

    def path_to(self, index: int) -> tuple[int, ...]:
        """Indices of the segments in the model's input up to and including segment ``index``."""
        path: list[int] = []
        at: int | None = index
        while at is not None:
            path.append(at)
            at = self.segments[at].context
        return tuple(reversed(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a run needs to know of a trajectory that lies in a payload file: numbers, and no tokens."""

    key: TrajectoryKey
    task: Task
    outcome: Outcome
    rewards: Mapping[str, float | None]
    """Sum of each reward component, None where it is absent or was never given."""
    num_turns: int
    num_tokens: int
    num_action_tokens: int
    oldest_step: int | None
    stats: Mapping[str, float]
    reward_errors: Mapping[str, str] = field(default_factory=dict)
    """Why a reward function could not give a component, by its name."""
    uri: str = ""
    digest: str = ""
    """Where the payload lies, and its sha256; empty when it was not kept."""

    def to_json(self) -> str:
        """Plain form; the inverse of :meth:`from_json`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Summary:
        """Inverse of :meth:`to_json`."""
        values = json.loads(text)
        for name, cls in (("key", TrajectoryKey), ("task", Task), ("outcome", Outcome)):
            values[name] = cls(**values[name])
        return Summary(**values)


def summarise_trajectory(
    trajectory: Trajectory,
    components: Iterable[str],
    *,
    reward_errors: Mapping[str, str] | None = None,
    uri: str = "",
    digest: str = "",
) -> Summary:
    """Summary of ``trajectory`` with the totals of its reward ``components``."""
    return Summary(
        key=trajectory.key,
        task=trajectory.task,
        outcome=trajectory.outcome,
        rewards={name: trajectory.total_reward([name]) for name in components},
        num_turns=trajectory.num_turns,
        num_tokens=trajectory.num_tokens,
        num_action_tokens=trajectory.num_action_tokens,
        oldest_step=trajectory.oldest_step,
        stats=dict(trajectory.stats),
        reward_errors=dict(reward_errors or {}),
        uri=uri,
        digest=digest,
    )


def to_table(trajectories: Sequence[Trajectory]) -> pa.Table:
    """Arrow table, one row a trajectory; the inverse of :func:`from_table`, and what the Parquet payloads hold."""
    import pyarrow as pa

    return pa.Table.from_pylist([_to_row(t) for t in trajectories], schema=_schema())


def from_table(table: pa.Table) -> list[Trajectory]:
    """Rebuild trajectories. Every invariant is checked again, so a damaged payload is refused here."""
    return [_from_row(row) for row in table.to_pylist()]


def _schema() -> pa.Schema:
    import pyarrow as pa

    reward = pa.struct([("name", pa.string()), ("value", pa.float64()), ("cause", pa.string())])
    segment = pa.struct(
        [
            ("kind", pa.string()),
            ("token_ids", pa.list_(pa.int32())),
            ("context", pa.int32()),
            ("follows", pa.int32()),
            ("rollout_logprobs", pa.list_(pa.float32())),
            ("version_index", pa.list_(pa.int32())),
            ("routes", pa.list_(pa.uint16())),
            ("route_shape", pa.list_(pa.int32())),
            ("stop_reason", pa.string()),
            ("rewards", pa.list_(reward)),
        ]
    )
    version = pa.struct([("incarnation", pa.int32()), ("step", pa.int32()), ("digest", pa.string())])
    stat = pa.struct([("name", pa.string()), ("value", pa.float64())])
    return pa.schema(
        [
            ("key", pa.string()),
            ("task", pa.struct([("environment", pa.string()), ("split", pa.string()), ("index", pa.int64())])),
            ("segments", pa.list_(segment)),
            ("outcome", pa.struct([(n, pa.string()) for n in ("status", "limit", "cause", "detail")])),
            ("versions", pa.list_(version)),
            ("temperature", pa.float64()),
            ("stats", pa.list_(stat)),
        ]
    )


def _to_row(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "key": str(trajectory.key),
        "task": {n: getattr(trajectory.task, n) for n in ("environment", "split", "index")},
        "segments": [_segment_to_row(s) for s in trajectory.segments],
        "outcome": {n: getattr(trajectory.outcome, n) for n in ("status", "limit", "cause", "detail")},
        "versions": [{n: getattr(v, n) for n in ("incarnation", "step", "digest")} for v in trajectory.versions],
        "temperature": trajectory.temperature,
        "stats": [{"name": n, "value": float(v)} for n, v in trajectory.stats.items()],
    }


def _segment_to_row(segment: Segment) -> dict[str, Any]:
    return {
        "kind": segment.kind,
        "token_ids": segment.token_ids,
        "context": segment.context,
        "follows": segment.follows,
        "rollout_logprobs": segment.rollout_logprobs,
        "version_index": segment.version_index,
        "routes": None if segment.routes is None else segment.routes.reshape(-1),
        "route_shape": None if segment.routes is None else list(segment.routes.shape),
        "stop_reason": segment.stop_reason,
        "rewards": [{"name": r.name, "value": r.value, "cause": r.cause} for r in segment.rewards],
    }


def _array(values: list[Any] | None, dtype: Any) -> np.ndarray | None:
    return None if values is None else np.asarray(values, dtype=dtype)


def _from_row(row: dict[str, Any]) -> Trajectory:
    segments = tuple(
        Segment(
            kind=s["kind"],
            token_ids=np.asarray(s["token_ids"], dtype=np.int32),
            context=s["context"],
            follows=s["follows"],
            rollout_logprobs=_array(s["rollout_logprobs"], np.float32),
            version_index=_array(s["version_index"], np.int32),
            routes=None if s["routes"] is None else np.asarray(s["routes"], np.uint16).reshape(s["route_shape"]),
            stop_reason=s["stop_reason"],
            rewards=tuple(Reward(r["name"], r["value"], r["cause"]) for r in s["rewards"]),
        )
        for s in row["segments"]
    )
    return Trajectory(
        key=TrajectoryKey.parse(row["key"]),
        task=Task(**row["task"]),
        segments=segments,
        outcome=Outcome(**row["outcome"]),
        versions=tuple(PolicyVersion(**v) for v in row["versions"]),
        temperature=row["temperature"],
        stats={s["name"]: s["value"] for s in row["stats"]},
    )
