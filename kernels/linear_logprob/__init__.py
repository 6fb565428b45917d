"""Log-probability of targets under a linear head."""

from k3rl.kernels.linear_logprob.reference import linear_logprob

__all__ = ["linear_logprob"]
