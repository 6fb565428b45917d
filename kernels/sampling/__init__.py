"""Sampling fused with the log-probability of what was picked."""

from k3rl.kernels.sampling.reference import sample_tokens

__all__ = ["sample_tokens"]
