"""What the rollouts of one step say, each number with its own denominator."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from k3rl.errors import EnvError, K3rlError, RewardError
from k3rl.metrics import Metrics
from k3rl.rewards.compose import signal_reason, total_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k3rl.trajectory import Summary


def rollout_metrics(episodes: Sequence[Summary], weights: Mapping[str, float]) -> Metrics:
    """Metrics of what was sampled, before any group is dropped."""
    metrics = Metrics()
    for episode in episodes:
        total = total_of(episode, weights)
        metrics.mean("rollout/absent_frac", total is None)
        if total is not None:
            metrics.mean("rollout/reward", total)
        for name, value in episode.rewards.items():
            metrics.mean(f"rollout/reward/{name}/absent_frac", value is None)
            if value is not None:
                metrics.mean(f"rollout/reward/{name}", value)
        metrics.mean("rollout/turns", episode.num_turns)
        metrics.mean("rollout/action_tokens", episode.num_action_tokens)
        metrics.max("rollout/tokens_max", episode.num_tokens)
        for status in ("completed", "truncated", "failed"):
            metrics.mean(f"rollout/outcome/{status}_frac", episode.outcome.status == status)
        calls = episode.stats.get("tool_calls", 0.0)
        metrics.mean("rollout/invalid_call_frac", episode.stats.get("invalid_calls", 0.0), calls)
    by_group: dict[int, list[Summary]] = {}
    for episode in episodes:
        by_group.setdefault(episode.key.ordinal, []).append(episode)
    for name in (*weights, "total"):
        silent = sum(signal_reason(group, weights, name) is not None for group in by_group.values())
        metrics.sum(f"rollout/no_signal_groups/{name}", silent)
    return metrics


def check_failures(episodes: Sequence[Summary], weights: Mapping[str, float], max_failed_frac: float) -> None:
    """One failed episode or reward is data; when failing becomes the rule, raise with the commonest cause.

    Raises EnvError, or RewardError when most of what failed were reward functions that count.
    """
    causes: list[tuple[type[K3rlError], str]] = []
    for episode in episodes:
        errors = [text for name, text in episode.reward_errors.items() if weights.get(name)]
        if episode.outcome.is_infrastructure_failure:
            causes.append((EnvError, f"{episode.outcome.cause}: {episode.outcome.detail}"))
        elif errors:
            causes.append((RewardError, errors[0]))
    if len(causes) > max_failed_frac * len(episodes):
        (kind, cause), count = Counter(causes).most_common(1)[0]
        raise kind(
            f"{len(causes)} of {len(episodes)} episodes failed, more than rollout.max_failed_frac = "
            f"{max_failed_frac:g} allows; {count} of them with {cause}"
        )
