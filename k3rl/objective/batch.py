"""What an objective sees: flat vectors over the T target tokens of the global batch.

A sample is a root-to-leaf path of a trajectory's token tree. Its first token is never a target; targets of all samples
follow each other in one flat order. A sampled token is trained in the first path that holds it and is an observation
in every other one. Rewards, returns and bootstraps run along the credit chain (``Segment.follows``) instead.

A turn also knows its state: a number that turns share, within a group, when they chose from the same. By ``path`` that
is every token of the path before the turn; by ``observation`` only what was appended since the last action of the path
(all of it when that is nothing). How those tokens were cut into segments does not matter.

Letters: T target tokens, N samples, J trajectories, M turns (trained action segments), S segments of one trajectory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import torch

from k3rl.trajectory import NO_ROUTE, Segment, Trajectory

StateKind = Literal["observation", "path"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One path: what the policy reads in one go."""

    trajectory: int
    start: int  # flat index of its first target
    ids: torch.Tensor  # [n + 1] int64; n targets
    routes: torch.Tensor | None  # [n + 1, L, k] int64, -1 where the policy must route afresh

    @property
    def num_targets(self) -> int:
        return max(len(self.ids) - 1, 0)

    @property
    def targets(self) -> slice:
        """Where the sample's targets lie in the flat vectors."""
        return slice(self.start, self.start + self.num_targets)


@dataclass(frozen=True, slots=True)
class Chain:
    """One root-to-leaf walk along the credit chain, with observations bridged."""

    turns: tuple[int, ...]  # indices into ObjectiveBatch.turn_ranges, in order of time
    rewards: tuple[float, ...]  # of each turn: its own and those of the observations up to the next turn
    bootstrap: int | None  # index of V(state after the last token) in cat(value [T], tail_value [N]); None: terminated


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """What the policy says about each target. Entries of tokens that are not trained are never read."""

    logprob: torch.Tensor  # [T]
    entropy: torch.Tensor  # [T]
    lse: torch.Tensor  # [T]
    # NaN where nobody computed it, so that a value which is read by mistake is never taken for a 0
    value: torch.Tensor | None = None  # [T], of the state in which the target was chosen
    tail_value: torch.Tensor | None = None  # [N], of the state after a sample's last token; never has a gradient

    def detached(self) -> TokenVectors:
        """The same numbers without their graph."""
        value = None if self.value is None else self.value.detach()
        tail_value = None if self.tail_value is None else self.tail_value.detach()
        return TokenVectors(self.logprob.detach(), self.entropy.detach(), self.lse.detach(), value, tail_value)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveBatch:
    """The global batch of one update."""

    samples: tuple[Sample, ...]
    chains: tuple[Chain, ...]
    action_mask: torch.Tensor  # [T] bool, True: trained
    rollout_logprobs: torch.Tensor  # [T] float32, 0 where not trained
    rewards: torch.Tensor  # [T] float64, on the last trained token of the turn that earned them
    sample: torch.Tensor  # [T] int64
    trajectory: torch.Tensor  # [T] int64
    group: torch.Tensor  # [J] int64
    scored: torch.Tensor  # [J] bool; False: a reward is absent, so no token of the trajectory is trained
    turn_ranges: torch.Tensor  # [M, 2] int64, flat begin and end of each turn, in order
    states: Mapping[StateKind, torch.Tensor]  # [M] int64, of each turn
    temperature: float = 1.0
    reference_logprobs: torch.Tensor | None = None  # [T], of the reference policy or of the teacher
    # what Objective.prepare fills in
    initial: TokenVectors | None = None  # what the policy said before the first step on this batch; no gradient
    penalties: torch.Tensor | None = None  # [T] float64, what each token takes off the reward
    advantages: torch.Tensor | None = None  # [T]
    returns: torch.Tensor | None = None  # [T], targets of the value head
    weights: torch.Tensor | None = None  # [T], the normaliser: loss = sum(weights * token loss)
    correction: torch.Tensor | None = None  # [T], multiplied onto the policy's loss
    raw_correction: torch.Tensor | None = None  # [T], before any bound or rejection
    num_no_signal: int = 0  # groups whose rewards do not vary

    @property
    def num_tokens(self) -> int:
        return len(self.action_mask)

    @property
    def num_trained(self) -> int:
        return int(self.action_mask.sum())

    @property
    def turn(self) -> torch.Tensor:
        """[T] int64: the turn that a trained token is of; of any other token, some number up to M."""
        return torch.bucketize(torch.arange(self.num_tokens), self.turn_ranges[:, 1].contiguous(), right=True)

    def samples_to_compute(self, *, with_value: bool) -> set[int]:
        """Samples that have trained tokens and, with values, those that hold a value which a credit chain reads.

        Before any token there is no state, so a sample of none has no value: it is left out.
        """
        needed = set(self.sample[self.action_mask].tolist())
        if with_value:
            needed.update(self.sample[self.turn_ranges[:, 0]].tolist())
            ends = [c.bootstrap for c in self.chains if c.bootstrap is not None]
            needed.update(int(self.sample[i]) if i < self.num_tokens else i - self.num_tokens for i in ends)
        return {n for n in needed if len(self.samples[n].ids)}


def build_batch(trajectories: Sequence[Trajectory], rewards: Sequence[np.ndarray | None]) -> ObjectiveBatch:
    """Lay trajectories out flat.

    ``rewards[j]`` holds the composed reward of each segment of trajectory j, ``[S]``: 0 where nothing was earned, NaN
    where a component is absent, or None when the whole trajectory was not scored. An absent reward takes the
    trajectory out of the loss, the baseline and every denominator.
    """
    temperatures = {t.temperature for t in trajectories}
    if len(temperatures) > 1:
        raise ValueError(f"a batch must be sampled at one temperature, got {sorted(temperatures)}")
    builder = _Builder()
    for trajectory, per_segment in zip(trajectories, rewards, strict=True):
        builder.add(trajectory, per_segment)
    return builder.finish(temperatures.pop() if temperatures else 1.0)


@dataclass(slots=True)
class _Builder:
    samples: list[Sample] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    masks: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    turn_ranges: list[tuple[int, int]] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    states: dict[StateKind, list[int]] = field(default_factory=lambda: {kind: [] for kind in get_args(StateKind)})
    numbers: dict[tuple[int, bytes], int] = field(default_factory=dict)  # of group and digest
    groups: list[int] = field(default_factory=list)
    scored: list[bool] = field(default_factory=list)
    size: int = 0

    def add(self, trajectory: Trajectory, rewards: np.ndarray | None) -> None:
        if rewards is not None and len(rewards) != len(trajectory.segments):
            raise ValueError(f"{trajectory.key}: {len(trajectory.segments)} segments but {len(rewards)} rewards")
        scored = rewards is not None and not np.isnan(np.asarray(rewards, dtype=np.float64)).any()
        values = np.asarray(rewards, dtype=np.float64) if scored else np.zeros(len(trajectory.segments))
        self.groups.append(trajectory.key.ordinal)
        self.scored.append(scored)
        turn_of: dict[int, int] = {}
        after: dict[int, int] = {}
        for path in trajectory.paths():
            self._add_path(trajectory, path, scored, turn_of, after)
        digests = _digest_states(trajectory)
        for index in turn_of:  # in order of turns
            for kind, digest in digests[index].items():
                key = (self.groups[-1], digest)
                self.states[kind].append(self.numbers.setdefault(key, len(self.numbers)))
        credited = _credited_turns(trajectory, turn_of)
        for turn, reward in zip(credited, values, strict=True):
            if turn is not None:
                self.turn_rewards[turn] += float(reward)
        self._add_chains(trajectory, values, credited, after)

    def _add_path(
        self,
        trajectory: Trajectory,
        path: tuple[int, ...],
        scored: bool,
        turn_of: dict[int, int],
        after: dict[int, int],
    ) -> None:
        segments = [trajectory.segments[i] for i in path]
        ids = torch.from_numpy(np.concatenate([s.token_ids for s in segments]).astype(np.int64))
        sample = Sample(len(self.groups) - 1, self.size, ids, _routes(segments))
        mask = np.zeros(sample.num_targets, dtype=bool)
        logprobs = np.zeros(sample.num_targets, dtype=np.float32)
        position = 0  # of the segment's first token in the path; its target index is one less
        for index, segment in zip(path, segments, strict=True):
            end = position + len(segment)
            begin = max(position, 1)
            if index not in after:
                is_tail = end - 1 >= sample.num_targets
                after[index] = -1 - len(self.samples) if is_tail else self.size + max(end - 1, 0)
                if segment.kind == "action" and scored and end > begin and segment.rollout_logprobs is not None:
                    turn_of[index] = len(self.turn_ranges)
                    self.turn_ranges.append((self.size + begin - 1, self.size + end - 1))
                    self.turn_rewards.append(0.0)
                    mask[begin - 1 : end - 1] = True
                    logprobs[begin - 1 : end - 1] = segment.rollout_logprobs[begin - position :]
            position = end
        self.samples.append(sample)
        self.masks.append(mask)
        self.logprobs.append(logprobs)
        self.size += sample.num_targets

    def _add_chains(
        self, trajectory: Trajectory, rewards: np.ndarray, credited: list[int | None], after: dict[int, int]
    ) -> None:
        count = len(trajectory.segments)
        followed = {_previous(trajectory, i) for i in range(count)}
        truncated = trajectory.outcome.status == "truncated"
        for leaf in (i for i in range(count) if i not in followed):
            walk: list[int] = []
            at: int | None = leaf
            while at is not None:
                walk.append(at)
                at = _previous(trajectory, at)
            earned: dict[int, float] = {}  # by turn, in order of time
            for i in reversed(walk):
                turn = credited[i]
                if turn is not None:
                    earned[turn] = earned.get(turn, 0.0) + float(rewards[i])
            if earned:
                bootstrap = after[leaf] if truncated else None
                self.chains.append(Chain(tuple(earned), tuple(earned.values()), bootstrap))

    def finish(self, temperature: float) -> ObjectiveBatch:
        lengths = torch.tensor([s.num_targets for s in self.samples], dtype=torch.int64)
        owners = torch.tensor([s.trajectory for s in self.samples], dtype=torch.int64)
        sample = torch.repeat_interleave(torch.arange(len(self.samples)), lengths)
        ranges = torch.tensor(self.turn_ranges, dtype=torch.int64).reshape(-1, 2)
        rewards = torch.zeros(self.size, dtype=torch.float64)
        rewards[ranges[:, 1] - 1] = torch.tensor(self.turn_rewards, dtype=torch.float64)
        chains = tuple(
            Chain(c.turns, c.rewards, self.size - 1 - c.bootstrap) if c.bootstrap is not None and c.bootstrap < 0 else c
            for c in self.chains
        )
        return ObjectiveBatch(
            samples=tuple(self.samples),
            chains=chains,
            action_mask=torch.from_numpy(np.concatenate([np.zeros(0, dtype=bool), *self.masks])),
            rollout_logprobs=torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.float32), *self.logprobs])),
            rewards=rewards,
            sample=sample,
            trajectory=owners[sample],
            group=torch.tensor(self.groups, dtype=torch.int64),
            scored=torch.tensor(self.scored, dtype=torch.bool),
            turn_ranges=ranges,
            states={kind: torch.tensor(numbers, dtype=torch.int64) for kind, numbers in self.states.items()},
            temperature=temperature,
        )


def _previous(trajectory: Trajectory, index: int) -> int | None:
    """The segment before ``index`` in the credit chain; where only the token link was given, that one."""
    segment = trajectory.segments[index]
    return segment.context if segment.follows is None else segment.follows


def _credited_turns(trajectory: Trajectory, turn_of: dict[int, int]) -> list[int | None]:
    """The turn that gets each segment's reward: the nearest at or before it in the credit chain; None: it is lost.

    So a terminal reward on an observation is neither decayed nor dropped. ``turn_of``: the turn that a segment is.
    """
    credited: list[int | None] = []
    for i in range(len(trajectory.segments)):
        previous = _previous(trajectory, i)
        credited.append(turn_of.get(i, None if previous is None else credited[previous]))
    return credited


def _digest_states(trajectory: Trajectory) -> list[dict[StateKind, bytes]]:
    """Of each segment, digests of the tokens before it: of all of them, and of those since the last action."""
    paths: list[hashlib._Hash] = []
    recents: list[hashlib._Hash | None] = []  # None: nothing since
    before: list[dict[StateKind, bytes]] = []
    for segment in trajectory.segments:
        path = hashlib.sha256() if segment.context is None else paths[segment.context].copy()
        recent = None if segment.context is None else recents[segment.context]
        before.append({"path": path.digest(), "observation": (path if recent is None else recent).digest()})
        tokens = np.ascontiguousarray(segment.token_ids, dtype=np.int32).tobytes()
        path.update(tokens)
        paths.append(path)
        if segment.kind == "action":
            recent = None
        elif tokens:
            recent = hashlib.sha256(b"recent") if recent is None else recent.copy()
            recent.update(tokens)
        recents.append(recent)
    return before


def _routes(segments: Sequence[Segment]) -> torch.Tensor | None:
    """Recorded routes of a path, [n + 1, L, k]; None when no segment has any."""
    shape = next((s.routes.shape[1:] for s in segments if s.routes is not None), None)
    if shape is None:
        return None
    parts = []
    for segment in segments:
        if segment.routes is None:
            parts.append(np.full((len(segment), *shape), -1, dtype=np.int64))
        else:
            wide = segment.routes.astype(np.int64)
            parts.append(np.where(segment.routes == NO_ROUTE, np.int64(-1), wide))
    return torch.from_numpy(np.concatenate(parts))
