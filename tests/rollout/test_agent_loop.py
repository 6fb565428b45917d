"""The semantics that the docstring of the agent loop promises, on an engine that says what the test wants."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from k3rl.config import EnvironmentConfig
from k3rl.envs.base import AssistantAction, Message, ToolCall
from k3rl.envs.registry import make
from k3rl.errors import EngineError
from k3rl.objective import build_batch
from k3rl.rewards.base import evaluate
from k3rl.rewards.scoring import RECORDED
from k3rl.rollout.agent_loop import AgentLoop, EpisodeSpec
from k3rl.rollout.chat_format import ChatFormat, make_chat_format, make_tokenizer
from k3rl.rollout.demonstrations import DEMONSTRATOR, DemonstrationLoop
from k3rl.rollout.engine import Completion, Request
from k3rl.testing.environments import CountEnvironment
from k3rl.testing.scripted_engine import SCRIPTED, ScriptedEngine
from k3rl.trajectory import NO_ROUTE, Outcome, Reward, Task, Trajectory, TrajectoryKey, to_table

COUNT = "k3rl.testing.environments:CountEnvironment"
COIN = "k3rl.testing.environments:CoinEnvironment"
MORE = AssistantAction(calls=(ToolCall("more"),))


def _config(id: str = COUNT, **changes: Any) -> EnvironmentConfig:
    defaults: dict[str, Any] = {"max_turns": 6, "max_tokens_per_turn": 16, "max_episode_tokens": 400}
    return EnvironmentConfig(id=id, **{**defaults, **changes})


def _format(config: EnvironmentConfig, name: str = "compact") -> ChatFormat:
    env: Any = make(config.id, **config.options).unwrapped
    tools = env.tool_schemas
    return make_chat_format(name, make_tokenizer(name, env.template_words, [t["name"] for t in tools]), tools)


def _specs(count: int, start: int = 0) -> list[EpisodeSpec]:
    return [
        EpisodeSpec(key=TrajectoryKey(ordinal=i, sample=0), task=Task(environment="count", split="train", index=i))
        for i in range(start, start + count)
    ]


def _play(
    turns: Sequence[AssistantAction | Sequence[int]], count: int = 1, **changes: Any
) -> tuple[list[Trajectory], ScriptedEngine, ChatFormat]:
    """Play ``count`` episodes in which every policy takes the same turns: actions, or the very ids."""
    config = _config(**changes)
    chat_format = _format(config)
    asst = chat_format.tokenizer.marker("<|asst|>")
    scripted = [chat_format.render_action(t) if isinstance(t, AssistantAction) else list(t) for t in turns]

    def script(request: Request) -> list[int]:
        return scripted[list(request.token_ids).count(asst) - 1]

    engine = ScriptedEngine(script)
    CountEnvironment.closed.clear()
    trajectories = AgentLoop(engine, chat_format, config, run_seed=0).run(_specs(count), 1.0)
    assert engine.live_handles == set()
    return trajectories, engine, chat_format


def _ids(trajectory: Trajectory) -> list[int]:
    return np.concatenate([s.token_ids for s in trajectory.segments]).tolist()


def _outcome_rewards(trajectory: Trajectory) -> list[float | None]:
    return [r.value for s in trajectory.segments for r in s.rewards if r.name == "outcome"]


def test_b27_what_was_sampled_stands_in_the_trajectory_as_it_was_sampled() -> None:
    config = _config()
    chat_format = _format(config)
    # "more" spelt letter by letter: whoever renders the history again would write the whole word
    marker = chat_format.tokenizer.marker
    letters = [i for letter in "more" for i in chat_format.tokenizer.encode(letter)]
    spelt = [marker("<|call|>"), *letters, marker("<|end|>")]
    assert chat_format.render_action(MORE) != spelt
    (trajectory,), engine, _ = _play([spelt, spelt, AssistantAction(answer="2")])
    actions = [s for s in trajectory.segments if s.kind == "action"]
    assert [s.token_ids.tolist() for s in actions[:2]] == [spelt, spelt]
    assert _outcome_rewards(trajectory) == [1.0]
    ids = _ids(trajectory)
    for request in engine.requests:
        assert list(request.token_ids) == ids[: len(request.token_ids)]
    assert trajectory.num_action_tokens == 2 * len(spelt) + len(actions[2])
    for segment in actions:
        assert segment.rollout_logprobs is not None
        assert segment.rollout_logprobs.tolist() == [-float(i) for i in range(len(segment))]
    assert trajectory.versions == (SCRIPTED,)


@pytest.mark.parametrize("seed", range(8))
def test_b21_turns_that_tokenising_again_would_shorten_keep_ids_mask_and_logprobs_of_one_length(seed: int) -> None:
    rng = random.Random(seed)
    chat_format = _format(_config())
    marker, encode = chat_format.tokenizer.marker, chat_format.tokenizer.encode
    spelt = [i for letter in "more" for i in encode(letter)]
    assert len(encode("more")) < len(spelt)

    def call() -> list[int]:
        return [marker("<|call|>"), *rng.choice([spelt, spelt, encode("more")]), marker("<|end|>")]

    turns = [call() for _ in range(rng.randrange(1, 5))]
    answer = chat_format.render_action(AssistantAction(answer=str(len(turns))))
    (trajectory,), _, _ = _play([*turns, answer])
    assert _outcome_rewards(trajectory) == [1.0]
    batch = build_batch([trajectory], [np.zeros(len(trajectory.segments))])
    (sample,) = batch.samples
    assert sample.ids.tolist() == _ids(trajectory)
    targets = trajectory.num_tokens - 1
    assert (len(batch.action_mask), len(batch.rollout_logprobs)) == (targets, targets)
    assert sample.ids[1:][batch.action_mask].tolist() == [i for turn in [*turns, answer] for i in turn]
    logprobs = [-float(n) for turn in [*turns, answer] for n in range(len(turn))]
    assert batch.rollout_logprobs[batch.action_mask].tolist() == logprobs


def test_only_new_messages_are_rendered_and_each_turn_continues_its_handle() -> None:
    (trajectory,), engine, chat_format = _play([MORE, AssistantAction(answer="1")])
    prompt, _, observation, _ = trajectory.segments
    env: Any = make(COUNT)
    messages, _ = env.reset(options={"task": trajectory.task})
    assert prompt.token_ids.tolist() == chat_format.render_prompt(messages, env.tool_schemas)
    said = Message(role="tool", content="1", tool="more")
    assert observation.token_ids.tolist() == chat_format.render_observation([said])
    assert [s.kind for s in trajectory.segments] == ["prompt", "action", "observation", "action"]
    assert [s.context for s in trajectory.segments] == [None, 0, 1, 2]
    assert [r.handle for r in engine.requests] == [None, 0]
    assert len({r.seed for r in engine.requests}) == 2


def test_a_reward_sits_on_the_action_that_earned_it() -> None:
    (trajectory,), _, _ = _play([MORE, MORE, MORE, AssistantAction(answer="3")])
    earned = [s.rewards for s in trajectory.segments if s.kind == "action"]
    assert earned == [
        (Reward("milestone", 0.5),),
        (Reward("milestone", 0.5),),
        (Reward("milestone", 0.0),),
        (Reward("milestone", 0.0), Reward("outcome", 1.0)),
    ]
    assert all(s.rewards == () for s in trajectory.segments if s.kind != "action")
    assert trajectory.outcome == Outcome(status="completed")
    assert trajectory.stats == {"tool_calls": 3.0, "invalid_calls": 0.0, "milestones": 2.0}


def test_b23_a_turn_cut_by_its_length_truncates_the_episode_with_outcome_0() -> None:
    ids = _format(_config()).tokenizer.encode("more and more and more")
    (trajectory,), _, _ = _play([MORE, ids], max_tokens_per_turn=8)
    assert trajectory.outcome == Outcome(status="truncated", limit="turn_tokens")
    assert trajectory.segments[-1].stop_reason == "length"
    assert len(trajectory.segments[-1]) == 8
    assert _outcome_rewards(trajectory) == [0.0]
    assert trajectory.segments[1].rewards == (Reward("milestone", 0.5),)


@pytest.mark.parametrize("room", [0, 1])
def test_b23_a_context_without_room_for_a_turn_ends_the_episode_before_it(room: int) -> None:
    (whole,), _, _ = _play([MORE, AssistantAction(answer="1")])
    used = sum(len(s) for s in whole.segments[:3])
    (trajectory,), engine, _ = _play([MORE, AssistantAction(answer="1")], max_episode_tokens=used + room)
    assert trajectory.outcome == Outcome(status="truncated", limit="context_full")
    assert len(trajectory.segments) == 3
    assert len(engine.requests) == 1
    assert _outcome_rewards(trajectory) == [0.0]


def test_a_context_that_fills_up_within_a_turn_is_full_and_not_a_long_turn() -> None:
    (whole,), _, _ = _play([MORE, AssistantAction(answer="1")])
    used = sum(len(s) for s in whole.segments[:3])
    (trajectory,), _, _ = _play([MORE, AssistantAction(answer="1")], max_episode_tokens=used + 2)
    assert trajectory.outcome == Outcome(status="truncated", limit="context_full")
    assert trajectory.num_tokens == used + 2
    assert _outcome_rewards(trajectory) == [0.0]


def test_a_prompt_longer_than_the_context_is_a_truncated_episode_with_outcome_0() -> None:
    (trajectory,), engine, _ = _play([MORE], max_episode_tokens=3)
    assert trajectory.outcome == Outcome(status="truncated", limit="context_full")
    assert engine.requests == []
    assert trajectory.total_reward() == 0.0


def test_b19_the_last_turn_truncates_the_episode_and_its_observation_is_kept() -> None:
    (trajectory,), _, _ = _play([MORE, MORE, MORE], max_turns=2)
    assert trajectory.outcome == Outcome(status="truncated", limit="max_turns")
    assert trajectory.num_turns == 2
    assert trajectory.segments[-1].kind == "observation"
    assert _outcome_rewards(trajectory) == [0.0]
    assert trajectory.segments[-2].rewards == (Reward("milestone", 0.5), Reward("outcome", 0.0))


def test_the_environments_own_limit_truncates_too() -> None:
    (trajectory,), _, _ = _play([MORE, MORE, MORE], options={"limit": 2})
    assert trajectory.outcome == Outcome(status="truncated", limit="environment")
    assert _outcome_rewards(trajectory) == [0.0]


def test_an_answer_on_the_last_turn_completes_the_episode() -> None:
    (trajectory,), _, _ = _play([MORE, AssistantAction(answer="9")], max_turns=2)
    assert trajectory.outcome == Outcome(status="completed")
    assert _outcome_rewards(trajectory) == [0.0]


@pytest.mark.parametrize("fault", ["raise_reset", "raise_step", "exit_step", "no_info"])
def test_an_environment_that_breaks_fails_its_own_episode_only(fault: str) -> None:
    trajectories, _, _ = _play([MORE, AssistantAction(answer="1")], count=6, options={"fault": fault})
    for trajectory in trajectories[::2]:
        assert trajectory.outcome == Outcome(status="completed")
        assert _outcome_rewards(trajectory) == [1.0]
    for trajectory in trajectories[1::2]:
        assert (trajectory.outcome.status, trajectory.outcome.cause) == ("failed", "env")
        assert _outcome_rewards(trajectory) == []
    detail = {"exit_step": "SystemExit: 3", "no_info": "EnvError: step() gave no StepInfo as info['k3rl']"}.get(
        fault, f"OSError: {fault[6:]} broke"
    )
    assert trajectories[1].outcome.detail == detail
    assert sorted(CountEnvironment.closed) == list(range(6))


@pytest.mark.parametrize(("fault", "cause"), [("raise_grade", "grader"), ("lose_sandbox", "tool")])
def test_a_failure_has_the_cause_whose_boundary_it_crossed(fault: str, cause: str) -> None:
    trajectories, _, _ = _play([MORE, AssistantAction(answer="1")], count=2, options={"fault": fault})
    assert trajectories[0].outcome == Outcome(status="completed")
    assert (trajectories[1].outcome.status, trajectories[1].outcome.cause) == ("failed", cause)
    assert _outcome_rewards(trajectories[1]) == []


def test_an_environment_that_cannot_close_costs_nothing() -> None:
    trajectories, _, _ = _play([AssistantAction(answer="0")], count=4, options={"fault": "raise_close"})
    assert [_outcome_rewards(t) for t in trajectories] == [[1.0]] * 4


@pytest.mark.parametrize("where", ["reset", "step"])
def test_b55_environments_that_hang_fail_within_one_deadline_and_do_not_starve_the_others(where: str) -> None:
    begin = time.monotonic()
    options = {"fault": f"hang_{where}", "hang_s": 3.0}
    turns = [MORE, AssistantAction(answer="1")]
    trajectories, _, _ = _play(turns, count=80, options=options, step_timeout_s=0.3)
    # 40 of 80 hang, more than there are threads: two deadlines, where one after the other would take 40
    assert time.monotonic() - begin < 2.5
    for trajectory in trajectories[::2]:
        assert trajectory.outcome == Outcome(status="completed")
    for trajectory in trajectories[1::2]:
        assert trajectory.outcome.status == "failed"
        assert trajectory.outcome.detail == "TimeoutError: no answer within 0.3 s"
        assert _outcome_rewards(trajectory) == []
    assert sorted(CountEnvironment.closed) == list(range(80))


def test_b32_calls_of_unknown_tools_end_by_the_turn_limit() -> None:
    names = ["mor", "m" * 400, "", "grade", "__init__"]
    turns = [AssistantAction(calls=(ToolCall(name),)) for name in names]
    (trajectory,), _, chat_format = _play(turns, max_turns=5, max_tokens_per_turn=500, max_episode_tokens=2000)
    assert trajectory.outcome == Outcome(status="truncated", limit="max_turns")
    assert trajectory.num_turns == 5
    assert trajectory.stats["invalid_calls"] == 5
    assert _outcome_rewards(trajectory) == [0.0]
    for segment in trajectory.segments[2::2]:
        text = chat_format.tokenizer.decode(segment.token_ids.tolist())
        assert "error unknown_tool" in text
        assert "tools: more" in text
        assert segment.rollout_logprobs is None


def _delay(monkeypatch: pytest.MonkeyPatch, method: str, seconds_of_odd: float, seconds_of_even: float) -> None:
    """Make a method of the counting environment wait, by the index of its task."""
    original = getattr(CountEnvironment, method)

    def delayed(self: Any, *args: Any) -> Any:
        time.sleep(seconds_of_odd if self._index % 2 else seconds_of_even)
        return original(self, *args)

    monkeypatch.setattr(CountEnvironment, method, delayed)


def test_b59_scoring_has_the_time_of_a_step_however_long_the_rollout_took(monkeypatch: pytest.MonkeyPatch) -> None:
    _delay(monkeypatch, "more", 0.25, 0.25)
    _delay(monkeypatch, "grade", 0.25, 0.25)
    turns = [MORE, MORE, MORE, AssistantAction(answer="3")]
    (trajectory,), _, _ = _play(turns, step_timeout_s=0.8)
    assert trajectory.outcome == Outcome(status="completed")
    assert _outcome_rewards(trajectory) == [1.0]


def test_b59_a_hung_grader_leaves_its_reward_absent_in_time_and_the_loop_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _delay(monkeypatch, "grade", 3.0, 0.0)
    for _ in range(2):
        begin = time.monotonic()
        trajectories, _, _ = _play([AssistantAction(answer="0")], count=4, step_timeout_s=0.3)
        assert time.monotonic() - begin < 0.3 + 1.5
        assert [_outcome_rewards(t) for t in trajectories] == [[1.0], [], [1.0], []]
        assert [t.outcome.status for t in trajectories[1::2]] == ["failed"] * 2
        entries = [evaluate("outcome", RECORDED["outcome"], t) for t in trajectories[1::2]]
        assert [e[-1] for e in entries] == [Reward.absent("outcome", "env")] * 2


def test_text_that_is_no_action_is_an_observation_and_not_an_end() -> None:
    chat_format = _format(_config())
    garbage = [*chat_format.tokenizer.encode("hm"), *chat_format.stop_ids]
    (trajectory,), _, _ = _play([garbage, AssistantAction(answer="0")])
    assert trajectory.outcome == Outcome(status="completed")
    assert trajectory.stats["invalid_calls"] == 1
    assert "error malformed" in chat_format.tokenizer.decode(trajectory.segments[2].token_ids.tolist())


def test_routes_go_to_their_segments_and_tokens_never_fed_have_none() -> None:
    (trajectory,), _, _ = _play([MORE, MORE, AssistantAction(answer="2")])
    routes = [s.routes for s in trajectory.segments]
    assert all(r is not None and len(r) == len(s) for r, s in zip(routes, trajectory.segments, strict=True))
    joined = np.concatenate([r for r in routes if r is not None])[:, 0, 0]
    assert joined[:-1].tolist() == list(range(trajectory.num_tokens - 1))
    assert joined[-1] == NO_ROUTE
    (cut,), _, _ = _play([MORE, MORE], max_turns=1)
    fed = len(cut.segments[0]) + len(cut.segments[1]) - 1
    assert [int(r) for s in cut.segments if s.routes is not None for r in s.routes[:, 0, 0]] == [
        *range(fed),
        *[int(NO_ROUTE)] * (cut.num_tokens - fed),
    ]


def test_an_engine_that_forgets_its_handles_gives_the_same_trajectory() -> None:
    turns = [MORE, MORE, AssistantAction(answer="2")]
    (wanted,), _, chat_format = _play(turns)
    asst, scripted = chat_format.tokenizer.marker("<|asst|>"), [chat_format.render_action(t) for t in turns]
    engine = ScriptedEngine(lambda r: scripted[list(r.token_ids).count(asst) - 1], forgetful=True)
    (found,) = AgentLoop(engine, chat_format, _config(), run_seed=0).run(_specs(1), 1.0)
    assert to_table([found]).equals(to_table([wanted]))
    assert len({r.handle for r in engine.requests}) == 3
    assert engine.live_handles == set()


class _BreaksInStep(ScriptedEngine):
    """Breaks in its third step, with some requests waiting and some contexts kept."""

    steps = 0

    def step(self) -> list[Completion]:
        self.steps += 1
        if self.steps == 3:
            raise EngineError("broken")
        return super().step()


def test_an_engine_that_breaks_is_left_empty_and_the_environments_are_closed() -> None:
    config = _config()
    chat_format = _format(config)
    engine = _BreaksInStep(lambda request: chat_format.render_action(MORE))
    CountEnvironment.closed.clear()
    with pytest.raises(EngineError, match="broken"):
        AgentLoop(engine, chat_format, config, run_seed=0).run(_specs(3), 1.0)
    assert sorted(CountEnvironment.closed) == [0, 1, 2]
    assert len(engine.requests) == 9
    assert engine.live_handles == set()
    assert engine.num_queued == 0


def test_a_finished_episode_leaves_the_engine_before_the_others_end() -> None:
    config = _config()
    chat_format = _format(config)
    live: list[int] = []

    def script(request: Request) -> list[int]:
        live.append(len(engine.live_handles))
        is_short = chat_format.tokenizer.decode(request.token_ids).startswith("<|user|>count 0")
        return chat_format.render_action(AssistantAction(answer="0") if is_short else MORE)

    engine = ScriptedEngine(script)
    AgentLoop(engine, chat_format, config, run_seed=0).run(_specs(2), 1.0)
    assert live[2:] == [1] * (len(live) - 2)


def test_b36_seeds_differ_by_turn_sample_and_attempt_and_repeat_by_run_seed() -> None:
    config = _config()
    chat_format = _format(config)

    def seeds(run_seed: int, attempt: int = 0) -> list[int]:
        engine = ScriptedEngine(lambda request: chat_format.render_action(MORE))
        task = Task(environment="count", split="train", index=0)
        specs = [
            EpisodeSpec(key=TrajectoryKey(ordinal=0, sample=i, attempt=attempt), task=task, seed_attempt=attempt)
            for i in range(8)
        ]
        AgentLoop(engine, chat_format, config, run_seed=run_seed).run(specs, 1.0)
        return [r.seed for r in engine.requests]

    first = seeds(0)
    assert len(set(first)) == 8 * config.max_turns
    assert seeds(0) == first
    assert not set(first) & set(seeds(1))
    assert not set(first) & set(seeds(0, attempt=1))


@pytest.fixture
def shop_histories(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Message]]:
    """What each shop has said so far, by its question."""
    from k3rl.envs.tasks.shop.environment import ShopEnvironment

    histories: dict[str, list[Message]] = {}
    reset, step = ShopEnvironment.reset, ShopEnvironment.step

    def listening_reset(self: Any, **kwargs: Any) -> Any:
        observation, info = reset(self, **kwargs)
        self.question = observation[0].content
        histories[self.question] = list(observation)
        return observation, info

    def listening_step(self: Any, action: AssistantAction) -> Any:
        answer = step(self, action)
        histories[self.question] += answer[0]
        return answer

    monkeypatch.setattr(ShopEnvironment, "reset", listening_reset)
    monkeypatch.setattr(ShopEnvironment, "step", listening_step)
    return histories


@pytest.mark.parametrize("name", ["compact", "xtml"])
def test_the_shops_expert_solves_every_task_through_tokens(name: str, shop_histories: dict[str, list[Message]]) -> None:
    config = _config("k3rl/Shop-v0", max_turns=8, max_tokens_per_turn=200, max_episode_tokens=6000)
    chat_format = _format(config, name)
    env: Any = make(config.id).unwrapped

    def script(request: Request) -> list[int]:
        text = chat_format.tokenizer.decode(request.token_ids)
        question = max((q for q in shop_histories if q in text), key=len)
        return chat_format.render_action(env.expert().act(shop_histories[question]))

    loop = AgentLoop(ScriptedEngine(script), chat_format, config, run_seed=0)
    trajectories = loop.run(_specs(12), 1.0)
    assert [t.outcome.status for t in trajectories] == ["completed"] * 12
    assert [_outcome_rewards(t) for t in trajectories] == [[1.0]] * 12
    assert sum(t.stats["invalid_calls"] for t in trajectories) == 0


def _replay(demonstration: Trajectory, chat_format: ChatFormat, config: EnvironmentConfig) -> Trajectory:
    actions = iter([s.token_ids.tolist() for s in demonstration.segments if s.kind == "action"])
    loop = AgentLoop(ScriptedEngine(lambda request: next(actions)), chat_format, config, run_seed=0)
    (trajectory,) = loop.run([EpisodeSpec(key=demonstration.key, task=demonstration.task)], 1.0)
    return trajectory


@pytest.mark.parametrize("name", ["compact", "xtml"])
@pytest.mark.parametrize("changes", [{}, {"max_turns": 2}])
def test_demonstrations_are_what_the_agent_loop_would_have_recorded(name: str, changes: dict[str, Any]) -> None:
    defaults: dict[str, Any] = {"max_turns": 8, "max_tokens_per_turn": 200, "max_episode_tokens": 6000}
    config = _config("k3rl/Shop-v0", **{**defaults, **changes})
    chat_format = _format(config, name)
    for demonstration in DemonstrationLoop(chat_format, config, run_seed=0).run(_specs(8)):
        replayed = _replay(demonstration, chat_format, config)
        assert demonstration.outcome == replayed.outcome
        assert demonstration.task == replayed.task
        assert len(demonstration.segments) == len(replayed.segments)
        for mine, theirs in zip(demonstration.segments, replayed.segments, strict=True):
            assert mine.token_ids.tolist() == theirs.token_ids.tolist()
            for field in ("kind", "context", "follows", "stop_reason", "rewards"):
                assert getattr(mine, field) == getattr(theirs, field)
        assert demonstration.versions == (DEMONSTRATOR,)


def test_demonstrations_succeed_about_as_often_as_the_demonstrator_does() -> None:
    config = _config(COIN)
    demonstrations = DemonstrationLoop(_format(config), config, run_seed=0).run(_specs(400))
    rate = np.mean([d.total_reward(["outcome"]) or 0.0 for d in demonstrations])
    assert 0.42 < rate < 0.58
    again = DemonstrationLoop(_format(config), config, run_seed=0).run(_specs(400))
    assert [_ids(d) for d in again] == [_ids(d) for d in demonstrations]
    other = DemonstrationLoop(_format(config), config, run_seed=1).run(_specs(400))
    assert [_ids(d) for d in other] != [_ids(d) for d in demonstrations]


@pytest.mark.parametrize("fault", ["raise_reset", "raise_step", "exit_step", "hang_step", "no_info"])
def test_a_demonstration_that_breaks_fails_its_own_episode_only(fault: str) -> None:
    config = _config(options={"fault": fault, "hang_s": 3.0}, step_timeout_s=0.5)
    demonstrations = DemonstrationLoop(_format(config), config, run_seed=0).run(_specs(4))
    assert [d.outcome.status for d in demonstrations] == ["completed", "failed", "completed", "failed"]
    assert {d.outcome.cause for d in demonstrations[1::2]} == {"env"}
