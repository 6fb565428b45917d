"""Monitors of what a policy does inside, from the sums that its forward passes report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from k3rl.metrics import Metrics


def policy_metrics(stats: Sequence[Mapping[str, torch.Tensor]]) -> Metrics:
    """Metrics of some forward passes, from their ``ForwardOutput.stats``; nothing for a model without experts.

    ``moe/load_max_over_mean`` is that of the worst layer; ``moe/load_cv`` (deviation over mean), ``moe/idle_frac`` and
    ``moe/utilisation_entropy`` (of the loads, as a share of log E) are means over layers; ``moe/routing_entropy`` is in
    nats, a mean over tokens and layers.
    """
    metrics = Metrics()
    parts = [part for part in stats if "moe_load" in part]
    if not parts:
        return metrics
    load_LE = torch.stack([part["moe_load"].cpu() for part in parts]).sum(0).double()
    mean_L = load_LE.mean(-1)
    share_LE = load_LE / load_LE.sum(-1, keepdim=True).clamp(min=1)
    layers, experts = load_LE.shape
    metrics.max("moe/load_max_over_mean", float((load_LE.amax(-1) / mean_L).max()))
    metrics.mean("moe/load_cv", float((load_LE.std(-1, correction=0) / mean_L).sum()), layers)
    metrics.mean("moe/idle_frac", float((load_LE == 0).sum()), layers * experts)
    entropy = -torch.xlogy(share_LE, share_LE).sum() / math.log(experts)
    metrics.mean("moe/utilisation_entropy", float(entropy), layers)
    tokens = sum(float(part["tokens"]) for part in parts)
    metrics.mean("moe/routing_entropy", sum(float(p["moe_routing_entropy"].sum()) for p in parts), tokens * layers)
    return metrics
