"""A dataset on disk: every sequence once an epoch, and any step's batch without the steps before it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.buffer import corpus as corpus_module
from k3rl.buffer.corpus import Corpus, Sequence, write_corpus
from k3rl.errors import ConfigError


def make_sequences(lengths: list[int]) -> list[Sequence]:
    rng = np.random.default_rng(len(lengths))
    return [
        Sequence(row, rng.integers(0, 250, n).astype(np.int32), rng.random(n) < 0.5) for row, n in enumerate(lengths)
    ]


def rows_of(corpus: Corpus, steps: range) -> list[list[int]]:
    return [[t.task.index for t in corpus.batch(step)] for step in steps]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(any),
    batch_tokens=st.integers(12, 60),
    seed=st.integers(0, 5),
)
def test_every_sequence_is_read_once_an_epoch_in_a_new_order(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], batch_tokens: int, seed: int
) -> None:
    path = tmp_path_factory.mktemp("corpus") / "c.arrow"
    write_corpus(path, make_sequences(lengths))
    corpus = Corpus(path, batch_tokens=batch_tokens, seed=(seed,))
    kept = [i for i, n in enumerate(lengths) if n]
    assert (corpus.num_sequences, corpus.num_left_out) == (len(kept), len(lengths) - len(kept))
    steps = range(3 * sum(lengths) // batch_tokens + 1)
    batches = rows_of(corpus, steps)
    read = list(itertools.chain(*batches))
    for epoch in range(len(read) // len(kept)):
        assert sorted(read[epoch * len(kept) : (epoch + 1) * len(kept)]) == kept
    longest, total = max(lengths), 0
    for step, rows in enumerate(batches):
        total += sum(lengths[row] for row in rows)
        assert rows, "a batch without a sequence"
        assert (step + 1) * batch_tokens <= total < (step + 1) * batch_tokens + longest
    again = Corpus(path, batch_tokens=batch_tokens, seed=(seed,))
    assert rows_of(again, range(len(steps) - 1, -1, -1))[::-1] == batches  # whatever was asked for before
    assert sorted(t.task.index for batch in corpus.in_order() for t in batch) == kept


def test_an_epoch_has_an_order_of_its_own_and_a_seed_too(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c.arrow", make_sequences([10] * 20))
    orders = []
    for seed in (0, 1):
        read = list(itertools.chain(*rows_of(Corpus(tmp_path / "c.arrow", batch_tokens=10, seed=(seed,)), range(60))))
        orders += [tuple(read[at : at + 20]) for at in (0, 20, 40)]
    assert len(set(orders)) == 6
    assert list(range(20)) not in [list(order) for order in orders]


def test_what_is_learnt_becomes_actions_and_the_rest_their_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "GROUP_TOKENS", 16)  # several record batches
    sequences = make_sequences([9, 0, 7, 12, 1, 11])
    write_corpus(tmp_path / "c.arrow", sequences)
    (batch,) = Corpus(tmp_path / "c.arrow", batch_tokens=40, seed=(0,)).in_order()
    for trajectory in batch:
        source = sequences[trajectory.task.index]
        (path,) = trajectory.paths()
        segments = [trajectory.segments[i] for i in path]
        assert np.concatenate([s.token_ids for s in segments]).tolist() == source.ids.tolist()
        assert np.repeat([s.kind == "action" for s in segments], [len(s) for s in segments]).tolist() == (
            source.learnt.tolist()
        )
        assert [s.kind for s in segments if s.kind == "prompt"] == ["prompt"] * (not source.learnt[0])
        assert all((a.kind == "action") != (b.kind == "action") for a, b in itertools.pairwise(segments))


def test_a_corpus_that_cannot_be_trained_on_says_why(tmp_path: Path) -> None:
    write_corpus(tmp_path / "empty.arrow", make_sequences([0, 0, 0]))
    with pytest.raises(ConfigError, match="no sequence to learn from; 3 rows"):
        Corpus(tmp_path / "empty.arrow", batch_tokens=10, seed=(0,))
    write_corpus(tmp_path / "none.arrow", [])
    with pytest.raises(ConfigError, match="no sequence to learn from; 0 rows"):
        Corpus(tmp_path / "none.arrow", batch_tokens=10, seed=(0,))
    write_corpus(tmp_path / "long.arrow", make_sequences([11]))
    with pytest.raises(ConfigError, match="11 tokens, more than the 10"):
        Corpus(tmp_path / "long.arrow", batch_tokens=10, seed=(0,))


def test_a_corpus_that_was_not_finished_is_not_there(tmp_path: Path) -> None:
    def sequences() -> Iterator[Sequence]:
        yield from make_sequences([3, 4])
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        write_corpus(tmp_path / "half.arrow", sequences())
    assert not (tmp_path / "half.arrow").exists()
