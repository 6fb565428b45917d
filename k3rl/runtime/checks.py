"""What a configuration must fulfil before a run starts; ``train``, ``train --dry-run``, ``eval`` and ``doctor`` ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3rl.errors import ConfigError

if TYPE_CHECKING:
    from k3rl.config import RunConfig


def check_runnable(config: RunConfig) -> None:
    """Raise ConfigError naming the key that keeps ``config`` from running. Takes a second and starts nothing."""
    check_objective(config)
    check_environment_id(config)
    check_vocabulary(config)


def check_objective(config: RunConfig) -> str:
    """Return the resolved objective, as a formula; ConfigError when the model lacks what it needs."""
    from k3rl.objective import resolve

    objective = resolve(config.objective, horizon=config.environment.max_episode_tokens)
    if objective.needs_value and not config.model.value_head:
        raise ConfigError(
            f"objective.preset: {config.objective.preset!r} needs a value head; set model.value_head: true"
        )
    if objective.needs_reference:
        raise ConfigError("objective.kl_coef: a KL term needs a reference policy, which a run does not keep")
    return objective.formula()


def check_environment_id(config: RunConfig) -> None:
    """Make the environment once; ConfigError when its id is unknown or it does not take its options."""
    from k3rl.envs.registry import make

    try:
        make(config.environment.id, **config.environment.options).close()
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"environment.options: {config.environment.id} does not take them: {error}") from error


def check_vocabulary(config: RunConfig) -> str:
    """Return how many token ids the chat format uses; ConfigError when the model has fewer."""
    from k3rl.rollout.chat_format import build_chat_format

    size = build_chat_format(config).tokenizer.vocab_size
    if size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size: {config.model.vocab_size} is too small, chat format {config.chat_format!r} with "
            f"{config.environment.id} needs {size} token ids"
        )
    return f"{config.chat_format}, {size} of {config.model.vocab_size} token ids used"
