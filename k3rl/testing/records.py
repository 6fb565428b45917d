"""Records with everything filled in, for tests that care about one field."""

from __future__ import annotations

from typing import Any

from k3rl.trajectory import Outcome, Summary, Task, TrajectoryKey

TASK = Task(environment="grid", split="train", index=7)


def make_summary(key: TrajectoryKey, *, outcome: float | None = 1.0, **changes: Any) -> Summary:
    """A completed episode of one turn with the given ``outcome`` reward; ``changes`` replace its fields."""
    fields: dict[str, Any] = {
        "key": key,
        "task": TASK,
        "outcome": Outcome(status="completed"),
        "rewards": {"outcome": outcome},
        "num_turns": 1,
        "num_tokens": 2,
        "num_action_tokens": 1,
        "oldest_step": 0,
        "stats": {},
        "uri": f"{key}.parquet",
        "digest": "d",
    }
    return Summary(**fields | changes)
