"""What may enter a batch, in which order, and that payloads are whole or refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from k3rl.buffer.ledger import ConsumedSet
from k3rl.buffer.sampler import Buffer, SignalTest
from k3rl.buffer.store import PayloadError, Store
from k3rl.trajectory import Outcome, PolicyVersion, Reward, Segment, Task, Trajectory, TrajectoryKey


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
    buffer.add_group(group)


def ordinals(batch: list[list[Trajectory]]) -> list[int]:
    return [group[0].key.ordinal for group in batch]


def test_staleness_equal_to_the_bound_is_trained_and_one_more_is_dropped_and_counted(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    for ordinal, step in enumerate((2, 3, 4, 5)):
        add(buffer, trajectory(ordinal, steps=[step]))
    assert ordinals(buffer.take(4, learner_step=5)) == [1, 2, 3]
    assert buffer.ledger.counts().dropped == {"stale": 1}
    assert [a.key.ordinal for a in buffer.ledger.reissuable()] == [0]
    buffer.ledger.check_laws()


def test_the_age_of_a_rollout_that_saw_an_update_is_that_of_its_oldest_token(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    add(buffer, trajectory(0, steps=[3, 5]))
    add(buffer, trajectory(1, 0, steps=[5]), trajectory(1, 1, steps=[2, 5]))
    assert ordinals(buffer.take(2, learner_step=5)) == [0]
    assert buffer.ledger.counts().dropped == {"stale": 2}


def test_what_a_discarded_future_sampled_is_dropped_by_name_so_staleness_is_never_negative(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    add(buffer, trajectory(0, steps=[6]))
    assert buffer.take(1, learner_step=5) == []
    assert buffer.ledger.counts().dropped == {"future": 1}


def test_groups_come_in_order_of_ordinal_and_samples_in_order_of_index(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    for ordinal in (4, 1, 3, 0, 2):
        add(buffer, trajectory(ordinal, 1), trajectory(ordinal, 0))
    batch = buffer.take(3, learner_step=0)
    assert [[t.key.sample for t in group] for group in batch] == [[0, 1]] * 3
    assert ordinals(batch) + ordinals(buffer.take(9, learner_step=1)) == [0, 1, 2, 3, 4]
    assert buffer.take(1, learner_step=1) == []


def test_groups_without_signal_are_dropped_for_their_reason_and_do_not_count(tmp_path: Path) -> None:
    def signal(group: Sequence[Trajectory]) -> str | None:
        rewards = {t.total_reward() for t in group}
        return None if len(rewards) > 1 else ("all_fail" if rewards == {0.0} else "all_same")

    buffer = make(tmp_path, no_signal=signal)
    for ordinal, (one, two) in enumerate([(0, 0), (1, 1), (0, 1), (1, 0)]):
        add(buffer, trajectory(ordinal, 0, reward=one), trajectory(ordinal, 1, reward=two))
    assert ordinals(buffer.take(1, learner_step=0)) == [2]
    assert buffer.ledger.counts().dropped == {"all_fail": 2, "all_same": 2}


def test_a_group_waits_for_its_straggler_until_that_is_given_up(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    group = [trajectory(0, s) for s in range(3)]
    buffer.ledger.issue([t.key for t in group], [t.task for t in group])
    buffer.add_group(group[:2])
    assert buffer.take(1, learner_step=0) == []
    buffer.ledger.drop([group[2].key], "straggler")
    assert [len(g) for g in buffer.take(1, learner_step=0)] == [2]


def test_after_a_crash_the_same_batches_are_taken_again(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    for ordinal in range(6):
        add(buffer, trajectory(ordinal, steps=[0 if ordinal == 3 else 2]))
    buffer.take(2, learner_step=2)
    manifest = ConsumedSet.from_json(buffer.ledger.consumed(3).to_json())
    first = buffer.take(2, learner_step=3)
    assert ordinals(first) == [2, 4]
    buffer.ledger.commit(4)
    buffer.close()
    again = make(tmp_path)
    again.ledger.restore(manifest)
    assert ordinals(again.take(2, learner_step=3)) == [2, 4]
    again.ledger.check_laws()


def test_a_damaged_payload_costs_its_group_only_and_the_tasks_can_run_again(tmp_path: Path) -> None:
    buffer = make(tmp_path)
    for ordinal in range(3):
        add(buffer, trajectory(ordinal))
    (path,) = buffer.store.root.glob("00000001-*.parquet")
    path.write_bytes(path.read_bytes()[:-1])
    assert ordinals(buffer.take(3, learner_step=0)) == [0, 2]
    assert buffer.ledger.counts().dropped == {"damaged": 1}
    assert [a.task.index for a in buffer.ledger.reissuable()] == [1]


def test_payloads_come_back_equal_and_every_truncation_or_bit_flip_is_refused_by_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    places = store.write([trajectory(0, s, steps=[1, 2]) for s in range(2)])
    uri, digest = places[0][1:]
    back = store.read(uri, digest)
    assert [t.key for t in back] == [place[0] for place in places]
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
        with pytest.raises(PayloadError, match=uri):
            store.read(uri, digest)
    path.unlink()
    with pytest.raises(PayloadError, match=uri):
        store.read(uri, digest)


def test_half_written_payloads_have_no_visible_name_and_are_swept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (tmp_path / ".00000000-abc.parquet.tmp").write_bytes(b"half")
    assert list(tmp_path.glob("*.parquet")) == []
    assert store.remove_leftovers() == 1


def test_slow_tasks_keep_their_share_when_issuing_is_paced_to_the_bound(tmp_path: Path) -> None:
    """Half the tasks take 1 tick and half 3; with at most bound * batch in flight nothing is thrown away."""
    buffer = make(tmp_path, max_staleness=3)
    running: list[tuple[int, Trajectory]] = []
    trained: list[int] = []
    issued = 0
    for step in range(60):
        while issued < 2 * (step + 1):  # admission: two groups a step
            new = trajectory(issued, steps=[step])
            buffer.ledger.issue([new.key], [new.task])
            running.append((step + (1 if issued % 2 else 3), new))
            issued += 1
        for item in [r for r in running if r[0] <= step]:
            running.remove(item)
            buffer.add_group([item[1]])
        trained += ordinals(buffer.take(2, learner_step=step))
    assert buffer.ledger.counts().dropped == {}
    assert abs(sum(o % 2 for o in trained) / len(trained) - 0.5) < 0.02
