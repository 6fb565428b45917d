"""Samples as a tree of tokens: a prefix that several share is computed once, and a long sample in several pieces.

    tree   every token of every sample, those that samples have in common once
    node   consecutive tokens that are computed at once, going on from the end of another node
    wave   nodes that are packed into one forward; what they go on from is in earlier waves

Letters: R rows (tokens of the tree), L mixture-of-experts layers, k experts per token.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k3rl.objective import ObjectiveBatch, Sample

MIN_SHARED = 128
"""Fewest tokens that samples share: to go on from a shorter prefix costs more than to compute it again."""


@dataclass(frozen=True, slots=True)
class Node:
    """Rows ``start : start + size`` of the tree."""

    start: int
    size: int
    parent: int | None
    """The node that it goes on from; None: it begins a sequence."""
    offset: int
    """Tokens before it in its sequence."""
    is_parent: bool
    """Another node goes on from it."""

    @property
    def rows(self) -> range:
        return range(self.start, self.start + self.size)


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Nodes in an order in which a parent comes before its children; their rows follow each other in that order."""

    ids: torch.Tensor  # [R] int64
    routes: torch.Tensor | None  # [R, L, k] int64, -1 where the policy must route afresh
    nodes: tuple[Node, ...]
    rows: Mapping[int, torch.Tensor]  # of each sample: the row of each of its input tokens

    def context(self, node: Node) -> torch.Tensor:
        """Rows before a node in its sequence, in order of position."""
        parts: list[torch.Tensor] = [torch.zeros(0, dtype=torch.int64)]
        at = node.parent
        while at is not None:
            parts.append(torch.arange(self.nodes[at].start, self.nodes[at].start + self.nodes[at].size))
            at = self.nodes[at].parent
        return torch.cat(parts[::-1])


@dataclass(frozen=True, slots=True)
class Walk:
    """A tree, and how it is computed."""

    tree: TokenTree
    waves: tuple[tuple[int, ...], ...]  # nodes
    with_value: bool
    """The last token of a sample is read too: the value of the state after it is wanted."""

    @property
    def num_tokens(self) -> int:
        return len(self.tree.ids)

    @property
    def samples(self) -> list[list[int]]:
        """For each wave, the samples whose last token it computes."""
        end_of = {node.rows[-1]: i for i, node in enumerate(self.tree.nodes)}
        ends = {n: end_of[int(rows[-1])] for n, rows in self.tree.rows.items()}
        return [[n for i in wave for n, end in ends.items() if end == i] for wave in self.waves]


def plan_walk(
    batch: ObjectiveBatch, micro_batch_tokens: int, *, with_value: bool = False, chunked: bool = False
) -> Walk:
    """A walk over what must be computed: at most ``micro_batch_tokens`` in a forward.

    That is the samples that have trained tokens and, with values, those where a credit chain reads one. When not
    ``chunked``, a sample is one node: nothing is shared, and one that is too long is alone in its wave.
    """
    needed = sorted(batch.samples_to_compute(with_value=with_value))
    limits = (micro_batch_tokens, MIN_SHARED) if chunked else (None, None)
    tree = build_tree({n: batch.samples[n] for n in needed}, *limits, keep_last=with_value)
    return Walk(tree, tuple(_waves(tree.nodes, micro_batch_tokens)), with_value)


def whole_samples(batch: ObjectiveBatch, parts: Sequence[Sequence[int]], *, with_value: bool = False) -> Walk:
    """A walk in which each wave is some samples as they are."""
    order = [n for part in parts for n in part]
    tree = build_tree({n: batch.samples[n] for n in order}, None, None, keep_last=with_value)
    at = iter(range(len(order)))
    return Walk(tree, tuple(tuple(next(at) for _ in part) for part in parts), with_value)


def _waves(nodes: Sequence[Node], limit: int) -> list[tuple[int, ...]]:
    """Nodes of equal depth together, the largest first."""
    depth: list[int] = []
    for node in nodes:
        depth.append(0 if node.parent is None else depth[node.parent] + 1)
    waves: list[list[int]] = []
    room, level = 0, -1
    for i in sorted(range(len(nodes)), key=lambda i: (depth[i], -nodes[i].size, i)):
        if depth[i] != level or nodes[i].size > room:
            waves.append([])
            room, level = limit, depth[i]
        waves[-1].append(i)
        room -= nodes[i].size
    return [tuple(wave) for wave in waves]


def build_tree(
    samples: Mapping[int, Sample], longest: int | None, min_shared: int | None, *, keep_last: bool
) -> TokenTree:
    """Merge the inputs of some samples: all tokens but the last, or with ``keep_last`` all of them; none is empty.

    Args:
        samples: by number.
        longest: a node ends at the multiples of so many tokens; None: it does not.
        min_shared: fewest tokens that are shared, if their routes are the same too; None: no token is.
    """
    stop = None if keep_last else -1
    ids = {n: sample.ids[:stop].numpy() for n, sample in samples.items()}
    routes = {n: None if sample.routes is None else sample.routes[:stop].numpy() for n, sample in samples.items()}
    # Sorted, what a sample shares with any before it, it shares with the one before it.
    order = list(ids) if min_shared is None else sorted(ids, key=lambda n: ids[n].astype(">u4").tobytes())
    rows: dict[int, np.ndarray] = {}
    edges: list[tuple[int, int, int, int]] = []  # first row, size, tokens before it, row that it goes on from
    made: list[tuple[int, int]] = []  # sample and tokens shared: what is behind them is new
    total, last = 0, None
    for n in order:
        shared = 0 if min_shared is None or last is None else _common(ids[last], ids[n], routes[last], routes[n])
        shared = shared if shared >= (min_shared or 0) else 0
        before = rows[last][:shared] if last is not None else np.zeros(0, np.int64)
        new = len(ids[n]) - shared
        rows[n] = np.concatenate([before, np.arange(total, total + new)])
        if new:
            edges.append((total, new, shared, int(before[-1]) if shared else -1))
            made.append((n, shared))
        total, last = total + new, n
    shape = next((r.shape[1:] for r in routes.values() if r is not None), None)
    new_ids = [np.zeros(0, np.int64), *(ids[n][shared:] for n, shared in made)]
    return TokenTree(
        ids=torch.from_numpy(np.concatenate(new_ids)),
        routes=None if shape is None else _join_routes([(ids[n], routes[n], shared) for n, shared in made], shape),
        nodes=_cut(edges, longest),
        rows={n: torch.from_numpy(found) for n, found in rows.items()},
    )


def _common(a: np.ndarray, b: np.ndarray, routes_a: np.ndarray | None, routes_b: np.ndarray | None) -> int:
    """Length of the common prefix, tokens and routes."""
    if (routes_a is None) != (routes_b is None):
        return 0
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    if routes_a is not None and routes_b is not None:
        differs = differs | (routes_a[:size] != routes_b[:size]).any(axis=(1, 2))
    return int(differs.argmax()) if differs.any() else size


def _join_routes(parts: Sequence[tuple[np.ndarray, np.ndarray | None, int]], shape: tuple[int, ...]) -> torch.Tensor:
    whole = [
        np.full((len(ids) - shared, *shape), -1, np.int64) if routes is None else routes[shared:]
        for ids, routes, shared in parts
    ]
    return torch.from_numpy(np.concatenate(whole))


def _cut(edges: Sequence[tuple[int, int, int, int]], longest: int | None) -> tuple[Node, ...]:
    """Nodes of the edges, which end where another edge begins and at the multiples of ``longest`` tokens."""
    forks = sorted({parent for *_, parent in edges if parent >= 0})
    found: list[tuple[int, int, int | None, int]] = []
    end_of: dict[int, int] = {}
    for first, size, before, parent_row in edges:
        inside = forks[np.searchsorted(forks, first) : np.searchsorted(forks, first + size - 1)]
        starts = {first, *(row + 1 for row in inside)}
        if longest is not None:
            starts.update(range(first + longest - before % longest, first + size, longest))
        borders = [*sorted(starts), first + size]
        parent = end_of.get(parent_row)
        for start, end in itertools.pairwise(borders):
            found.append((start, end - start, parent, before + start - first))
            parent = end_of[end - 1] = len(found) - 1
    parents = {parent for _, _, parent, _ in found}
    return tuple(Node(*values, is_parent=i in parents) for i, values in enumerate(found))
