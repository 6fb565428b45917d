"""Optimisers and their schedule."""

from __future__ import annotations

from typing import Any

import torch

from k3rl.config import OptimizerConfig
from k3rl.learner.optim.muon import Muon, orthogonalise
from k3rl.learner.optim.schedule import lr_factor
from k3rl.learner.policy import Policy

__all__ = ["Muon", "build_optimizer", "lr_factor", "orthogonalise"]

NOT_MATRICES = ("embed", "lm_head", "conv", "value_head")
"""Parts of a name that send a parameter of two or more dimensions to Adam: its rows are look-ups, taps or outputs."""
BETAS = (0.9, 0.98)


def build_optimizer(policy: Policy, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make the optimiser over every parameter that requires a gradient.

    Weight decay is decoupled and leaves vectors (norms, biases, gates) alone. ``policy.muon_blocks()`` says into how
    many row blocks Muon cuts a projection. The rate in the groups is the peak; the learner sets the scheduled one
    before each step.
    """
    named = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
    vectors = [p for _, p in named if not _is_matrix(p)]
    if config.name == "adamw":
        groups = [
            {"params": [p for _, p in named if _is_matrix(p)], "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=BETAS)
    blocks = policy.muon_blocks()
    matrices = [(n, p) for n, p in named if _is_matrix(p) and not any(part in n for part in NOT_MATRICES)]
    inside = {id(p) for _, p in matrices}
    tables = [p for _, p in named if _is_matrix(p) and id(p) not in inside]
    muon_groups: list[dict[str, Any]] = [
        {
            "params": [p for _, p in matrices],
            "algorithm": "muon",
            "blocks": [blocks.get(n, 1) for n, _ in matrices],
            "weight_decay": config.weight_decay,
        },
        {"params": tables, "algorithm": "adam", "weight_decay": config.weight_decay},
        {"params": vectors, "algorithm": "adam", "weight_decay": 0.0},
    ]
    return Muon([g for g in muon_groups if g["params"]], lr=config.lr, betas=BETAS)


def _is_matrix(parameter: torch.Tensor) -> bool:
    """A single row (an attention-residual query, a value head) is a vector, however it is stored."""
    return parameter.ndim >= 2 and parameter.shape[-2] > 1
