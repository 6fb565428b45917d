"""The event log keeps order across crashes, and shows that batches were written before steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3rl.errors import LedgerError
from k3rl.runtime.event_log import EventLog, check_order, read_events
from k3rl.trajectory import PolicyVersion, Task, TrajectoryKey

KEY = TrajectoryKey(ordinal=3, sample=1)
VERSION = PolicyVersion(incarnation=0, step=4, digest="w4")


def test_events_are_read_back_in_order_with_keys_and_digests(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.issue([KEY], [Task(environment="grid", split="train", index=9)], VERSION)
    log.seal([KEY], ["d"])
    log.lease(5, [KEY], ["d"])
    log.step(5, {"loss": float("nan")})
    log.publish(5, VERSION)
    log.checkpoint(5, "checkpoints/step_000005")
    log.restore(5, [])
    log.close()
    events = read_events(tmp_path / "events.jsonl")
    assert [e["seq"] for e in events] == list(range(7))
    assert events[0]["tasks"] == ["grid/train/9"]
    assert events[2]["keys"] == [str(KEY)]
    assert events[2]["digests"] == ["d"]
    assert events[3]["metrics"] == {"loss": "nan"}
    check_order(events)


def test_a_torn_last_line_is_ignored_at_every_cut_and_the_log_goes_on_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.seal([KEY], ["a"])
    first = path.stat().st_size
    log.seal([KEY], ["b"])
    log.close()
    whole = path.read_bytes()
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        assert len(read_events(path)) == 1
        again = EventLog(path)
        again.seal([KEY], ["c"])
        again.close()
        assert [(e["seq"], e["digests"]) for e in read_events(path)] == [(0, ["a"]), (1, ["c"])]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"seq": 0}\n{"se\n{"seq": 2}\n')
    with pytest.raises(LedgerError, match=r"events\.jsonl, line 2"):
        read_events(path)


def test_a_step_whose_batch_was_not_written_first_breaks_the_law() -> None:
    with pytest.raises(LedgerError, match="step 2"):
        check_order(
            [
                {"seq": 0, "kind": "lease", "step": 1},
                {"seq": 1, "kind": "step", "step": 1},
                {"seq": 2, "kind": "step", "step": 2},
            ]
        )
