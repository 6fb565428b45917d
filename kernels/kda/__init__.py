"""Kimi Delta Attention: gate, short convolution, token recurrence and its tiled form."""

from k3rl.kernels.kda.chunk import TilePlan, kda_chunk
from k3rl.kernels.kda.reference import (
    conv_decode,
    conv_plan,
    join_spans,
    kda_decode,
    kda_gate,
    kda_packed,
    kda_recurrent,
    kda_softplus_gate,
    kda_span,
    kda_tiles,
    l2norm,
    short_conv,
)

__all__ = [
    "TilePlan",
    "conv_decode",
    "conv_plan",
    "join_spans",
    "kda_chunk",
    "kda_decode",
    "kda_gate",
    "kda_packed",
    "kda_recurrent",
    "kda_softplus_gate",
    "kda_span",
    "kda_tiles",
    "l2norm",
    "short_conv",
]
