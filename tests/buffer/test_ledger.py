"""Every trajectory counts exactly once, whatever the order of events and wherever the process dies."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3rl.buffer.ledger import ConsumedSet, Ledger
from k3rl.errors import LedgerError
from k3rl.testing.records import TASK, make_summary
from k3rl.trajectory import Summary, TrajectoryKey

ROOT = Path(__file__).parents[2]


def key(ordinal: int, sample: int = 0, attempt: int = 0) -> TrajectoryKey:
    return TrajectoryKey(ordinal=ordinal, sample=sample, attempt=attempt)


def sealed(of: TrajectoryKey, digest: str = "d") -> Summary:
    return make_summary(of, digest=digest)


def issue(ledger: Ledger, *keys: TrajectoryKey) -> None:
    ledger.issue(keys, [TASK] * len(keys))


def state(ledger: Ledger, of: TrajectoryKey) -> str:
    attempt = ledger.get(of)
    assert attempt is not None
    return attempt.state


def test_an_attempt_goes_from_issue_to_commit_and_survives_reopening(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    issue(ledger, key(0), key(0, 1))
    assert ledger.seal([sealed(key(0)), sealed(key(0, 1))]) == ["sealed", "sealed"]
    ledger.lease([key(0), key(0, 1)], step=1)
    assert ledger.commit(step=1) == 2
    ledger.close()
    again = Ledger(tmp_path / "ledger.sqlite")
    assert again.counts().by_state["committed"] == 2
    assert again.next_ordinal == 1
    again.check_laws()


@pytest.mark.parametrize("source", ["never issued", "issued", "sealed", "leased", "committed", "dropped"])
@pytest.mark.parametrize("target", ["issued", "sealed", "leased", "dropped"])
def test_every_transition_outside_the_table_is_refused_with_key_and_both_states(source: str, target: str) -> None:
    allowed = {
        ("never issued", "issued"),
        ("issued", "sealed"),
        ("issued", "dropped"),
        ("sealed", "leased"),
        ("sealed", "dropped"),
        ("leased", "dropped"),
        ("sealed", "sealed"),  # a repeated seal changes nothing
        ("leased", "sealed"),
        ("committed", "sealed"),
    }
    ledger = Ledger(":memory:")
    if source != "never issued":
        issue(ledger, key(3))
    if source in ("sealed", "leased", "committed"):
        ledger.seal([sealed(key(3))])
    if source in ("leased", "committed"):
        ledger.lease([key(3)], step=1)
    if source == "committed":
        ledger.commit(1)
    if source == "dropped":
        ledger.drop([key(3)], "env")
    act = {
        "issued": lambda: issue(ledger, key(3)),
        "sealed": lambda: ledger.seal([sealed(key(3))]),
        "leased": lambda: ledger.lease([key(3)], step=2),
        "dropped": lambda: ledger.drop([key(3)], "stale"),
    }[target]
    if (source, target) in allowed:
        act()
    else:
        with pytest.raises(LedgerError, match=rf"{key(3)} cannot go from {source}.* to {target}"):
            act()
    ledger.check_laws()


def test_a_refused_call_changes_nothing_at_all() -> None:
    ledger = Ledger(":memory:")
    issue(ledger, key(0))
    with pytest.raises(LedgerError):
        ledger.seal([sealed(key(0)), sealed(key(1))])
    assert state(ledger, key(0)) == "issued"


def test_b58_the_second_attempt_of_a_sample_is_dropped_as_duplicate_and_repeated_deliveries_change_nothing() -> None:
    ledger = Ledger(":memory:")
    issue(ledger, key(0), key(0, 0, 1))
    assert ledger.seal([sealed(key(0, 0, 1))]) == ["sealed"]
    assert ledger.seal([sealed(key(0))]) == ["duplicate"]
    assert ledger.seal([sealed(key(0)), sealed(key(0, 0, 1))]) == ["duplicate", "sealed"]
    assert ledger.seal([sealed(key(0, 0, 1), digest="other")]) == ["duplicate"]
    ledger.lease([key(0, 0, 1)], step=1)
    ledger.lease([key(0, 0, 1)], step=1)
    assert (ledger.commit(1), ledger.commit(1)) == (1, 0)
    assert ledger.counts().dropped == {"duplicate": 1}
    ledger.check_laws()


RACE = """
import sys
from k3rl.buffer.ledger import Ledger
from k3rl.testing.records import make_summary
from k3rl.trajectory import TrajectoryKey
path, attempt, races = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ledger = Ledger(path)
print("ready", flush=True)
sys.stdin.readline()
for ordinal in range(races):
    key = TrajectoryKey(ordinal=ordinal, sample=0, attempt=attempt)
    print(ledger.seal([make_summary(key, digest=str(attempt))])[0])
"""


def test_b58_of_two_processes_that_seal_the_same_sample_exactly_one_wins_every_race(tmp_path: Path) -> None:
    races, path = 300, tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    issue(ledger, *(key(o, 0, a) for o in range(races) for a in range(2)))
    command = [sys.executable, "-c", RACE, str(path)]
    racers = [
        subprocess.Popen([*command, str(a), str(races)], cwd=ROOT, stdin=-1, stdout=-1, text=True) for a in range(2)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    results = [racer.communicate(timeout=60)[0].split() for racer in racers]
    assert all({one, two} == {"sealed", "duplicate"} for one, two in zip(*results, strict=True))
    assert ledger.counts().by_state["sealed"] == races
    assert ledger.counts().dropped == {"duplicate": races}
    ledger.check_laws()


def test_restore_returns_what_the_manifest_does_not_hold_and_keeps_what_it_holds() -> None:
    ledger = Ledger(":memory:")
    issue(ledger, *(key(o) for o in range(6)))
    ledger.seal([sealed(key(o)) for o in range(5)])
    ledger.lease([key(0)], step=1)
    manifest = ledger.consumed(step=1)
    ledger.lease([key(1)], step=2)
    ledger.drop([key(2)], "stale", step=2)
    ledger.commit(step=2)
    ledger.lease([key(3)], step=3)
    report = ledger.restore(manifest)
    assert [state(ledger, key(o)) for o in range(6)] == ["committed", *["sealed"] * 4, "dropped"]
    assert (report.committed, report.returned, report.lost) == (1, 3, (key(5),))
    assert ledger.next_attempts(5, 1) == [(key(5, attempt=1), 0)]
    issue(ledger, key(5, attempt=1))
    assert ledger.next_attempts(5, 1) == ledger.next_attempts(0, 1) == []
    ledger.check_laws()


def test_restore_without_any_checkpoint_returns_every_lease() -> None:
    ledger = Ledger(":memory:")
    issue(ledger, key(0))
    ledger.seal([sealed(key(0))])
    ledger.lease([key(0)], step=1)
    ledger.commit(1)
    assert ledger.restore(ConsumedSet()).returned == 1
    assert state(ledger, key(0)) == "sealed"


def test_a_manifest_of_another_run_is_refused() -> None:
    ledger = Ledger(":memory:")
    issue(ledger, key(0))
    ledger.seal([sealed(key(0))])
    ledger.lease([key(0)], step=1)
    for manifest in (
        ConsumedSet(step=1),
        ConsumedSet(step=1, frontier=5),
        ConsumedSet(step=1, frontier=1, exceptions=frozenset({(4, 0)})),
    ):
        with pytest.raises(LedgerError, match="not of one run"):
            ledger.restore(manifest)
    assert state(ledger, key(0)) == "leased"


def test_a_ledger_that_forgot_what_was_trained_on_is_refused() -> None:
    ledger = Ledger(":memory:")
    issue(ledger, key(0), key(1))
    ledger.seal([sealed(key(0)), sealed(key(1))])
    ledger.lease([key(0), key(1)], step=1)
    manifest = ledger.consumed(1)
    assert (manifest.count, manifest.frontier) == (2, 2)
    forgetful = Ledger(":memory:")
    issue(forgetful, key(0), key(1))
    forgetful.seal([sealed(key(0)), sealed(key(1))])
    forgetful.lease([key(0)], step=1)
    with pytest.raises(LedgerError, match=r"not of one run.*1 samples used there, 2 here"):
        forgetful.restore(manifest)
    assert ledger.restore(manifest).committed == 2


def test_a_file_that_is_no_ledger_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a database, but long enough to look like one" * 40)
    with pytest.raises(LedgerError, match=r"ledger\.sqlite"):
        Ledger(path)


pairs = st.tuples(st.integers(0, 30), st.integers(0, 3))


@given(st.integers(-1, 50), st.integers(0, 30), st.frozensets(pairs))
def test_a_consumed_set_survives_json(step: int, frontier: int, exceptions: frozenset[tuple[int, int]]) -> None:
    consumed = ConsumedSet(step=step, count=len(exceptions), frontier=frontier, exceptions=exceptions)
    assert ConsumedSet.from_json(json.loads(json.dumps(consumed.to_json()))) == consumed


SUITABLE = {"issue": "never issued", "seal": "issued", "lease": "sealed", "drop": "sealed"}
UNIVERSE = [key(o, s, a) for o in range(3) for s in range(2) for a in range(2)]
NAMES = [
    "issue",
    "seal",
    "seal",
    "lease",
    "lease",
    "drop",
    "update",
    "checkpoint",
    "half checkpoint",
    "crash",
    "bad disk",
]


def random_history(seed: int) -> list[tuple[str, list[int], bool]]:
    """80 operations: name, which of the keys in question, and whether keys in the wrong state are tried too."""
    dice = random.Random(seed)
    picks = [[dice.randrange(12) for _ in range(dice.randint(1, 4))] for _ in range(80)]
    return [(dice.choice(NAMES), pick, dice.random() < 0.2) for pick in picks]


def act(ledger: Ledger, name: str, keys: list[TrajectoryKey], step: int) -> bool:
    """Apply one operation; False when the ledger refused it."""
    try:
        if name == "issue":
            issue(ledger, *keys)
        elif name == "seal":
            ledger.seal([sealed(k, digest=str(k)) for k in keys])
        elif name == "lease":
            ledger.lease(keys, step)
        elif name == "drop":
            ledger.drop(keys, "stale", step)
    except LedgerError:
        return False
    return True


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_any_sequence_of_operations_and_crashes_obeys_the_laws(seed: int) -> None:
    ledger, step = Ledger(":memory:"), 0
    leased: dict[TrajectoryKey, int] = {}  # the truth: what went into which update of the weights that exist now
    gone: dict[TrajectoryKey, int] = {}  # sealed ones that were dropped, and for which step
    manifests = [(ConsumedSet(), dict(leased))]
    for name, picks, wild in random_history(seed):
        pool = UNIVERSE
        if not wild and name in SUITABLE:
            states = {a.key: a.state for a in ledger.attempts()}
            pool = [k for k in UNIVERSE if states.get(k, "never issued") == SUITABLE[name]] or UNIVERSE
        keys = list(dict.fromkeys(pool[i % len(pool)] for i in picks))
        durable = {a.key for a in ledger.attempts(states=("sealed", "leased"))}
        if act(ledger, name, keys, step + 1):
            if name == "lease":
                leased |= {k: leased.get(k, step + 1) for k in keys}
            elif name == "drop":
                gone |= {k: step + 1 for k in keys if k in durable}
                leased = {k: at for k, at in leased.items() if k not in keys}
        if name in ("update", "checkpoint", "half checkpoint"):
            step += 1
        if name in ("checkpoint", "half checkpoint"):  # half: the manifest is published, the process dies before commit
            manifests.append((ledger.consumed(step), dict(leased)))
        if name == "checkpoint":
            ledger.commit(step)
        elif name in ("half checkpoint", "crash", "bad disk"):  # a bad disk takes the last manifest with it
            del manifests[max(1, len(manifests) - (name == "bad disk")) :]
            published, leased = manifests[-1][0], dict(manifests[-1][1])
            ledger.restore(published)
            step = max(published.step, 0)
            committed = {a.key: a.step for a in ledger.attempts(states=("committed",))}
            assert committed == leased
            assert ledger.attempts(states=("issued", "leased")) == []
            back, gone = [k for k, at in gone.items() if at > step], {k: at for k, at in gone.items() if at <= step}
            alive = {(a.key.ordinal, a.key.sample) for a in ledger.attempts(states=("sealed", "committed"))}
            assert all((k.ordinal, k.sample) in alive for k in back)
        ledger.check_laws()


KILLED = """
import os, signal, sys
from k3rl.buffer.ledger import Ledger
from k3rl.testing.records import make_summary
from k3rl.trajectory import Task, TrajectoryKey
path, point = sys.argv[1], int(sys.argv[2])
def reach(number):
    if number == point:
        os.kill(os.getpid(), signal.SIGKILL)
ledger = Ledger(path)
keys = [TrajectoryKey(ordinal=0, sample=s) for s in range(4)]
reach(0)
ledger.issue(keys, [Task(environment="e", split="s", index=0)] * 4)
reach(1)
with ledger.transaction():
    ledger.seal([make_summary(k) for k in keys[:2]])
    reach(2)
    ledger.seal([make_summary(k) for k in keys[2:]])
reach(3)
ledger.lease(keys, 1)
reach(4)
ledger.commit(1)
reach(5)
"""


@pytest.mark.parametrize(
    ("point", "expected"), [(0, None), (1, "issued"), (2, "issued"), (3, "sealed"), (4, "leased"), (5, "committed")]
)
def test_b58_after_kill_9_the_ledger_holds_every_finished_call_and_no_part_of_another(
    tmp_path: Path, point: int, expected: str | None
) -> None:
    path = tmp_path / "ledger.sqlite"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(point)], cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL
    ledger = Ledger(path)
    assert {a.state for a in ledger.attempts()} == ({expected} if expected else set())
    ledger.check_laws()
    ledger.restore(ConsumedSet())
    ledger.check_laws()


def test_reissuing_names_the_next_attempt_of_dropped_samples_only_while_nothing_else_lives() -> None:
    ledger = Ledger(":memory:")
    issue(ledger, *(key(0, s) for s in range(3)))
    ledger.seal([sealed(key(0, s)) for s in range(3)])
    ledger.drop([key(0, 0)], "stale", step=1)
    ledger.drop([key(0, 1)], "all_same", step=1)
    assert ledger.next_attempts(0, 3) == [(key(0, 0, 1), 1), (key(0, 1, 1), 1)]
    again = key(0, 0, 1)
    issue(ledger, again)
    ledger.seal([sealed(again)])
    ledger.restore(ConsumedSet())  # the drop is undone, but its successor lives
    assert [state(ledger, k) for k in (key(0, 0), key(0, 1), again)] == ["dropped", "sealed", "sealed"]
    ledger.check_laws()


def test_what_a_discarded_future_sampled_is_dropped_and_named_for_sampling_again() -> None:
    ledger = Ledger(":memory:")
    issue(ledger, key(0, 0), key(1, 0))
    ledger.seal([make_summary(key(0, 0), oldest_step=0)])
    ledger.seal([make_summary(key(1, 0), oldest_step=1)])
    ledger.restore(ConsumedSet())
    assert [a.key for a in ledger.attempts(states=("sealed",))] == [key(0, 0)]
    assert ledger.counts().dropped == {"future": 1}
    assert ledger.next_attempts(1, 1) == [(key(1, 0, 1), 0)]  # the same random stream once more
    ledger.check_laws()
