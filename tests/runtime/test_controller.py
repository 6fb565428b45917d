"""The controller with its buffer, ledger and event log on disk, and actors that are played: no model and no Ray."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from k3rl.buffer.ledger import Ledger
from k3rl.buffer.store import Store
from k3rl.config import RunConfig, load_config
from k3rl.errors import StarvedError, WeightSyncError
from k3rl.metrics import Max, Metrics
from k3rl.rollout.agent_loop import EpisodeSpec
from k3rl.runtime import actors as actors_module
from k3rl.runtime import controller as controller_module
from k3rl.runtime.actors import Actors
from k3rl.runtime.controller import Controller, Progress
from k3rl.runtime.event_log import check_order, read_events
from k3rl.trajectory import Outcome, PolicyVersion, Reward, Segment, Summary, Trajectory, summarise_trajectory
from k3rl.weights.base import LocalWeights

DEMO = load_config(Path(__file__).parents[2] / "configs" / "demo.yaml")


def trajectory(spec: EpisodeSpec, version: PolicyVersion, reward: float | None, payload: int = 1) -> Trajectory:
    """One turn of one token, the number of its retry, sampled by ``version``; its routes take ``payload`` bytes.

    Without a reward it is an episode that the environment failed before its first turn.
    """
    prompt = Segment(kind="prompt", token_ids=np.zeros(1, dtype=np.int32))
    if reward is None:
        failed = Outcome(status="failed", cause="env", detail="broken")
        return Trajectory(key=spec.key, task=spec.task, segments=(prompt,), outcome=failed)
    action = Segment(
        kind="action",
        token_ids=np.full(1, spec.seed_attempt, dtype=np.int32),
        context=0,
        follows=0,
        rollout_logprobs=np.zeros(1, dtype=np.float32),
        version_index=np.zeros(1, dtype=np.int32),
        routes=np.zeros((1, 1, (payload + 1) // 2), dtype=np.uint16),
        rewards=(Reward("outcome", reward), Reward("milestone", 0.0)),
    )
    return Trajectory(
        key=spec.key,
        task=spec.task,
        segments=(prompt, action),
        outcome=Outcome(status="completed"),
        versions=(version,),
    )


class Killed(BaseException):
    """Stands for kill -9 of the driver."""


class PlayedActors:
    """Answers at once; a rollout is of the weights that were published when it started."""

    def __init__(
        self, reward: Callable[[EpisodeSpec], float | None], payload: int = 1, kill_at: int | None = None
    ) -> None:
        self._reward = reward
        self._payload = payload
        self._version = PolicyVersion(incarnation=-1, step=-1, digest="")
        self._kill_at = kill_at
        self._step = 0
        self.calls: list[str] = []
        self.loaded: Any = None
        self.updates: dict[int, list[Trajectory]] = {}
        """What each step trained on, from its payload files."""
        self.watch: Callable[[Trajectory], None] = lambda t: None

    def ask_learner(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self._called(method)
        if method == "save":
            self.loaded = (kwargs["state"], kwargs["consumed"], ())
        if method == "load" and self.loaded is not None:
            self._step = self.loaded[0]["rl_step"]
        if method == "update":
            batch, folder = args
            self.updates[self._step] = Store(folder).read_all(batch)
        return {"load": self.loaded, "update": Metrics(), "formula": "", "save": "checkpoint"}.get(method)

    def start(self, method: str, specs: Sequence[EpisodeSpec], *args: Any) -> list[Any]:
        self._called(method)
        folder = next((a for a in args if isinstance(a, Path)), None)
        return [(specs, self._version, folder)]

    def collect(self, refs: Sequence[Any], what: str) -> list[Summary]:
        self._called("collect")
        summaries = []
        for specs, version, folder in refs:
            played = [trajectory(spec, version, self._reward(spec), self._payload) for spec in specs]
            for t in played:
                self.watch(t)
            uri, digest = Store(folder).write(played) if folder is not None and played else ("", "")
            components = ["outcome", "milestone"]
            summaries += [summarise_trajectory(t, components, uri=uri, digest=digest) for t in played]
        return sorted(summaries, key=lambda t: t.key)

    def play(self, method: str, specs: Sequence[EpisodeSpec], what: str, *args: Any) -> list[Summary]:
        return self.collect(self.start(method, specs), what)

    def publish(self, incarnation: int, step: int) -> PolicyVersion:
        self._called("publish")
        self._step = step
        self._version = PolicyVersion(incarnation=incarnation, step=step, digest=f"{incarnation}.{step}")
        return self._version

    def _called(self, method: str) -> None:
        self.calls.append(method)
        if len(self.calls) == self._kill_at:
            raise Killed


def config(folder: Path, **changes: Any) -> RunConfig:
    """RL alone, in two groups of four a step."""
    return dataclasses.replace(
        DEMO,
        run_root=str(folder),
        sft=dataclasses.replace(DEMO.sft, max_steps=0),
        rollout=dataclasses.replace(DEMO.rollout, groups_per_step=2, group_size=4),
        evaluation=dataclasses.replace(DEMO.evaluation, num_tasks=2, every=0),
        **changes,
    )


def start(monkeypatch: pytest.MonkeyPatch, run: RunConfig, actors: PlayedActors) -> Controller:
    monkeypatch.setattr(controller_module, "Actors", lambda config: actors)
    run.run_dir.mkdir(parents=True, exist_ok=True)
    controller = Controller(run)
    controller.start()
    return controller


def by_sample(spec: EpisodeSpec) -> float:
    return float(spec.key.sample % 2)


def test_b55_rewards_that_are_always_the_same_stop_the_run_after_exactly_ten_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    actors = PlayedActors(lambda spec: 0.0)
    controller = start(monkeypatch, config(tmp_path, steps=50), actors)
    with pytest.raises(StarvedError, match=r"in 10 steps in a row; dropped so far: \{'none_solved': 80\}"):
        controller.run()
    assert (actors.calls.count("rollout"), actors.calls.count("update")) == (10, 0)
    controller.close()


def test_b55_a_step_with_something_to_learn_from_begins_the_count_of_ten_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    actors = PlayedActors(lambda spec: by_sample(spec) if spec.key.ordinal // 2 == 6 else 0.0)
    controller = start(monkeypatch, config(tmp_path, steps=50), actors)
    with pytest.raises(StarvedError):
        controller.run()
    assert (actors.calls.count("rollout"), actors.calls.count("update")) == (7 + 10, 1)
    controller.close()


def test_b55_tasks_that_all_succeed_end_the_run_well_after_exactly_ten_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    actors = PlayedActors(lambda spec: 1.0)
    controller = start(monkeypatch, config(tmp_path, steps=50), actors)
    assert controller.run()["success_after_rl"] == 1.0
    # two more play the evaluation, sampled and greedy
    assert (actors.calls.count("rollout"), actors.calls.count("update")) == (10 + 2, 0)
    controller.close()


@pytest.mark.parametrize(("schedule", "ages"), [("synchronous", {0}), ("one_step_async", {0, 1})])
def test_b13_a_schedule_trains_on_every_group_that_it_issued_and_throws_none_away_for_its_age(
    schedule: Any, ages: set[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    actors = PlayedActors(by_sample)
    controller = start(monkeypatch, config(tmp_path, steps=12, schedule=schedule), actors)
    controller.run()
    assert [t.key.ordinal for batch in actors.updates.values() for t in batch[::4]] == list(range(24))
    found = {step - (t.oldest_step or 0) for step, batch in actors.updates.items() for t in batch}
    assert found == ages
    assert controller.buffer.ledger.counts().dropped == {}
    controller.close()


def test_b39_after_a_resume_the_engines_get_the_weights_that_were_loaded_before_the_first_rollout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = PlayedActors(by_sample)
    short = config(tmp_path, steps=4, checkpoint_every=2)
    controller = start(monkeypatch, short, first)
    controller.run()
    controller.close()
    second = PlayedActors(by_sample)
    second.loaded = first.loaded
    controller = start(monkeypatch, dataclasses.replace(short, steps=6), second)
    assert second.calls == ["claim", "load", "publish"]
    assert (controller.version.incarnation, controller.version.step) == (1, 4)
    controller.run()
    sampled_by = [{v for t in batch for v in t.versions} for batch in second.updates.values()]
    assert sampled_by == [{PolicyVersion(incarnation=1, step=s, digest=f"1.{s}")} for s in (4, 5)]
    controller.close()


@pytest.mark.parametrize("wrong", [[], ["rollout-1"], ["rollout-0", "rollout-2"]])
def test_b39_an_engine_that_serves_other_weights_than_the_learner_sent_is_named(
    wrong: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = PolicyVersion(incarnation=0, step=3, digest="sent")

    def make_actor(cls: type, run: RunConfig, *, name: str) -> Any:
        served = "old" if name in wrong else "sent"
        answers = {"update_weights": served, "publish": LocalWeights(version, {})}
        return SimpleNamespace(**{n: SimpleNamespace(remote=lambda *_, a=a: a) for n, a in answers.items()})

    monkeypatch.setattr(actors_module, "make_actor", make_actor)
    monkeypatch.setattr(actors_module, "wait_for", lambda refs, names, *_: refs)
    actors = Actors(dataclasses.replace(DEMO, rollout=dataclasses.replace(DEMO.rollout, num_workers=3)))
    if not wrong:
        assert actors.publish(0, 3) == version
        return
    with pytest.raises(WeightSyncError, match=f"^{', '.join(wrong)} received other weights .* at step 3"):
        actors.publish(0, 3)


class Forgetful(dict[int, list[Trajectory]]):
    """Keeps nothing."""

    def __setitem__(self, step: int, batch: list[Trajectory]) -> None:
        pass


@pytest.mark.parametrize("schedule", ["synchronous", "one_step_async"])
def test_b56_a_run_keeps_nothing_of_the_trajectories_that_it_has_trained_on(
    schedule: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    payload, early, late = 8 << 10, range(8, 12), range(20, 24)
    actors = PlayedActors(by_sample, payload)
    actors.updates = Forgetful()
    routes: dict[int, weakref.ref[Any]] = {}
    used: dict[int, tuple[int, int, int]] = {}
    oldest_alive: list[int] = []

    def watch(t: Trajectory) -> None:
        step, sample = t.key.ordinal // 2, (t.key.ordinal % 2, t.key.sample)
        if sample != (0, 0) or t.segments[1].routes is None:
            return
        routes[step] = weakref.ref(t.segments[1].routes)
        if step in early or step in late:
            gc.collect()
            oldest_alive.append(step - min(s for s, ref in routes.items() if ref() is not None))
            num_files = len(os.listdir("/proc/self/fd"))
            used[step] = (tracemalloc.get_traced_memory()[0], num_files, threading.active_count())

    actors.watch = watch
    controller = start(monkeypatch, config(tmp_path, steps=24, schedule=schedule), actors)
    tracemalloc.start()
    try:
        controller.run()
    finally:
        tracemalloc.stop()
        controller.close()
    assert max(oldest_alive) < 3
    # least of four steps: the writer of the curves opens its file now and then
    before, after = ([min(x) for x in zip(*(used[s] for s in steps), strict=True)] for steps in (early, late))
    assert after[0] - before[0] < 5 * payload  # of 96 payloads in between
    assert after[1:] == before[1:]


def flaky(spec: EpisodeSpec) -> float | None:
    """Every seventh sample is failed by its environment, once or for ever; some groups have no signal."""
    number = 4 * spec.key.ordinal + spec.key.sample
    if number % 7 == 3 and (number % 14 == 3 or spec.seed_attempt == 0):
        return None
    if spec.key.ordinal % 5 == 4:
        return 0.0
    return float((number * 2654435761 + spec.seed_attempt) >> 7 & 1)


def trained(actors: PlayedActors) -> dict[int, list[tuple[int, int, int]]]:
    """Ordinal, sample and number of the retry of what each step trained on."""
    return {
        step: [(t.key.ordinal, t.key.sample, int(t.segments[-1].token_ids[0])) for t in batch]
        for step, batch in actors.updates.items()
    }


@pytest.mark.parametrize("schedule", ["synchronous", "one_step_async"])
def test_l4_a_run_killed_anywhere_again_and_again_trains_on_the_same_samples(
    schedule: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = config(tmp_path / "whole", steps=9, schedule=schedule, checkpoint_every=2)
    whole = PlayedActors(flaky)
    controller = start(monkeypatch, run, whole)
    controller.run()
    controller.close()
    wanted, num_calls = trained(whole), len(whole.calls)
    assert sorted(wanted) == list(range(9))
    random = np.random.default_rng(0)
    for trial in range(8):
        run = dataclasses.replace(run, run_root=str(tmp_path / str(trial)))
        found: dict[int, list[tuple[int, int, int]]] = {}
        loaded, controllers, ended = None, 0, False
        while not ended:
            controllers += 1
            actors = PlayedActors(flaky, kill_at=int(random.integers(2, num_calls + 20)))
            actors.loaded = loaded
            monkeypatch.setattr(controller_module, "Actors", lambda config, actors=actors: actors)
            run.run_dir.mkdir(parents=True, exist_ok=True)
            controller = Controller(run)
            try:
                controller.start()
                controller.run()
                ended = True
            except Killed:
                pass
            finally:
                controller.close()
            loaded = actors.loaded
            found |= trained(actors)
        assert found == wanted
        check_whole(controller, run, controllers)


def check_whole(controller: Controller, run: RunConfig, controllers: int) -> None:
    """All laws hold, nothing is left open, and every start had an incarnation of its own."""
    ledger = Ledger(run.run_dir / "ledger.sqlite")
    ledger.check_laws()
    counts = ledger.counts()
    assert counts.by_state["issued"] == counts.by_state["sealed"] == counts.by_state["leased"] == 0
    ledger.close()
    events = read_events(run.run_dir / "events.jsonl")
    check_order(events)
    published = {e["incarnation"] for e in events if e["kind"] == "publish"}
    assert published <= set(range(controllers))
    assert controller.progress.incarnation == sum(e["kind"] == "restore" for e in events) - 1


@pytest.mark.parametrize("schedule", ["synchronous", "one_step_async"])
def test_a_run_that_ended_early_and_was_killed_in_its_evaluation_does_not_train_again(
    schedule: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = config(tmp_path, steps=50, schedule=schedule)
    first = PlayedActors(lambda spec: 1.0)
    controller = start(monkeypatch, run, first)
    controller._final = lambda: (_ for _ in ()).throw(Killed)  # type: ignore[method-assign]
    with pytest.raises(Killed):
        controller.run()
    controller.close()
    second = PlayedActors(lambda spec: 1.0)
    second.loaded = first.loaded
    controller = start(monkeypatch, run, second)
    controller.run()
    controller.close()
    assert controller.progress.rl_step == 10
    assert second.calls.count("update") == 0
    assert second.calls.count("rollout") == 2  # the evaluation
    dropped = {"all_solved": 80, "unused": 8} if schedule == "one_step_async" else {"all_solved": 80}
    ledger = Ledger(run.run_dir / "ledger.sqlite")
    assert ledger.counts().dropped == dropped
    ledger.close()


def test_the_gap_of_a_run_is_that_of_fresh_rollouts_and_a_nan_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gaps = iter([1e-6, float("nan"), 1e-5, 0.5])
    actors = PlayedActors(by_sample)
    answer = actors.ask_learner

    def ask(method: str, *args: Any, **kwargs: Any) -> Any:
        answered = answer(method, *args, **kwargs)
        return Metrics({"train/logprob_gap_max": Max(next(gaps))}) if method == "update" else answered

    actors.ask_learner = ask  # type: ignore[method-assign]
    controller = start(monkeypatch, config(tmp_path, steps=3), actors)
    summary = controller.run()
    controller.close()
    assert math.isnan(controller.progress.max_logprob_gap or 0.0)
    assert json.loads((tmp_path / "demo" / "summary.json").read_text())["max_logprob_gap"] == "nan"
    assert controller.progress.gap_steps == 3
    assert summary["trajectories"]["committed"] == 24
    resumed = Progress(**actors.loaded[0])
    assert math.isnan(resumed.max_logprob_gap or 0.0)


def test_a_lengthened_run_that_dies_before_it_saves_anything_is_still_longer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = PlayedActors(by_sample)
    short = config(tmp_path, steps=4, checkpoint_every=100)
    controller = start(monkeypatch, short, first)
    controller.run()
    controller.close()
    longer = dataclasses.replace(short, steps=10)
    for life in range(2):
        again = PlayedActors(by_sample)
        again.loaded = first.loaded
        controller = start(monkeypatch, longer, again)
        if life == 0:
            monkeypatch.setattr(controller, "_after_rl_step", lambda: (_ for _ in ()).throw(Killed))
            with pytest.raises(Killed):
                controller.run()
        else:
            controller.run()
            assert controller.progress.rl_step == 10
        controller.close()
