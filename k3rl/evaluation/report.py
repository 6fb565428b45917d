"""What an evaluation says: success with its uncertainty, and how the episodes went."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from k3rl.errors import EnvError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3rl.trajectory import Summary


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
            "valid calls": f"{self.valid_call_frac:.3f}" if self.tool_calls else "-",
            "tokens": f"{self.sampled_tokens:.0f}",
            "cut": f"{self.truncated_frac:.2f}",
            **({"failed": str(self.num_failed)} if self.num_failed else {}),
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


def report(episodes: Sequence[Summary]) -> EvaluationReport:
    """Pool episodes into one report. Raises EnvError when not one of them was scored: that is no success rate of 0."""
    scored = [e for e in episodes if e.rewards["outcome"] is not None]
    if not scored:
        details = sorted({e.outcome.detail for e in episodes if e.outcome.detail})
        raise EnvError(f"not one of {len(episodes)} episodes was scored; {'; '.join(details[:3]) or 'no detail'}")
    successes = sum((e.rewards["outcome"] or 0.0) >= 1.0 for e in scored)
    low, high = wilson_interval(successes, len(scored))
    n = len(scored)
    calls = sum(e.stats.get("tool_calls", 0.0) for e in scored)
    invalid = sum(e.stats.get("invalid_calls", 0.0) for e in scored)
    return EvaluationReport(
        num_tasks=len(episodes),
        num_failed=len(episodes) - len(scored),
        success=successes / n,
        success_low=low,
        success_high=high,
        turns=sum(e.num_turns for e in scored) / n,
        tool_calls=calls / n,
        valid_call_frac=(calls - invalid) / calls if calls else 1.0,
        sampled_tokens=sum(e.num_action_tokens for e in scored) / n,
        truncated_frac=sum(e.outcome.status == "truncated" for e in scored) / n,
    )
