"""Records: invariants hold, and a round trip through Arrow loses nothing."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.trajectory import (
    Outcome,
    PolicyVersion,
    Reward,
    Segment,
    Task,
    Trajectory,
    TrajectoryKey,
    from_table,
    to_table,
)

KEY = TrajectoryKey(ordinal=3, sample=1)
TASK = Task(environment="e", split="train", index=5)


def action(n: int, link: int | None = None, version: int = 0, **fields: object) -> Segment:
    return Segment(
        kind="action",
        token_ids=np.arange(n, dtype=np.int32),
        context=link,
        follows=link,
        rollout_logprobs=np.full(n, -0.5, dtype=np.float32),
        version_index=np.full(n, version, dtype=np.int32),
        stop_reason="stop",
        **fields,  # type: ignore[arg-type]
    )


def plain(kind: str, n: int, link: int | None = None) -> Segment:
    return Segment(kind=kind, token_ids=np.arange(n, dtype=np.int32), context=link, follows=link)  # type: ignore[arg-type]


def trajectory(*segments: Segment, **fields: object) -> Trajectory:
    defaults: dict[str, object] = {"key": KEY, "task": TASK, "outcome": Outcome(status="completed")}
    return Trajectory(segments=segments, **{**defaults, **fields})  # type: ignore[arg-type]


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    segments: list[Segment] = []
    for i in range(draw(st.integers(1, 6))):
        links = st.none() if i == 0 else st.none() | st.integers(0, i - 1)
        n = draw(st.integers(0, 5))
        is_action = draw(st.booleans())
        has_routes = draw(st.booleans())
        segments.append(
            Segment(
                kind="action" if is_action else draw(st.sampled_from(["prompt", "observation"])),
                token_ids=np.asarray(draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)), dtype=np.int32),
                context=draw(links),
                follows=draw(links),
                rollout_logprobs=np.linspace(-3, 0, n, dtype=np.float32) if is_action else None,
                version_index=np.zeros(n, dtype=np.int32) if is_action else None,
                routes=np.arange(n * 6, dtype=np.uint16).reshape(n, 3, 2) if has_routes else None,
                stop_reason="length" if is_action else None,
                rewards=(Reward("a", draw(st.floats(-1e6, 1e6))), Reward.absent("b", "grader")),
            )
        )
    return Trajectory(
        key=TrajectoryKey(ordinal=draw(st.integers(0, 10**9)), sample=draw(st.integers(0, 99)), attempt=2),
        task=TASK,
        segments=tuple(segments),
        outcome=Outcome(status="failed", cause="tool", detail=draw(st.sampled_from(["", "timed out", "höß ∑ 🙂"]))),
        versions=(PolicyVersion(incarnation=1, step=7, digest="d"),),
        temperature=0.7,
        stats={"tool_calls": 3.0},
    )


def same(a: object, b: object) -> bool:
    """Equality that looks into arrays."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (Segment, Trajectory)):
        return all(same(getattr(a, n), getattr(b, n)) for n in type(a).__dataclass_fields__)
    return a == b


@given(st.lists(trajectories(), max_size=3))
def test_a_round_trip_through_arrow_loses_nothing(batch: list[Trajectory]) -> None:
    assert same(from_table(to_table(batch)), batch)


@given(trajectories())
def test_paths_cover_every_segment_and_follow_the_context_links(t: Trajectory) -> None:
    paths = t.paths()
    assert {i for path in paths for i in path} == set(range(len(t.segments)))
    for path in paths:
        assert t.segments[path[0]].context is None
        assert all(t.segments[b].context == a for a, b in pairwise(path))


def test_a_link_forward_is_refused() -> None:
    with pytest.raises(ValueError, match="backwards"):
        trajectory(plain("prompt", 2, link=0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Reward("r", value)


def test_a_reward_is_a_value_or_an_absence_never_both_or_neither() -> None:
    for args in [("r", None), ("r", 1.0, "env")]:
        with pytest.raises(ValueError, match="one of the two"):
            Reward(*args)  # type: ignore[arg-type]


def test_an_absent_reward_makes_the_total_absent_and_not_zero() -> None:
    t = trajectory(action(2, rewards=(Reward("a", 1.0), Reward.absent("b", "grader"))))
    assert t.total_reward() is None
    assert t.total_reward(["a"]) == 1.0
    assert t.total_reward(["never given"]) is None


def test_an_action_needs_a_logprob_and_a_version_for_every_token() -> None:
    with pytest.raises(ValueError, match="logprobs"):
        plain("action", 3)
    with pytest.raises(ValueError, match="2 tokens but 1"):
        Segment(
            kind="action",
            token_ids=np.zeros(2, dtype=np.int32),
            rollout_logprobs=np.zeros(1, dtype=np.float32),
            version_index=np.zeros(2, dtype=np.int32),
        )
    with pytest.raises(ValueError, match="not finite"):
        Segment(
            kind="action",
            token_ids=np.zeros(1, dtype=np.int32),
            rollout_logprobs=np.array([np.nan], dtype=np.float32),
            version_index=np.zeros(1, dtype=np.int32),
        )


@given(st.integers(0, 9), st.integers(0, 9), st.sampled_from(["rollout_logprobs", "version_index", "routes"]))
def test_b21_an_append_whose_parts_are_of_unequal_length_is_refused(n: int, other: int, name: str) -> None:
    arrays: dict[str, np.ndarray] = {
        "rollout_logprobs": np.zeros(n, dtype=np.float32),
        "version_index": np.zeros(n, dtype=np.int32),
        "routes": np.zeros((n, 1, 1), dtype=np.uint16),
    }
    arrays[name] = np.resize(arrays[name], (other, *arrays[name].shape[1:]))
    ids = np.zeros(n, dtype=np.int32)
    if n == other:
        assert len(Segment(kind="action", token_ids=ids, **arrays)) == n  # type: ignore[arg-type]
    else:
        with pytest.raises(ValueError, match=f"{n} tokens but {other} {name}"):
            Segment(kind="action", token_ids=ids, **arrays)  # type: ignore[arg-type]


def test_b23_generated_tokens_are_counted_by_kind_and_not_by_span() -> None:
    t = trajectory(plain("prompt", 3), action(4, 0), plain("observation", 3, 1), action(5, 2))
    assert t.num_action_tokens == 9
    assert t.num_turns == 2


def test_b13_the_oldest_trained_token_dates_a_trajectory() -> None:
    versions = tuple(PolicyVersion(incarnation=0, step=s, digest=str(s)) for s in (3, 5))
    assert trajectory(action(2, version=1), action(2, 0, version=0), versions=versions).oldest_step == 3
    assert trajectory(plain("prompt", 1), versions=versions).oldest_step is None


@given(st.integers(0, 10**12), st.integers(0, 10**6), st.integers(0, 1000))
def test_a_key_is_read_back_from_its_text(ordinal: int, sample: int, attempt: int) -> None:
    key = TrajectoryKey(ordinal=ordinal, sample=sample, attempt=attempt)
    assert TrajectoryKey.parse(str(key)) == key


def test_b36_every_attempt_and_purpose_has_a_seed_of_its_own_that_repeats() -> None:
    keys = [TrajectoryKey(ordinal=o, sample=s, attempt=a) for o in range(4) for s in range(8) for a in range(2)]
    seeds = [k.seed(run, "turn", turn) for k in keys for run in (0, 1) for turn in range(3)]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [k.seed(run, "turn", turn) for k in keys for run in (0, 1) for turn in range(3)]
