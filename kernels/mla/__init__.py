"""Multi-head latent attention without positions."""

from k3rl.kernels.mla.reference import mla_absorbed, mla_expanded, mla_weights

__all__ = ["mla_absorbed", "mla_expanded", "mla_weights"]
