"""What a configuration must fulfil before a run starts; ``train``, ``train --dry-run``, ``eval`` and ``doctor`` ask."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3rl.config import RunConfig
from k3rl.envs.registry import make
from k3rl.errors import CheckpointError, ConfigError
from k3rl.objective import resolve
from k3rl.rollout.chat_format import build_chat_format, vocabulary_of
from k3rl.rollout.deadline import call_all
from k3rl.rollout.scoring import Scorer
from k3rl.trajectory import Task
from k3rl.weights.checkpoint import list_checkpoints
from k3rl.weights.source import open_source

if TYPE_CHECKING:
    from k3rl.config import JobConfig


def check_runnable(config: RunConfig) -> None:
    """Raise ConfigError naming the key that keeps ``config`` from running. Takes a second and starts nothing."""
    check_objective(config)
    Scorer(config)
    check_environment_id(config)
    check_vocabulary(config)
    check_first_task(config)


def check_trains(config: RunConfig) -> None:
    """Raise ConfigError when a job of ``config`` would do nothing."""
    if not config.steps and not config.sft.max_steps:
        raise ConfigError("steps: both steps and sft.max_steps are 0, so there is nothing to do")


def check_objective(config: RunConfig) -> str:
    """Return the resolved objective, as a formula; ConfigError when the model lacks what it needs."""
    objective = resolve(config.objective, horizon=config.environment.max_episode_tokens)
    if objective.needs_value and not config.model.value_head:
        raise ConfigError(
            f"objective.preset: {config.objective.preset!r} needs a value head; set model.value_head: true"
        )
    if "group" in objective.needs and config.rollout.group_size < 2:
        raise ConfigError(
            f"rollout.group_size: {config.objective.preset!r} compares the samples of a task; it must be at least 2"
        )
    if objective.advantage == "teacher":
        raise ConfigError("objective.preset: a run keeps no teacher to learn from, only the policy that RL began with")
    return objective.formula()


def check_environment_id(config: RunConfig) -> None:
    """Make the environment once; ConfigError when its id is unknown or it does not take its options."""
    at = config.environment
    (result,) = call_all([lambda: make(at.id, **at.options).close()], at.step_timeout_s)
    if isinstance(result, TypeError | ValueError):
        raise ConfigError(f"environment.options: {at.id} does not take them: {result}") from result
    if isinstance(result, TimeoutError):
        raise ConfigError(f"environment.id: {at.id} was not made within {at.step_timeout_s:g} s (step_timeout_s)")
    if isinstance(result, BaseException):
        raise result


def check_vocabulary(config: JobConfig) -> str:
    """Return how many token ids the chat format uses; ConfigError when the model has fewer."""
    size = build_chat_format(config).tokenizer.vocab_size
    if size > config.model.vocab_size:
        where = f" with {config.environment.id}" if isinstance(config, RunConfig) else ""
        raise ConfigError(
            f"model.vocab_size: {config.model.vocab_size} is too small, chat format {config.chat_format!r}{where} "
            f"needs {size} token ids"
        )
    return f"{config.chat_format}, {size} of {config.model.vocab_size} token ids used"


def check_source(config: JobConfig) -> None:
    """Raise ConfigError when the weights to start from are of another model or vocabulary, or not there.

    A run that has a checkpoint does not need them any more.
    """
    if config.init_from is not None and not list_checkpoints(config.run_dir / "checkpoints"):
        try:
            open_source(Path(config.init_from)).require(config.model, vocabulary_of(config))
        except CheckpointError as error:
            raise ConfigError(f"init_from: {error}") from error


def check_first_task(config: RunConfig) -> str:
    """Start one task and return how long its prompt is; ConfigError when no episode could be played or scored."""

    def start() -> tuple[bool, list[int]]:
        env: Any = make(config.environment.id, **config.environment.options).unwrapped
        try:
            observation, _ = env.reset(
                options={"task": Task(environment=config.environment.id, split="train", index=0)}
            )
            has_milestones = not hasattr(env, "milestone_names") or bool(env.milestone_names())
            return has_milestones, build_chat_format(config).render_prompt(observation, env.tool_schemas)
        finally:
            env.close()

    (started,) = call_all([start], config.environment.step_timeout_s)
    if isinstance(started, BaseException):  # whatever a stranger's environment raises
        raise ConfigError(
            f"environment.id: {config.environment.id} cannot start a task: {type(started).__name__}: {started}"
        ) from started
    has_milestones, prompt = started
    if config.rewards.get("milestone") and not has_milestones:
        raise ConfigError(f"rewards.milestone: tasks of {config.environment.id} have no milestones")
    room = config.environment.max_episode_tokens - len(prompt)
    if room < 2:
        raise ConfigError(
            f"environment.max_episode_tokens: {config.environment.max_episode_tokens} leaves no room for a turn, the "
            f"prompt of the first task takes {len(prompt)}"
        )
    return f"the first prompt takes {len(prompt)} of {config.environment.max_episode_tokens} tokens"
