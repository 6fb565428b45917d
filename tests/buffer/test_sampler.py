"""What may enter a batch, in which order, and that payloads are whole or refused."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from k3rl.buffer.ledger import ConsumedSet
from k3rl.buffer.sampler import Buffer, SignalTest
from k3rl.buffer.store import PayloadError, Store
from k3rl.errors import LedgerError
from k3rl.rewards.compose import signal_reason, total_of
from k3rl.trajectory import (
    Outcome,
    PolicyVersion,
    Reward,
    Segment,
    Summary,
    Task,
    Trajectory,
    TrajectoryKey,
    summarise_trajectory,
)

ROOT = Path(__file__).parents[2]


def trajectory(ordinal: int, sample: int = 0, *, steps: Sequence[int] = (0,), reward: float = 1.0) -> Trajectory:
    """One prompt and one action with a token for each of ``steps``, the policy steps that sampled them."""
    prompt = Segment(kind="prompt", token_ids=np.arange(3, dtype=np.int32))
    n = len(steps)
    action = Segment(
        kind="action",
        token_ids=np.arange(n, dtype=np.int32),
        context=0,
        follows=0,
        rollout_logprobs=np.full(n, -0.5, np.float32),
        version_index=np.arange(n, dtype=np.int32),
        rewards=(Reward("outcome", reward),),
    )
    return Trajectory(
        key=TrajectoryKey(ordinal=ordinal, sample=sample),
        task=Task(environment="grid", split="train", index=ordinal),
        segments=(prompt, action),
        outcome=Outcome(status="completed"),
        versions=tuple(PolicyVersion(incarnation=0, step=s, digest=f"w{s}") for s in steps),
    )


def make(tmp_path: Path, max_staleness: int = 2, no_signal: SignalTest | None = None) -> Buffer:
    return Buffer(tmp_path / "run", max_staleness=max_staleness, no_signal=no_signal)


def add(buffer: Buffer, *group: Trajectory) -> None:
    buffer.ledger.issue([t.key for t in group], [t.task for t in group])
    seal(buffer, group)


def seal(buffer: Buffer, trajectories: Sequence[Trajectory]) -> None:
    uri, digest = buffer.store.write(trajectories)
    buffer.seal([summarise_trajectory(t, ["outcome", "length"], uri=uri, digest=digest) for t in trajectories])


def ordinals(batch: list[list[Summary]]) -> list[int]:
    return [group[0].key.ordinal for group in batch]


def test_b13_staleness_equal_to_the_bound_is_trained_and_one_more_is_dropped_and_counted(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    for ordinal, step in enumerate((2, 3, 4, 5)):
        add(buffer, trajectory(ordinal, steps=[step]))
    assert ordinals(buffer.take(range(4), learner_step=5)) == [1, 2, 3]
    assert buffer.ledger.counts().dropped == {"stale": 1}
    assert [o for o in range(4) if buffer.ledger.next_attempts(o, 1)] == [0]
    buffer.ledger.check_laws()


def test_b13_the_age_of_a_rollout_that_saw_an_update_is_that_of_its_oldest_token(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    add(buffer, trajectory(0, steps=[3, 5]))
    add(buffer, trajectory(1, 0, steps=[5]), trajectory(1, 1, steps=[2, 5]))
    assert ordinals(buffer.take(range(2), learner_step=5)) == [0]
    assert buffer.ledger.counts().dropped == {"stale": 2}


def test_what_a_discarded_future_sampled_is_dropped_by_name_so_staleness_is_never_negative(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    add(buffer, trajectory(0, steps=[6]))
    assert buffer.take([0], learner_step=5) == []
    assert buffer.ledger.counts().dropped == {"future": 1}


def test_groups_come_in_order_of_ordinal_and_samples_in_order_of_index(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    for ordinal in (4, 1, 3, 0, 2):
        add(buffer, trajectory(ordinal, 1), trajectory(ordinal, 0))
    batch = buffer.take(range(3), learner_step=0)
    assert [[t.key.sample for t in group] for group in batch] == [[0, 1]] * 3
    assert ordinals(batch) == [0, 1, 2]
    assert ordinals(buffer.take(range(9), learner_step=1)) == [3, 4]
    assert buffer.take(range(9), learner_step=1) == []


def test_groups_without_signal_are_dropped_for_their_reason_and_do_not_count(tmp_path: Path) -> None:
    buffer = make(tmp_path, no_signal=lambda group: signal_reason(group, {"outcome": 1.0}))
    for ordinal, (one, two) in enumerate([(0, 0), (1, 1), (0, 1), (0.5, 0.5)]):
        add(buffer, trajectory(ordinal, 0, reward=one), trajectory(ordinal, 1, reward=two))
    assert ordinals(buffer.take(range(4), learner_step=0)) == [2]
    assert buffer.ledger.counts().dropped == {"none_solved": 2, "all_same": 2, "all_solved": 2}


@pytest.mark.parametrize(("signal", "dropped"), [("outcome", {"none_solved": 4}), ("total", {})])
def test_b05_a_group_in_which_none_solved_is_dropped_by_its_outcomes_and_kept_by_its_shaped_sum(
    tmp_path: Path, signal: str, dropped: dict[str, int]
) -> None:
    weights = {"outcome": 1.0, "length": 0.01}
    buffer = make(tmp_path, no_signal=lambda group: signal_reason(group, weights, signal))
    group = []
    for sample in range(4):
        plain = trajectory(0, sample, reward=0.0)
        prompt, action = plain.segments
        shaped = dataclasses.replace(action, rewards=(*action.rewards, Reward("length", float(sample))))
        group.append(dataclasses.replace(plain, segments=(prompt, shaped)))
    add(buffer, *group)
    assert [total_of(s, weights) for s in buffer.summaries([0])] == pytest.approx([0.00, 0.01, 0.02, 0.03])
    assert len(buffer.take([0], learner_step=0)) == (0 if dropped else 1)
    assert buffer.ledger.counts().dropped == dropped


def test_b55_a_group_is_not_taken_before_its_straggler_is_in_or_given_up(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    group = [trajectory(0, s) for s in range(3)]
    buffer.ledger.issue([t.key for t in group], [t.task for t in group])
    seal(buffer, group[:2])
    with pytest.raises(LedgerError, match=rf"1 attempts .* still out: {group[2].key}"):
        buffer.take([0], learner_step=0)
    buffer.ledger.drop([group[2].key], "straggler")
    assert [len(g) for g in buffer.take([0], learner_step=0)] == [2]


def test_after_a_crash_the_same_batches_are_taken_again(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    for ordinal in range(6):
        add(buffer, trajectory(ordinal, steps=[0 if ordinal == 3 else 2]))
    buffer.take([0, 1], learner_step=2)
    manifest = ConsumedSet.from_json(buffer.ledger.consumed(3).to_json())
    first = buffer.take([2, 3, 4], learner_step=3)
    assert ordinals(first) == [2, 4]
    buffer.ledger.commit(4)
    buffer.close()
    again = make(tmp_path)
    again.ledger.restore(manifest)
    assert ordinals(again.take([2, 3, 4], learner_step=3)) == [2, 4]
    again.ledger.check_laws()


def test_a_damaged_payload_costs_its_group_only_and_the_tasks_can_run_again(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    for ordinal in range(3):
        add(buffer, trajectory(ordinal))
    (path,) = buffer.store.root.glob("00000001-*.parquet")
    path.write_bytes(path.read_bytes()[:-1])
    assert ordinals(buffer.take(range(3), learner_step=0)) == [0, 2]
    assert buffer.ledger.counts().dropped == {"damaged": 1}
    assert [o for o in range(3) if buffer.ledger.next_attempts(o, 1)] == [1]


def test_b57_payloads_come_back_equal_and_every_truncation_or_bit_flip_is_refused_by_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    written = [trajectory(0, s, steps=[1, 2]) for s in range(2)]
    uri, digest = store.write(written)
    back = store.read(uri, digest)
    assert [t.key for t in back] == [t.key for t in written]
    assert back[1].segments[1].rollout_logprobs is not None
    np.testing.assert_array_equal(back[1].segments[1].rollout_logprobs, np.full(2, -0.5, np.float32))
    path, random = tmp_path / uri, np.random.default_rng(0)
    whole = path.read_bytes()
    broken = [whole[:cut] for cut in range(0, len(whole), 97)]
    for bit in random.integers(0, 8 * len(whole), 100):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << (bit % 8)
        broken.append(bytes(flipped))
    for data in broken:
        path.write_bytes(data)
        for use in (store.read, store.verify):
            with pytest.raises(PayloadError, match=uri):
                use(uri, digest)
    path.unlink()
    with pytest.raises(PayloadError, match=uri):
        store.read(uri, digest)


def test_b57_half_written_payloads_have_no_visible_name_and_are_swept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (tmp_path / ".00000000-abc.parquet.tmp").write_bytes(b"half")
    assert list(tmp_path.glob("*.parquet")) == []
    assert store.remove_leftovers() == 1


def test_b13_slow_tasks_keep_their_share_when_issuing_is_paced_to_the_bound(tmp_path: Path) -> None:
    """Half the tasks take 1 tick and half 5, the bound is 3 steps: a task is late by its wait, and never thrown away.

    Who issues at most bound + 1 batches ahead of the learner, and trains in order of issue, drops nothing.
    """
    bound, size, num_steps = 3, 20, 50
    buffer = make(tmp_path, max_staleness=bound)
    running: list[tuple[int, Trajectory]] = []
    trained: list[int] = []
    ages: set[int] = set()
    issued = step = tick = 0
    while step < num_steps:
        new = [trajectory(o, steps=[step]) for o in range(issued, (step + 1 + bound) * size)]
        buffer.ledger.issue([t.key for t in new], [t.task for t in new])
        issued += len(new)
        running += [(tick + (1 if t.key.ordinal % 2 else 5), t) for t in new]
        tick += 1
        seal(buffer, [t for end, t in running if end <= tick])
        running = [(end, t) for end, t in running if end > tick]
        mine = range(step * size, (step + 1) * size)
        if len(buffer.summaries(mine)) == size:
            batch = buffer.take(mine, learner_step=step)
            trained += ordinals(batch)
            ages |= {step - (group[0].oldest_step or 0) for group in batch}
            step += 1
    assert buffer.ledger.counts().dropped == {}
    assert len(trained) == 1000
    assert abs(sum(o % 2 for o in trained) / len(trained) - 0.5) < 0.02
    assert ages == {0, 1, 2, 3}
    assert tick > num_steps  # the slow ones were waited for


SIBLING = """
import sys, time
sys.path.insert(0, "tests/buffer")
from pathlib import Path
from test_sampler import add, make, trajectory
folder, in_transaction = Path(sys.argv[1]), sys.argv[2] == "in_transaction"
buffer = make(folder)
for ordinal in range(5):
    add(buffer, trajectory(ordinal, 0), trajectory(ordinal, 1))
if in_transaction:
    buffer.ledger._db.execute("BEGIN IMMEDIATE")
    buffer.ledger._db.execute("UPDATE attempts SET state = 'dropped', reason = 'half'")
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("at", ["idle", "in_transaction"])
def test_b58_a_buffer_outlives_the_process_that_made_it_with_all_that_was_sealed(tmp_path: Path, at: str) -> None:
    command = [sys.executable, "-c", SIBLING, str(tmp_path), at]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": "."}, stdout=-1) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == b"ready\n"
        begin = time.monotonic()
        user = make(tmp_path) if at == "idle" else None
        maker.kill()
    user = user or make(tmp_path)
    batch = user.take(range(5), learner_step=0)
    assert time.monotonic() - begin < 10.0
    assert [[t.key.sample for t in group] for group in batch] == [[0, 1]] * 5
    user.ledger.check_laws()
    add(user, trajectory(5))
    assert ordinals(user.take([5], learner_step=1)) == [5]
