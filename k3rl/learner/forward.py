"""Two passes over micro-batches: token vectors first, then the exact gradient through a linear surrogate.

Pass 1 runs without gradients and gives vectors over the T targets of the global batch. The objective's gradient with
respect to these small vectors is exact for the whole batch. Pass 2 recomputes one micro-batch at a time and sends that
gradient back through it. So the total does not depend on how the samples were cut into micro-batches.

Where the gradient is known beforehand (a linear objective), pass 2 alone is enough; and the first micro-batch of pass 1
keeps its graph, so that a batch which fits into one is computed once. Each saves a quarter of the time (``k3_tiny``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from k3rl.learner.policy import Policy
from k3rl.metrics import Metrics
from k3rl.model.batch import TokenBatch
from k3rl.objective import Objective, ObjectiveBatch, Sample, TokenVectors
from k3rl.observe.monitors import policy_metrics

Plan = list[list[int]]
"""Micro-batches, each the indices of its samples."""


def plan_micro_batches(batch: ObjectiveBatch, micro_batch_tokens: int, *, with_value: bool = False) -> Plan:
    """Pack what must be computed, longest first; no sample is ever split, and one that is too long is alone.

    Those are the samples that have trained tokens and, with values, those where a credit chain reads one.
    """
    needed = batch.samples_to_compute(with_value=with_value)
    order = sorted(needed, key=lambda n: (-batch.samples[n].num_targets, n))
    plan: Plan = []
    room = 0
    for n in order:
        length = len(batch.samples[n].ids)
        if not plan or length > room:
            plan.append([])
            room = micro_batch_tokens
        plan[-1].append(n)
        room -= length
    return plan


@dataclass(frozen=True, slots=True)
class _Piece:
    """Vectors of one micro-batch at its R trained targets, and where they belong."""

    at: torch.Tensor  # [R] flat index
    logprob: torch.Tensor  # [R]
    entropy: torch.Tensor  # [R]
    lse: torch.Tensor  # [R]
    value_at: torch.Tensor  # [Q] flat index of every target
    value: torch.Tensor | None  # [Q]
    tail_at: torch.Tensor  # [n] sample index
    tail_value: torch.Tensor | None  # [n]
    stats: Mapping[str, torch.Tensor]  # of the forward

    def backward(self, gradient: TokenVectors) -> _Piece:
        """Send the objective's gradient, flat over T, back through this micro-batch; return it without its graph."""
        pairs = [(self.logprob, gradient.logprob[self.at]), (self.entropy, gradient.entropy[self.at])]
        pairs.append((self.lse, gradient.lse[self.at]))
        if self.value is not None and gradient.value is not None:
            pairs.append((self.value, gradient.value[self.value_at]))
        # a policy may leave out the graph of what it thinks of as a monitor; a zero gradient needs none
        pairs = [(vector, g) for vector, g in pairs if vector.requires_grad and bool((g != 0).any())]
        if pairs:
            torch.autograd.backward([v for v, _ in pairs], [g.to(v) for v, g in pairs])
        names = ("logprob", "entropy", "lse", "value")
        detached = {name: None if (v := getattr(self, name)) is None else v.detach() for name in names}
        return dataclasses.replace(self, **detached)


def pack_samples(policy: Policy, samples: Sequence[Sample], *, keep_last: bool) -> TokenBatch:
    """Inputs of some samples: all tokens but the last, or all of them where the value of the final state is wanted."""
    stop = None if keep_last else -1
    device = next(iter(policy.named_parameters()))[1].device
    packed = TokenBatch.pack([s.ids[:stop] for s in samples])
    routes: torch.Tensor | None = None
    if policy.capabilities.routes:
        shape = next((s.routes.shape[1:] for s in samples if s.routes is not None), None)
        if shape is not None:
            parts = [torch.full((len(s.ids), *shape), -1) if s.routes is None else s.routes for s in samples]
            routes = torch.cat([p[:stop] for p in parts]).to(device)
    return TokenBatch(packed.ids.to(device), packed.cu_seqlens.to(device), routes)


def _forward(policy: Policy, batch: ObjectiveBatch, indices: Sequence[int], *, with_value: bool) -> _Piece:
    samples = [batch.samples[n] for n in indices]
    packed = pack_samples(policy, samples, keep_last=with_value)
    out = policy(packed)
    hidden = out.hidden
    rows: list[torch.Tensor] = []  # row of the packed input that predicts each target
    flat: list[torch.Tensor] = []
    tails: list[int] = []
    offset = 0
    for sample in samples:
        count = sample.num_targets
        rows.append(torch.arange(offset, offset + count))
        flat.append(torch.arange(sample.start, sample.start + count))
        offset += count + int(with_value)
        tails.append(offset - 1)
    row, at = torch.cat(rows), torch.cat(flat)
    trained = batch.action_mask[at]
    targets = torch.cat([s.ids[1:] for s in samples])[trained].to(hidden.device)
    head = policy.token_logprobs(hidden[row[trained].to(hidden.device)], targets, batch.temperature)
    values: torch.Tensor | None = None
    tail_values: torch.Tensor | None = None
    if with_value:
        all_values = policy.values(hidden)
        values = all_values[row.to(hidden.device)]
        tail_values = all_values[torch.tensor(tails, device=hidden.device)].detach()
    tail_at = torch.tensor(list(indices))
    return _Piece(at[trained], head.logprob, head.entropy, head.lse, at, values, tail_at, tail_values, out.stats)


def _collect(batch: ObjectiveBatch, pieces: Sequence[_Piece]) -> TokenVectors:
    """Lay the micro-batches' detached vectors out flat, on the CPU.

    Targets that are not trained hold 0, but a value that was not computed is NaN.
    """

    def scatter(size: int, parts: list[tuple[torch.Tensor, torch.Tensor]], fill: float = 0.0) -> torch.Tensor:
        out = torch.full((size,), fill, dtype=parts[0][1].dtype if parts else torch.float32)
        for at, vector in parts:
            out[at] = vector.detach().to("cpu")
        return out

    values = [(p.value_at, p.value) for p in pieces if p.value is not None]
    tails = [(p.tail_at, p.tail_value) for p in pieces if p.tail_value is not None]
    return TokenVectors(
        logprob=scatter(batch.num_tokens, [(p.at, p.logprob) for p in pieces]),
        entropy=scatter(batch.num_tokens, [(p.at, p.entropy) for p in pieces]),
        lse=scatter(batch.num_tokens, [(p.at, p.lse) for p in pieces]),
        value=scatter(batch.num_tokens, values, math.nan) if values else None,
        tail_value=scatter(len(batch.samples), tails, math.nan) if tails else None,
    )


@torch.no_grad()
def compute_vectors(policy: Policy, batch: ObjectiveBatch, plan: Plan, *, with_value: bool) -> TokenVectors:
    """Pass 1: vectors over all trained targets, without gradients."""
    return _collect(batch, [_forward(policy, batch, indices, with_value=with_value) for indices in plan])


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
    policy: Policy, objective: Objective, batch: ObjectiveBatch, plan: Plan
) -> tuple[torch.Tensor, ObjectiveBatch, Metrics]:
    """Add the gradient of the whole batch to ``.grad``. Returns loss, the batch with its advantages, and metrics.

    A loss that is not finite is for the caller to refuse. ``batch`` may already be prepared (a later epoch).
    """
    if objective.is_linear:
        batch = batch if batch.weights is not None else objective.prepare(batch)
        zeros = torch.zeros(batch.num_tokens)
        _, gradient, _ = differentiate(objective, TokenVectors(zeros, zeros, zeros), batch)
        pieces = [_forward(policy, batch, indices, with_value=False).backward(gradient) for indices in plan]
        loss, metrics = objective.loss(_collect(batch, pieces), batch)
        return loss, batch, Metrics.merge([metrics, policy_metrics([p.stats for p in pieces])])
    with_value = objective.needs_value
    first = _forward(policy, batch, plan[0], with_value=with_value)
    with torch.no_grad():
        others = [_forward(policy, batch, indices, with_value=with_value) for indices in plan[1:]]
    vectors = _collect(batch, [first, *others])
    monitors = policy_metrics([p.stats for p in (first, *others)])
    batch = batch if batch.weights is not None else objective.prepare(batch, vectors)
    loss, gradient, metrics = differentiate(objective, vectors, batch)
    first.backward(gradient)
    del first  # and with it all of its graph, before the next one is made
    for indices in plan[1:]:
        _forward(policy, batch, indices, with_value=with_value).backward(gradient)
    return loss, batch, Metrics.merge([metrics, monitors])
