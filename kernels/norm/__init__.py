"""Root-mean-square normalisation."""

from k3rl.kernels.norm.reference import rms_norm

__all__ = ["rms_norm"]
