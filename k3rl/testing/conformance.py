"""Checkers that every implementation of a protocol must pass; they raise AssertionError with what differs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from k3rl.model.batch import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k3rl.model.cache import Cache
    from k3rl.model.transformer import K3Model

SPLITS = ((1,), (15,), (16,), (17,), (33,), (15, 33), (1, 2, 3), (16, 32))


def check_cache(model: K3Model, make_cache: Callable[[int], Cache], *, tolerance: float = 1e-5) -> None:
    """Check that any way to cut, pause, fork, add and reorder sequences gives the hidden states of the whole.

    Args:
        model: the model whose forward takes the cache.
        make_cache: from a number of sequences to their empty cache.
        tolerance: largest absolute difference of a hidden state.
    """
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, model.config.vocab_size, (n,), generator=generator) for n in (37, 51, 40)]
    with torch.no_grad():
        whole = _split(model(TokenBatch.pack(ids)).hidden, ids)
        for cuts in SPLITS:
            _check_cuts(model, make_cache(len(ids)), ids, whole, cuts, tolerance)
        _check_pause(model, make_cache(len(ids)), ids, whole, tolerance)
        _check_fork(model, make_cache(len(ids)), ids, generator, tolerance)
        _check_extend(model, make_cache(1), ids, whole, tolerance)


def _split(rows: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(rows.split([len(p) for p in parts]))


def _close(got: torch.Tensor, want: torch.Tensor, tolerance: float, what: str) -> None:
    worst = float((got - want).abs().max())
    assert worst <= tolerance, f"{what}: hidden states differ by {worst:g}, more than {tolerance:g}"


def _check_cuts(
    model: K3Model,
    cache: Cache,
    ids: Sequence[torch.Tensor],
    whole: Sequence[torch.Tensor],
    cuts: Sequence[int],
    tolerance: float,
) -> None:
    pieces: list[list[torch.Tensor]] = [[] for _ in ids]
    bounds = (0, *cuts, max(len(i) for i in ids))
    for start, end in itertools.pairwise(bounds):
        parts = [i[start:end] for i in ids]
        out = model(TokenBatch.pack(parts), cache)
        assert out.cache is not None
        cache = out.cache
        for piece, rows in zip(pieces, _split(out.hidden, parts), strict=True):
            piece.append(rows)
    assert cache.lengths.tolist() == [len(i) for i in ids], "the cache does not cover the tokens that it was given"
    for piece, want in zip(pieces, whole, strict=True):
        _close(torch.cat(piece), want, tolerance, f"cut at {list(cuts)}")


def _check_pause(
    model: K3Model, cache: Cache, ids: Sequence[torch.Tensor], whole: Sequence[torch.Tensor], tolerance: float
) -> None:
    """Sequences take turns: while one decodes token by token the others get no tokens at all."""
    cache = model(TokenBatch.pack([i[:20] for i in ids]), cache).cache
    for n, sequence in enumerate(ids):
        for t in range(20, len(sequence)):
            parts = [sequence[t : t + 1] if m == n else sequence[:0] for m in range(len(ids))]
            out = model(TokenBatch.pack(parts), cache)
            cache = out.cache
            _close(out.hidden[0], whole[n][t], tolerance, f"decoding token {t} of sequence {n} alone")


def _check_fork(
    model: K3Model, cache: Cache, ids: Sequence[torch.Tensor], generator: torch.Generator, tolerance: float
) -> None:
    out = model(TokenBatch.pack([i[: 18 + n] for n, i in enumerate(ids)]), cache)
    assert out.cache is not None
    rows = [2, 0, 2]
    forked = out.cache.select(torch.tensor(rows))
    tails = [torch.randint(0, model.config.vocab_size, (n,), generator=generator) for n in (3, 30, 17)]
    got = _split(model(TokenBatch.pack(tails), forked).hidden, tails)
    for row, tail, rows_got in zip(rows, tails, got, strict=True):
        joined = torch.cat([ids[row][: 18 + row], tail])
        _close(rows_got, model(TokenBatch.pack([joined])).hidden[18 + row :], tolerance, f"fork of sequence {row}")


def _check_extend(
    model: K3Model, cache: Cache, ids: Sequence[torch.Tensor], whole: Sequence[torch.Tensor], tolerance: float
) -> None:
    """Two sequences join one that is under way; when it leaves, they go on."""
    begun = model(TokenBatch.pack([ids[0][:21]]), cache).cache
    assert begun is not None
    joined = model(TokenBatch.pack([ids[0][:0], ids[1][:17], ids[2][:5]]), begun.extend(2)).cache
    assert joined is not None
    left = joined.select(torch.tensor([2, 1]))
    assert left.lengths.tolist() == [5, 17]
    parts = [ids[2][5:], ids[1][17:]]
    last, middle = _split(model(TokenBatch.pack(parts), left).hidden, parts)
    _close(last, whole[2][5:], tolerance, "a sequence that joined")
    _close(middle, whole[1][17:], tolerance, "a sequence that joined")
