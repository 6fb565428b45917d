"""Kimi Delta Attention: gate, short convolution, token recurrence and its tiled form."""

from k3rl.kernels.kda.reference import (
    conv_decode,
    conv_plan,
    kda_decode,
    kda_gate,
    kda_recurrent,
    kda_softplus_gate,
    kda_tiles,
    l2norm,
    short_conv,
)

__all__ = [
    "conv_decode",
    "conv_plan",
    "kda_decode",
    "kda_gate",
    "kda_recurrent",
    "kda_softplus_gate",
    "kda_tiles",
    "l2norm",
    "short_conv",
]
