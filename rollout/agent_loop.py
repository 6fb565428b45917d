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

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from k3rl.envs.registry import make
from k3rl.rollout.engine import Completion, Request
from k3rl.trajectory import (
    NO_ROUTE,
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
    from collections.abc import Callable, Sequence

    from k3rl.config import EnvironmentConfig
    from k3rl.envs.base import Message, StepInfo
    from k3rl.rollout.chat_format import ChatFormat
    from k3rl.rollout.engine import Engine

_POOL_THREADS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSpec:
    """One episode to play."""

    key: TrajectoryKey
    task: Task
    seed_attempt: int = 0
    """Whose random stream to use. Work that a crash lost is repeated with its stream; a retry takes a new one."""

    def seed(self, run_seed: int, *purpose: object) -> int:
        """Seed of this episode for ``purpose``."""
        return replace(self.key, attempt=self.seed_attempt).seed(run_seed, *purpose)


@dataclass(slots=True)
class _Episode:
    """An episode in progress; becomes a Trajectory when ``outcome`` is set."""

    spec: EpisodeSpec
    env: Any
    segments: list[Segment] = field(default_factory=list)
    context: list[int] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)
    handle: int | None = None
    turns: int = 0
    outcome: Outcome | None = None

    def append(self, kind: SegmentKind, token_ids: Sequence[int] | np.ndarray, **fields: Any) -> None:
        last = len(self.segments) - 1 if self.segments else None
        ids = np.asarray(token_ids, dtype=np.int32)
        self.segments.append(Segment(kind=kind, token_ids=ids, context=last, follows=last, **fields))
        self.context += ids.tolist()

    def reward_last_action(self, rewards: Sequence[Reward]) -> None:
        for i in reversed(range(len(self.segments))):
            if self.segments[i].kind == "action":
                self.segments[i] = replace(self.segments[i], rewards=self.segments[i].rewards + tuple(rewards))
                return

    def count(self, info: StepInfo) -> None:
        for name in ("tool_calls", "invalid_calls"):
            self.stats[name] = self.stats.get(name, 0.0) + getattr(info, name)
        self.stats["milestones"] = self.stats.get("milestones", 0.0) + len(info.milestones)


class AgentLoop:
    """Plays episodes of one environment on one engine."""

    def __init__(self, engine: Engine, chat_format: ChatFormat, config: EnvironmentConfig, run_seed: int) -> None:
        self._engine = engine
        self._format = chat_format
        self._config = config
        self._run_seed = run_seed
        self._pool = ThreadPoolExecutor(_POOL_THREADS, thread_name_prefix="k3rl-env")

    def run(self, specs: Sequence[EpisodeSpec], temperature: float) -> list[Trajectory]:
        """Play every episode to its end and return the trajectories in the order of ``specs``."""
        episodes = self._start(specs)
        waiting: dict[int, _Episode] = {}
        for episode in episodes:
            self._submit(episode, temperature, waiting)
        while waiting:
            completions = self._engine.step()
            ended = [(waiting.pop(c.request), c) for c in completions]
            for episode in self._take_turns(ended):
                self._submit(episode, temperature, waiting)
        return [self._finish(episode, temperature) for episode in episodes]

    def _start(self, specs: Sequence[EpisodeSpec]) -> list[_Episode]:
        def start(spec: EpisodeSpec) -> tuple[Any, tuple[Message, ...]]:
            env = make(self._config.id, **self._config.options)
            observation, _ = env.reset(options={"task": spec.task})
            return env, observation

        episodes = []
        for spec, result in self._with_deadline([(spec, lambda s=spec: start(s)) for spec in specs]):
            if isinstance(result, Exception):
                episode = _Episode(spec=spec, env=None)
                episode.outcome = Outcome(status="failed", cause="env", detail=_describe(result))
            else:
                env, observation = result
                episode = _Episode(spec=spec, env=env)
                episode.append("prompt", self._format.render_prompt(observation, env.unwrapped.tool_schemas))
            episodes.append(episode)
        return episodes

    def _submit(self, episode: _Episode, temperature: float, waiting: dict[int, _Episode]) -> None:
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

    def _take_turns(self, ended: list[tuple[_Episode, Completion]]) -> list[_Episode]:
        """Record what was sampled, let the environments answer, and return the episodes that go on."""
        acting: list[tuple[_Episode, Callable[[], Any]]] = []
        for episode, completion in ended:
            self._record_action(episode, completion)
            if completion.stop_reason == "length":
                is_full = len(episode.context) >= self._config.max_episode_tokens
                self._end(episode, Outcome(status="truncated", limit="context_full" if is_full else "turn_tokens"))
            else:
                action = self._format.parse_action(completion.token_ids.tolist())
                acting.append((episode, lambda e=episode, a=action: e.env.step(a)))
        going_on = []
        for episode, result in self._with_deadline(acting):
            if isinstance(result, Exception):
                self._end(episode, Outcome(status="failed", cause="env", detail=_describe(result)))
            else:
                self._observe(episode, result)
            if episode.outcome is None:
                going_on.append(episode)
        return going_on

    def _record_action(self, episode: _Episode, completion: Completion) -> None:
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
        episode.handle = completion.handle
        episode.turns += 1

    def _observe(self, episode: _Episode, result: tuple[Any, ...]) -> None:
        observation, _, terminated, truncated, info = result
        episode.count(info["k3rl"])
        episode.reward_last_action(info["k3rl"].rewards)
        if terminated:
            self._end(episode, Outcome(status="completed"))
            return
        # Appended even when the episode ends here: the value of this state is what a truncated return bootstraps from.
        episode.append("observation", self._format.render_observation(observation))
        if truncated:
            self._end(episode, Outcome(status="truncated", limit="environment"))
        elif episode.turns >= self._config.max_turns:
            self._end(episode, Outcome(status="truncated", limit="max_turns"))
        elif len(episode.context) >= self._config.max_episode_tokens:
            self._end(episode, Outcome(status="truncated", limit="context_full"))

    def _end(self, episode: _Episode, outcome: Outcome) -> None:
        episode.outcome = outcome
        graded = any(r.name == "outcome" for s in episode.segments for r in s.rewards)
        if outcome.status == "truncated" and not graded:
            episode.reward_last_action([Reward("outcome", 0.0)])

    def _finish(self, episode: _Episode, temperature: float) -> Trajectory:
        assert episode.outcome is not None
        segments = episode.segments
        if episode.handle is not None:
            routes = self._engine.routes(episode.handle)
            self._engine.release(episode.handle)
            if routes is not None:
                segments = _attach_routes(segments, routes)
        if episode.env is not None:
            episode.env.close()
        return Trajectory(
            key=episode.spec.key,
            task=episode.spec.task,
            segments=tuple(segments),
            outcome=episode.outcome,
            versions=tuple(episode.versions),
            temperature=temperature or 1.0,
            stats=episode.stats,
        )

    def _with_deadline(self, calls: list[tuple[Any, Callable[[], Any]]]) -> list[tuple[Any, Any]]:
        """Run environment code in threads; a call's result is what it returned, or the exception that it cost."""
        futures: list[tuple[Any, Future[Any]]] = [(owner, self._pool.submit(call)) for owner, call in calls]
        results: list[tuple[Any, Any]] = []
        for owner, future in futures:
            try:
                results.append((owner, future.result(timeout=self._config.step_timeout_s)))
            except FutureTimeoutError:
                # The thread cannot be killed; a fresh pool keeps hung ones from starving the other episodes.
                self._pool.shutdown(wait=False, cancel_futures=False)
                self._pool = ThreadPoolExecutor(_POOL_THREADS, thread_name_prefix="k3rl-env")
                results.append((owner, TimeoutError(f"no answer within {self._config.step_timeout_s} s")))
            except Exception as error:
                # Whatever an environment raises is that episode's outcome, with its text kept.
                results.append((owner, error))
        return results


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _attach_routes(segments: Sequence[Segment], routes: np.ndarray) -> list[Segment]:
    """Cut the context's routes into segments; tokens that were never fed get ``NO_ROUTE``."""
    total = sum(len(s) for s in segments)
    padded = np.full((total, *routes.shape[1:]), NO_ROUTE, dtype=np.uint16)
    padded[: len(routes)] = routes
    ends = np.cumsum([len(s) for s in segments])
    return [
        replace(segment, routes=padded[end - len(segment) : end]) for segment, end in zip(segments, ends, strict=True)
    ]
