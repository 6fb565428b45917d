"""What an evaluation says: success with its uncertainty, and how the episodes went."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from k3rl.errors import EnvError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3rl.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReport:
    """Pooled over the episodes of one evaluation. Episodes that the infrastructure failed are counted apart."""

    num_tasks: int
    num_failed: int
    success: float
    """Share of scored episodes with outcome reward at least 1."""
    success_low: float
    success_high: float
    """95 % Wilson interval of ``success``."""
    turns: float
    tool_calls: float
    valid_call_frac: float
    """Share of tool calls that named a tool and gave it arguments of the right type."""
    sampled_tokens: float
    truncated_frac: float

    def row(self) -> dict[str, str]:
        """The report as columns; with a name of 16 characters they fit into 80."""
        return {
            "success": f"{self.success:.3f}",
            "95 %": f"{self.success_low:.2f}-{self.success_high:.2f}",
            "turns": f"{self.turns:.2f}",
            "valid calls": f"{self.valid_call_frac:.3f}",
            "tokens": f"{self.sampled_tokens:.0f}",
            "cut": f"{self.truncated_frac:.2f}",
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return asdict(self)


def wilson_interval(successes: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """Confidence interval of a proportion (Wilson 1927); (0, 1) when there is nothing to go by."""
    if total == 0:
        return 0.0, 1.0
    p = successes / total
    scale = 1 + z * z / total
    centre = (p + z * z / (2 * total)) / scale
    half = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def summarise(trajectories: Sequence[Trajectory]) -> EvaluationReport:
    """Pool episodes into one report. Raises EnvError when not one of them was scored: that is no success rate of 0."""
    scored = [t for t in trajectories if t.total_reward(["outcome"]) is not None]
    if not scored:
        details = sorted({t.outcome.detail for t in trajectories if t.outcome.detail})
        raise EnvError(f"not one of {len(trajectories)} episodes was scored; {'; '.join(details[:3]) or 'no detail'}")
    successes = sum((t.total_reward(["outcome"]) or 0.0) >= 1.0 for t in scored)
    low, high = wilson_interval(successes, len(scored))
    n = max(1, len(scored))
    calls = sum(t.stats.get("tool_calls", 0.0) for t in scored)
    invalid = sum(t.stats.get("invalid_calls", 0.0) for t in scored)
    return EvaluationReport(
        num_tasks=len(trajectories),
        num_failed=len(trajectories) - len(scored),
        success=successes / n,
        success_low=low,
        success_high=high,
        turns=sum(t.num_turns for t in scored) / n,
        tool_calls=calls / n,
        valid_call_frac=(calls - invalid) / calls if calls else 1.0,
        sampled_tokens=sum(t.num_action_tokens for t in scored) / n,
        truncated_frac=sum(t.outcome.status == "truncated" for t in scored) / n,
    )
