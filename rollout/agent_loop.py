"""The agent loop: many episodes at once, tokens in and tokens out.

Semantics, locked by ``tests/rollout/test_agent_loop.py``:
  1. Only new messages are rendered; what the policy sampled is appended as sampled and never tokenised again.
  2. A reward belongs to the action segment that earned it.
  3. A turn that ends without its stop token ends the episode as truncated, and so does a full context or the last turn.
  4. A truncated episode that was never graded has outcome 0: its task is verifiably not done. A *failed* one has no
     outcome at all: nobody knows.
  5. An environment that raises or exceeds its deadline fails its own episode only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from k3rl.envs.base import StepInfo
from k3rl.envs.registry import make
from k3rl.errors import EngineError, EnvError, RewardError, SandboxError
from k3rl.rollout.deadline import call_all
from k3rl.rollout.engine import Completion, Request
from k3rl.trajectory import (
    NO_ROUTE,
    FailureCause,
    Outcome,
    PolicyVersion,
    Reward,
    Segment,
    SegmentKind,
    Task,
    Trajectory,
    TrajectoryKey,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3rl.config import EnvironmentConfig
    from k3rl.envs.base import AssistantAction, Message
    from k3rl.rollout.chat_format import ChatFormat
    from k3rl.rollout.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSpec:
    """One episode to play."""

    key: TrajectoryKey
    task: Task
    seed_attempt: int = 0
    """Whose random stream to use. Work that a crash lost is repeated with its stream; a retry takes a new one."""

    def seed(self, run_seed: int, *purpose: object) -> int:
        """Seed of this episode for ``purpose``."""
        return replace(self.key, attempt=self.seed_attempt).seed(run_seed, self.task.split, *purpose)


@dataclass(slots=True)
class Episode:
    """An episode in progress; becomes a Trajectory when ``outcome`` is set."""

    spec: EpisodeSpec
    env: Any = None
    segments: list[Segment] = field(default_factory=list)
    context: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)  # what the environment said
    versions: list[PolicyVersion] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)
    handle: int | None = None
    routes: list[np.ndarray] = field(default_factory=list)  # of the context's first tokens, without a gap
    turns: int = 0
    outcome: Outcome | None = None

    def append(self, kind: SegmentKind, token_ids: Sequence[int] | np.ndarray, **fields: Any) -> None:
        last = len(self.segments) - 1 if self.segments else None
        ids = np.asarray(token_ids, dtype=np.int32)
        self.segments.append(Segment(kind=kind, token_ids=ids, context=last, follows=last, **fields))
        self.context += ids.tolist()

    def reward_last_action(self, rewards: Sequence[Reward]) -> None:
        """Give rewards to the last action; to the prompt where there is none, so that they are still reported."""
        actions = [i for i, segment in enumerate(self.segments) if segment.kind == "action"]
        at = actions[-1] if actions else 0
        self.segments[at] = replace(self.segments[at], rewards=self.segments[at].rewards + tuple(rewards))

    def add_routes(self, completion: Completion) -> None:
        """Keep what is new: a context that was read again keeps the routes under which its tokens were sampled."""
        if completion.routes is None:
            return
        known = sum(len(part) for part in self.routes)
        if completion.routes_start > known:
            raise EngineError(f"routes from position {completion.routes_start} on, those from {known} on are missing")
        self.routes.append(completion.routes[known - completion.routes_start :])

    def count(self, info: StepInfo) -> None:
        for name in ("tool_calls", "invalid_calls"):
            self.stats[name] = self.stats.get(name, 0.0) + getattr(info, name)
        self.stats["milestones"] = self.stats.get("milestones", 0.0) + len(info.milestones)

    def to_trajectory(self, temperature: float) -> Trajectory:
        """The record of an episode that is over."""
        assert self.outcome is not None
        segments = _attach_routes(self.segments, np.concatenate(self.routes)) if self.routes else self.segments
        return Trajectory(
            key=self.spec.key,
            task=self.spec.task,
            segments=tuple(segments),
            outcome=self.outcome,
            versions=tuple(self.versions),
            temperature=temperature or 1.0,
            stats=self.stats,
        )


class EpisodeLoop:
    """What every way to play an episode shares: environments, rendering, records, and when an episode ends."""

    def __init__(self, chat_format: ChatFormat, config: EnvironmentConfig, run_seed: int) -> None:
        self._format = chat_format
        self._config = config
        self._run_seed = run_seed

    def _start(self, episodes: Sequence[Episode]) -> None:
        def start(episode: Episode) -> list[int]:
            episode.env = make(self._config.id, **self._config.options)
            observation, _ = episode.env.reset(options={"task": episode.spec.task})
            episode.messages += observation
            return self._format.render_prompt(observation, episode.env.unwrapped.tool_schemas)

        results = call_all([lambda e=episode: start(e) for episode in episodes], self._config.step_timeout_s)
        for episode, result in zip(episodes, results, strict=True):
            if isinstance(result, BaseException):
                self._fail(episode, result)
            else:
                episode.append("prompt", result)

    def _take_turns(self, ended: Sequence[tuple[Episode, Completion]]) -> None:
        """Record what was sampled and let the environments answer; episodes that are over get their outcome."""
        acting: list[tuple[Episode, AssistantAction]] = []
        for episode, completion in ended:
            self._record_action(episode, completion)
            if completion.stop_reason == "length":
                is_full = len(episode.context) >= self._config.max_episode_tokens
                self._end(episode, Outcome(status="truncated", limit="context_full" if is_full else "turn_tokens"))
            else:
                acting.append((episode, self._format.parse_action(completion.token_ids.tolist())))
        results = call_all([lambda e=e, a=a: self._act(e.env, a) for e, a in acting], self._config.step_timeout_s)
        for (episode, _), result in zip(acting, results, strict=True):
            if isinstance(result, BaseException):
                self._fail(episode, result)
            else:
                self._observe(episode, result)

    def _record_action(self, episode: Episode, completion: Completion) -> None:
        for version in completion.versions:
            if version not in episode.versions:
                episode.versions.append(version)
        episode.append(
            "action",
            completion.token_ids,
            rollout_logprobs=completion.logprobs,
            version_index=np.asarray([episode.versions.index(v) for v in completion.versions], dtype=np.int32),
            stop_reason=completion.stop_reason,
        )
        episode.turns += 1

    def _act(self, env: Any, action: AssistantAction) -> _Answer:
        """Step the environment and read all of its answer here, where a malformed one fails its own episode only."""
        observation, _, terminated, truncated, info = env.step(action)
        ids = [] if terminated else self._format.render_observation(observation)
        if not isinstance(info.get("k3rl"), StepInfo):
            raise EnvError("step() gave no StepInfo as info['k3rl']")
        return _Answer(tuple(observation), ids, bool(terminated), bool(truncated), info["k3rl"])

    def _observe(self, episode: Episode, answer: _Answer) -> None:
        episode.count(answer.info)
        episode.reward_last_action(answer.info.rewards)
        if answer.terminated:
            self._end(episode, Outcome(status="completed"))
            return
        # Appended even when the episode ends here: the value of this state is what a truncated return bootstraps from.
        episode.append("observation", answer.ids)
        episode.messages += answer.messages
        if answer.truncated:
            self._end(episode, Outcome(status="truncated", limit="environment"))
        elif episode.turns >= self._config.max_turns:
            self._end(episode, Outcome(status="truncated", limit="max_turns"))
        elif len(episode.context) >= self._config.max_episode_tokens:
            self._end(episode, Outcome(status="truncated", limit="context_full"))

    def _fail(self, episode: Episode, error: BaseException) -> None:
        """Whose fault it was follows from the boundary that the error crossed."""
        cause: FailureCause = "env"
        if isinstance(error, RewardError):
            cause = "grader"
        elif isinstance(error, SandboxError):
            cause = "tool"
        self._end(episode, Outcome(status="failed", cause=cause, detail=f"{type(error).__name__}: {error}"))

    def _end(self, episode: Episode, outcome: Outcome) -> None:
        episode.outcome = outcome
        graded = any(r.name == "outcome" for s in episode.segments for r in s.rewards)
        if outcome.status == "truncated" and not graded:
            episode.reward_last_action([Reward("outcome", 0.0)])

    def _close(self, episodes: Sequence[Episode]) -> None:
        """Close the environments. What an episode was is decided by now: one that fails to close changes nothing."""
        call_all([episode.env.close for episode in episodes if episode.env is not None], self._config.step_timeout_s)


class AgentLoop(EpisodeLoop):
    """Plays episodes of one environment on one engine."""

    def __init__(self, engine: Engine, chat_format: ChatFormat, config: EnvironmentConfig, run_seed: int) -> None:
        super().__init__(chat_format, config, run_seed)
        self._engine = engine

    def run(self, specs: Sequence[EpisodeSpec], temperature: float) -> list[Trajectory]:
        """Play every episode to its end and return the trajectories in the order of ``specs``."""
        episodes = [Episode(spec=spec) for spec in specs]
        waiting: dict[int, Episode] = {}
        try:
            self._start(episodes)
            for episode in episodes:
                self._submit(episode, temperature, waiting)
            while waiting:
                ended = [(waiting.pop(c.request), c) for c in self._engine.step()]
                for episode, completion in ended:
                    self._keep(episode, completion)
                self._take_turns(ended)
                for episode, _ in ended:
                    self._submit(episode, temperature, waiting)
                    if episode.outcome is not None:
                        self._release(episode)  # at once: the engine carries every live context along
        finally:
            for number in waiting:
                self._engine.abort(number)
            for episode in episodes:
                self._release(episode)
            self._close(episodes)
        return [episode.to_trajectory(temperature) for episode in episodes]

    def _submit(self, episode: Episode, temperature: float, waiting: dict[int, Episode]) -> None:
        """Queue the next turn, or end the episode when its context has no room for one."""
        if episode.outcome is not None:
            return
        # A turn needs room for a token of content and its stop token.
        room = self._config.max_episode_tokens - len(episode.context)
        if room < 2:
            self._end(episode, Outcome(status="truncated", limit="context_full"))
            return
        request = Request(
            token_ids=episode.context,
            max_tokens=min(self._config.max_tokens_per_turn, room),
            temperature=temperature,
            stop_ids=self._format.stop_ids,
            seed=episode.spec.seed(self._run_seed, "turn", episode.turns),
            handle=episode.handle,
        )
        waiting[self._engine.submit(request)] = episode

    def _keep(self, episode: Episode, completion: Completion) -> None:
        episode.add_routes(completion)
        if episode.handle != completion.handle:
            self._release(episode)
        episode.handle = completion.handle

    def _release(self, episode: Episode) -> None:
        if episode.handle is not None:
            self._engine.release(episode.handle)
            episode.handle = None


@dataclass(frozen=True, slots=True)
class _Answer:
    """What an environment said to an action."""

    messages: tuple[Message, ...]
    ids: list[int]
    terminated: bool
    truncated: bool
    info: StepInfo


def _attach_routes(segments: Sequence[Segment], routes: np.ndarray) -> list[Segment]:
    """Cut the context's routes into segments; tokens that were never fed get ``NO_ROUTE``."""
    total = sum(len(s) for s in segments)
    padded = np.full((total, *routes.shape[1:]), NO_ROUTE, dtype=np.uint16)
    padded[: len(routes)] = routes
    ends = np.cumsum([len(s) for s in segments])
    return [
        replace(segment, routes=padded[end - len(segment) : end]) for segment, end in zip(segments, ends, strict=True)
    ]
