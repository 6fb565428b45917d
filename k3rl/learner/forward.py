"""Two passes over the waves of a walk: token vectors first, then the exact gradient through a linear surrogate.

Pass 1 runs without gradients and gives vectors over the T targets of the global batch. The objective's gradient with
respect to these small vectors is exact for the whole batch. Pass 2 goes backwards: it recomputes one wave at a time,
and sends through it that gradient and what later waves sent back to what they went on from. So the total does not
depend on how the samples were cut, packed or merged, and activations are those of one wave.

Where the gradient is known beforehand (a linear objective), pass 1 only makes what others go on from; and the last wave
keeps its graph, so that a batch which fits into one is computed once. Each saves a quarter of the time (``k3_tiny``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3rl.learner.policy import Policy
from k3rl.learner.token_tree import Node, TokenTree, Walk
from k3rl.metrics import Metrics
from k3rl.model.batch import TokenBatch
from k3rl.objective import Objective, ObjectiveBatch, TokenVectors
from k3rl.observe.monitors import policy_metrics

if TYPE_CHECKING:
    from k3rl.model.tape import Tape, TapePast


@dataclass(frozen=True, slots=True)
class _Wave:
    """One forward of a walk, and where what it gives belongs."""

    nodes: tuple[int, ...]
    rows: torch.Tensor  # [T] of the tree
    at: torch.Tensor  # [R] flat index of each trained target
    place: torch.Tensor  # [R] the token among those of the forward that predicts it
    targets: torch.Tensor  # [R] its id
    value_at: torch.Tensor  # [Q] flat index of every target
    value_place: torch.Tensor  # [Q]
    tail_at: torch.Tensor  # [n] sample index
    tail_place: torch.Tensor  # [n]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Vectors of one wave."""

    wave: _Wave
    logprob: torch.Tensor  # [R]
    entropy: torch.Tensor  # [R]
    lse: torch.Tensor  # [R]
    value: torch.Tensor | None  # [Q]
    tail_value: torch.Tensor | None  # [n]
    stats: Mapping[str, torch.Tensor]  # of the forward
    past: TapePast | None

    def detached(self) -> _Piece:
        """The same numbers without their graph."""
        names = ("logprob", "entropy", "lse", "value")
        found = {name: None if (v := getattr(self, name)) is None else v.detach() for name in names}
        return dataclasses.replace(self, past=None, **found)


class _Runner:
    """Runs the waves of a walk over a batch."""

    def __init__(self, policy: Policy, batch: ObjectiveBatch, walk: Walk) -> None:
        self._policy, self._batch, self._walk = policy, batch, walk
        self._parameter = next(iter(policy.named_parameters()))[1]
        self.waves = _lay_out(batch, walk)
        forks = any(node.is_parent for node in walk.tree.nodes)
        self._tape: Tape | None = policy.tape(walk.num_tokens) if forks else None

    def forward(self, wave: _Wave, *, keep: bool) -> _Piece:
        """Run a wave; ``keep`` what others go on from."""
        walk, device = self._walk, self._parameter.device
        nodes = [walk.tree.nodes[i] for i in wave.nodes]
        past: TapePast | None = None
        if self._tape is not None and any(node.is_parent or node.parent is not None for node in nodes):
            past = self._tape.past([node.parent for node in nodes], [walk.tree.context(node) for node in nodes])
        out = self._policy(pack(self._policy, walk.tree, nodes), past)
        if keep and past is not None and self._tape is not None:
            self._tape.keep(past, self._parents(wave), wave.rows)
        hidden = out.hidden
        head = self._policy.token_logprobs(
            hidden[wave.place.to(device)], wave.targets.to(device), self._batch.temperature
        )
        value: torch.Tensor | None = None
        tail_value: torch.Tensor | None = None
        if walk.with_value:
            values = self._policy.values(hidden)
            value, tail_value = values[wave.value_place.to(device)], values[wave.tail_place.to(device)].detach()
        return _Piece(wave, head.logprob, head.entropy, head.lse, value, tail_value, out.stats, past)

    def backward(self, piece: _Piece, gradient: TokenVectors) -> _Piece:
        """Send the objective's gradient, flat over T, back through a wave; return it without its graph."""
        wave = piece.wave
        pairs = [(piece.logprob, gradient.logprob[wave.at]), (piece.entropy, gradient.entropy[wave.at])]
        pairs.append((piece.lse, gradient.lse[wave.at]))
        if piece.value is not None and gradient.value is not None:
            pairs.append((piece.value, gradient.value[wave.value_at]))
        if piece.past is not None and self._tape is not None:
            pairs += zip(*self._tape.outputs(piece.past, self._parents(wave), wave.rows), strict=True)
        # a policy may leave out the graph of what it thinks of as a monitor; a zero gradient needs none
        pairs = [(vector, g) for vector, g in pairs if vector.requires_grad and bool((g != 0).any())]
        if pairs:
            torch.autograd.backward([v for v, _ in pairs], [g.to(v) for v, g in pairs])
        if piece.past is not None and self._tape is not None:
            self._tape.pull(piece.past)
        return piece.detached()

    def _parents(self, wave: _Wave) -> list[int | None]:
        return [i if self._walk.tree.nodes[i].is_parent else None for i in wave.nodes]


def pack(policy: Policy, tree: TokenTree, nodes: Sequence[Node]) -> TokenBatch:
    """Inputs of some nodes, on the policy's device."""
    device = next(iter(policy.named_parameters()))[1].device
    sizes = torch.tensor([0, *(node.size for node in nodes)])
    rows = torch.cat([torch.arange(node.start, node.start + node.size) for node in nodes])
    has_routes = policy.capabilities.routes and tree.routes is not None
    routes = tree.routes[rows].to(device) if has_routes and tree.routes is not None else None
    return TokenBatch(tree.ids[rows].to(device), sizes.cumsum(0).to(device), routes)


def _lay_out(batch: ObjectiveBatch, walk: Walk) -> list[_Wave]:
    """Where the targets of a batch are in the waves."""
    tree, num = walk.tree, len(walk.waves)
    wave_of, place_of = torch.full((2, walk.num_tokens), -1)
    wave_rows = [torch.cat([torch.tensor(tree.nodes[i].rows) for i in nodes]) for nodes in walk.waves]
    for w, rows in enumerate(wave_rows):
        wave_of[rows], place_of[rows] = w, torch.arange(len(rows))
    samples = [batch.samples[n] for n in tree.rows]
    none = [torch.zeros(0, dtype=torch.int64)]
    row = torch.cat(none + [rows[: s.num_targets] for s, rows in zip(samples, tree.rows.values(), strict=True)])
    flat = torch.cat(none + [torch.arange(s.start, s.start + s.num_targets) for s in samples])
    target = torch.cat(none + [s.ids[1:] for s in samples])
    tail_row = torch.cat(none + [rows[-1:] for rows in tree.rows.values()])
    trained = batch.action_mask[flat]

    def by_wave(rows: torch.Tensor, *others: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        order = torch.argsort(wave_of[rows], stable=True)
        sizes = torch.bincount(wave_of[rows], minlength=num).tolist()
        return list(zip(*(x[order].split(sizes) for x in (place_of[rows], *others)), strict=True))

    heads = by_wave(row[trained], flat[trained], target[trained])
    values = by_wave(row, flat)
    tails = by_wave(tail_row, torch.tensor(list(tree.rows), dtype=torch.int64))
    return [
        _Wave(nodes, rows, at=at, place=place, targets=ids, value_place=v, value_at=v_at, tail_place=t, tail_at=t_at)
        for nodes, rows, (place, at, ids), (v, v_at), (t, t_at) in zip(
            walk.waves, wave_rows, heads, values, tails, strict=True
        )
    ]


def _collect(batch: ObjectiveBatch, pieces: Sequence[_Piece]) -> TokenVectors:
    """Lay the waves' detached vectors out flat, on the CPU.

    Targets that are not trained hold 0, but a value that was not computed is NaN.
    """

    def scatter(size: int, parts: list[tuple[torch.Tensor, torch.Tensor]], fill: float = 0.0) -> torch.Tensor:
        out = torch.full((size,), fill, dtype=parts[0][1].dtype if parts else torch.float32)
        for at, vector in parts:
            out[at] = vector.detach().to("cpu")
        return out

    values = [(p.wave.value_at, p.value) for p in pieces if p.value is not None]
    tails = [(p.wave.tail_at, p.tail_value) for p in pieces if p.tail_value is not None]
    return TokenVectors(
        logprob=scatter(batch.num_tokens, [(p.wave.at, p.logprob) for p in pieces]),
        entropy=scatter(batch.num_tokens, [(p.wave.at, p.entropy) for p in pieces]),
        lse=scatter(batch.num_tokens, [(p.wave.at, p.lse) for p in pieces]),
        value=scatter(batch.num_tokens, values, math.nan) if values else None,
        tail_value=scatter(len(batch.samples), tails, math.nan) if tails else None,
    )


@torch.no_grad()
def compute_vectors(policy: Policy, batch: ObjectiveBatch, walk: Walk) -> TokenVectors:
    """What ``policy`` says about the targets that are trained, without gradients; values if the walk has them."""
    runner = _Runner(policy, batch, walk)
    return _collect(batch, [runner.forward(wave, keep=True).detached() for wave in runner.waves])


def differentiate(
    objective: Objective, vectors: TokenVectors, batch: ObjectiveBatch
) -> tuple[torch.Tensor, TokenVectors, Metrics]:
    """Loss, its gradient with respect to the vectors, and metrics."""
    names = [n for n in ("logprob", "entropy", "lse", "value") if getattr(vectors, n) is not None]
    leaves = {n: getattr(vectors, n).detach().requires_grad_() for n in names}
    loss, metrics = objective.loss(dataclasses.replace(vectors, **leaves), batch)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    gradients = {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(names, found, strict=True)}
    return loss.detach(), TokenVectors(**gradients), metrics


def compute_gradients(
    policy: Policy, objective: Objective, batch: ObjectiveBatch, walk: Walk
) -> tuple[torch.Tensor, ObjectiveBatch, Metrics]:
    """Add the gradient of the whole batch to ``.grad``. Returns loss, the batch with its advantages, and metrics.

    A loss that is not finite is for the caller to refuse. ``batch`` may already be prepared (a later epoch).
    """
    runner = _Runner(policy, batch, walk)
    *earlier, last = runner.waves
    if objective.is_linear:
        batch = batch if batch.weights is not None else objective.prepare(batch)
        zeros = torch.zeros(batch.num_tokens)
        _, gradient, _ = differentiate(objective, TokenVectors(zeros, zeros, zeros), batch)
        with torch.no_grad():
            for wave in earlier:
                if any(walk.tree.nodes[i].is_parent for i in wave.nodes):
                    runner.forward(wave, keep=True)
        waves = reversed(runner.waves)
        pieces = [runner.backward(runner.forward(wave, keep=False), gradient) for wave in waves]
        loss, metrics = objective.loss(_collect(batch, pieces), batch)
        return loss, batch, Metrics.merge([metrics, policy_metrics([p.stats for p in pieces])])
    with torch.no_grad():
        pieces = [runner.forward(wave, keep=True).detached() for wave in earlier]
    piece = runner.forward(last, keep=False)
    pieces.append(piece.detached())
    vectors = _collect(batch, pieces)
    batch = batch if batch.weights is not None else objective.prepare(batch, vectors)
    loss, gradient, metrics = differentiate(objective, vectors, batch)
    runner.backward(piece, gradient)
    del piece  # and with it all of its graph, before the next one is made
    for wave in reversed(earlier):
        runner.backward(runner.forward(wave, keep=False), gradient)
    return loss, batch, Metrics.merge([metrics, policy_metrics([p.stats for p in pieces])])
