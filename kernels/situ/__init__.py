"""Gated activations."""

from k3rl.kernels.situ.reference import situ_glu, swiglu

__all__ = ["situ_glu", "swiglu"]
