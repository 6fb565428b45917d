"""Routing, experts and Quantile Balancing."""

from k3rl.kernels.moe.reference import (
    apply_experts,
    combine_slots,
    expert_load,
    load_quantile_update,
    qb_histogram,
    qb_update,
    qb_update_exact,
    required_bias,
    route,
    router_scores,
)

__all__ = [
    "apply_experts",
    "combine_slots",
    "expert_load",
    "load_quantile_update",
    "qb_histogram",
    "qb_update",
    "qb_update_exact",
    "required_bias",
    "route",
    "router_scores",
]
