"""Learning-rate schedule, as a pure function of the number of steps taken."""

from __future__ import annotations

import math

from k3rl.config import OptimizerConfig


def lr_factor(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Fraction of the peak rate at ``step`` (from 0): linear warm-up, then decay to ``final_lr_frac`` at the end."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay == "none":
        return 1.0
    span = max(total_steps - 1 - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / span, 1.0)
    shape = 1 - progress if config.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.final_lr_frac + (1 - config.final_lr_frac) * shape
