import math
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from k3rl.envs.base import SPLITS, AssistantAction, Message, ParseError, ToolCall
from k3rl.envs.calculator import CalculatorError, calculate
from k3rl.envs.checks import check_environment
from k3rl.envs.play import play
from k3rl.envs.registry import make
from k3rl.envs.schema import ArgumentError, coerce
from k3rl.envs.tools import ToolEnvironment, tool
from k3rl.errors import EnvError, UnknownEnvironmentError
from k3rl.trajectory import Task

IDS = ("k3rl/Shop-v0", "k3rl/Arithmetic-v0")


def task(index: int, split: str = "train") -> Task:
    return Task(environment=IDS[0], split=split, index=index)


def call(name: str, /, **arguments: object) -> AssistantAction:
    return AssistantAction(calls=(ToolCall(name=name, arguments=arguments),))


@pytest.mark.parametrize("id", IDS)
def test_environment_conforms(id: str) -> None:
    check_environment(id)


@pytest.mark.parametrize("id", IDS)
def test_gymnasium_checks_pass(id: str) -> None:
    env = make(id).unwrapped
    check_env(env, skip_render_check=True)
    env.close()


def test_shop_expert_solves_every_task_and_reaches_every_milestone() -> None:
    env = make(IDS[0])
    for i in range(200):
        episode = play(env, None, task(i))
        assert episode.total("outcome") == 1.0
        assert math.isclose(episode.total("milestone"), 1.0)
    env.close()


def test_shop_demonstrator_succeeds_about_half_of_the_time() -> None:
    env: Any = make(IDS[0])
    wins = 0.0
    for i in range(2000):
        wins += play(env, env.unwrapped.demonstrator(np.random.default_rng(i)), task(i)).total("outcome")
    env.close()
    assert 0.42 < wins / 2000 < 0.55


def test_a_shop_in_use_has_a_real_file_and_leaves_nothing_behind_if_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    env: Any = make(IDS[0]).unwrapped
    env.reset(options={"task": task(0)})
    env.step(call("find", name="bokip"))
    (_, _, path) = env._db.execute("PRAGMA database_list").fetchone()
    assert path.startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    env.close()


def test_asked_names_of_splits_are_disjoint() -> None:
    env = make(IDS[0])
    names = {}
    for split in SPLITS:
        questions = [env.reset(options={"task": task(i, split)})[0][0].content.split() for i in range(500)]
        names[split] = {w[2] if w[0] == "order" else w[-1] for w in questions}
    env.close()
    assert not names["train"] & names["test"]
    assert not names["train"] & names["validation"]
    assert not names["test"] & names["validation"]


@pytest.mark.parametrize("name", ["calc_gsm8k_rewrd", "", "__init__", "n" * 10**6, "reset", "grade"])
def test_b32_unknown_tool_is_an_observation_with_the_names(name: str) -> None:
    env = make(IDS[0])
    env.reset(options={"task": task(0)})
    for _ in range(5):
        (message,), reward, terminated, truncated, info = env.step(call(name))
        assert message.content.startswith("error unknown_tool")
        assert "find, price, stock, calc, order" in message.content
        assert len(message.content) < 200
        assert (reward, terminated, truncated, info["k3rl"].invalid_calls) == (0.0, False, False, 1)
    env.close()


def test_bad_arguments_and_unparsable_text_are_observations() -> None:
    env = make(IDS[0])
    env.reset(options={"task": task(0)})
    actions = [call("find"), call("find", name=None), call("find", name="a", other=1), AssistantAction()]
    actions.append(AssistantAction(error=ParseError(kind="malformed", message="no", text="x")))
    kinds = [env.step(a)[0][0].content.split()[1] for a in actions]
    assert kinds == ["bad_arguments"] * 3 + ["empty_action", "malformed"]
    assert "name" in env.step(call("find"))[0][0].content
    env.close()


@pytest.mark.parametrize(
    ("value", "types", "right"),
    [
        ("007", ("integer", "string"), "007"),
        ("42", ("integer", "string"), "42"),
        ("true", ("boolean", "string"), "true"),
        ("1.50", ("string", "number"), "1.50"),
        (1, ("integer", "boolean"), 1),
        (1, ("boolean",), True),
        ("42", ("integer",), 42),
        (None, ("integer", "null"), None),
        ("2026-01-15", ("integer",), "2026-01-15"),
        (True, ("integer",), True),
    ],
)
def test_b30_coercion_loses_nothing(value: object, types: tuple[str, ...], right: object) -> None:
    found = coerce("n", value, types)
    assert found == right
    assert type(found) is type(right)


@pytest.mark.parametrize("value", [math.inf, math.nan, "1e400", [math.nan]])
def test_b30_non_finite_numbers_are_refused_by_name(value: object) -> None:
    with pytest.raises(ArgumentError, match=r"^n: "):
        coerce("n", value, ("number",))


@pytest.mark.parametrize("seed", range(100))
def test_b20_interleaved_episodes_do_not_share_state(seed: int) -> None:
    rng = random.Random(seed)
    alone = make(IDS[0])
    episodes = [play(alone, None, task(seed * 3 + i)) for i in range(3)]
    envs = [make(IDS[0]) for _ in range(3)]
    for i, env in enumerate(envs):
        env.reset(options={"task": task(seed * 3 + i)})
    order = [i for i in range(3) for _ in episodes[i].actions]
    rng.shuffle(order)
    at = [0, 0, 0]
    for i in order:
        assert envs[i].step(episodes[i].actions[at[i]])[-1]["k3rl"] == episodes[i].infos[at[i]]
        at[i] += 1
    for env in (alone, *envs):
        env.close()


class Notebook(ToolEnvironment):
    """Write files and list them; right is who lists what was asked for."""

    name = "notebook"

    def start(self, task: Task, rng: np.random.Generator) -> tuple[Message, ...]:
        self.files = self.new_files()
        return (Message(role="user", content=f"write {task.split} {task.index}"),)

    def new_files(self) -> list[str]:
        return []

    def grade(self, answer: str) -> float:
        return float(sorted(self.files) == sorted(answer.split()))

    def expert(self) -> "Writer":
        return Writer()

    @tool
    def write(self, name: str) -> str:
        """Write a file."""
        self.files.append(name)
        return " ".join(self.files)


class Writer:
    """Writes two files of its task, then answers with their names."""

    def act(self, history: Sequence[Message]) -> AssistantAction:
        names = [f"{'_'.join(history[0].content.split())}_{n}" for n in range(2)]
        turn = sum(m.role == "tool" for m in history)
        return call("write", name=names[turn]) if turn < 2 else AssistantAction(answer=" ".join(names))


class SharedDefault(Notebook):
    """A state that is a mutable default: one list for all instances and episodes."""

    def new_files(self, files: list[str] = []) -> list[str]:  # noqa: B006 - the fault
        return files


class SharedBetweenRunning(Notebook):
    """Begins every episode afresh, so that only episodes that overlap see each other."""

    files: ClassVar[list[str]] = []  # type: ignore[misc]

    def new_files(self) -> list[str]:
        self.files.clear()
        return self.files


class SharedListing(Notebook):
    """Shows the files of all episodes that overlap, and grades each by its own."""

    listing: ClassVar[list[str]] = []

    def new_files(self) -> list[str]:
        self.listing.clear()
        return []

    @tool
    def write(self, name: str) -> str:
        """Write a file."""
        super().write(name)
        self.listing.append(name)
        return " ".join(self.listing)


def test_an_environment_that_shares_nothing_conforms() -> None:
    check_environment(f"{__name__}:Notebook")


class Instructed(Notebook):
    """Says the same to everybody first."""

    def start(self, task: Task, rng: np.random.Generator) -> tuple[Message, ...]:
        return (Message(role="system", content="Use the tool."), *super().start(task, rng))

    def expert(self) -> "InstructedWriter":
        return InstructedWriter()


class InstructedWriter(Writer):
    """The same, behind the system message."""

    def act(self, history: Sequence[Message]) -> AssistantAction:
        return super().act(history[1:])


def test_splits_are_told_apart_by_all_that_is_said_before_an_answer() -> None:
    check_environment(f"{__name__}:Instructed")


class SharedScore(Notebook):
    """Shows each episode its own files, and grades it by those of all that overlap."""

    scored: ClassVar[list[str]] = []

    def new_files(self) -> list[str]:
        self.scored.clear()
        return []

    def grade(self, answer: str) -> float:
        self.scored.extend(self.files)
        return float(sorted(self.scored) == sorted(answer.split()))


@pytest.mark.parametrize("environment", [SharedDefault, SharedBetweenRunning, SharedListing, SharedScore])
def test_b20_the_conformance_check_notices_a_state_that_episodes_share(environment: type) -> None:
    with pytest.raises((EnvError, AssertionError), match=r"instances share state|observations are not equivalent"):
        check_environment(f"{__name__}:{environment.__name__}")


@pytest.mark.parametrize("seed", range(100))
def test_b20_of_two_overlapping_episodes_neither_sees_the_files_or_takes_the_reward_of_the_other(seed: int) -> None:
    rng = random.Random(seed)
    envs = [make(f"{__name__}:Notebook") for _ in range(2)]
    histories = [list(env.reset(options={"task": task(i)})[0]) for i, env in enumerate(envs)]
    rewards: list[float] = [-1.0, -1.0]
    order = [0] * 3 + [1] * 3
    rng.shuffle(order)
    for i in order:
        observation, reward, *_ = envs[i].step(Writer().act(histories[i]))
        rewards[i] = float(reward)
        histories[i] += observation
        if len(histories[i]) == 2:
            assert histories[i][1].content == f"write_train_{i}_0"
    assert rewards == [1.0, 1.0]


def test_stepping_a_finished_episode_is_an_error() -> None:
    env = make(IDS[0])
    env.reset(options={"task": task(0)})
    assert env.step(AssistantAction(answer="x"))[2]
    with pytest.raises(EnvError, match="reset"):
        env.step(AssistantAction(answer="x"))
    env.close()


def test_unknown_id_lists_near_ones() -> None:
    with pytest.raises(UnknownEnvironmentError, match="k3rl/Shop-v0"):
        make("k3rl/Shpo-v0")
    with pytest.raises(UnknownEnvironmentError):
        make("no.such.module:Thing")
    assert isinstance(make("k3rl.envs.tasks.shop:ShopEnvironment"), gymnasium.Env)


@pytest.mark.parametrize("text", ["__import__('os')", "9**9**9", "1/0", "", "(" * 150, "1e999", "'a'*9", "(-8)**0.5"])
def test_calculator_refuses_what_is_no_small_arithmetic(text: str) -> None:
    with pytest.raises(CalculatorError):
        calculate(text)


def test_calculator_gives_whole_numbers_without_a_point() -> None:
    assert [calculate(t) for t in ("3*45", "6/2", "1/4", "-(2**5)")] == ["135", "3", "0.25", "-32"]


@pytest.mark.parametrize("dataset", ["chain_sum", "basic_arithmetic", "products", "leg_counting"])
def test_arithmetic_is_solved_through_the_calculator(dataset: str) -> None:
    env: Any = make("k3rl/Arithmetic-v0", datasets=[dataset])
    for i in range(40):
        episode = play(env, None, Task(environment="arithmetic", split="test", index=i))
        assert episode.total("outcome") == 1.0
        assert [len(action.calls) for action in episode.actions] == [1, 0]
    env.close()


def test_arithmetic_demonstrator_succeeds_about_as_often_as_it_does_not_guess() -> None:
    env: Any = make("k3rl/Arithmetic-v0", datasets=["chain_sum"], slips={"guess": 0.5})
    wins = 0.0
    for i in range(400):
        at = Task(environment="arithmetic", split="train", index=i)
        env.reset(options={"task": at})
        wins += play(env, env.demonstrator(np.random.default_rng(i)), at).total("outcome")
    env.close()
    assert 0.42 < wins / 400 < 0.6
