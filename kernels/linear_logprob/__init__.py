"""Log-probability of targets under a linear head."""

from k3rl.kernels.linear_logprob.reference import head_logits, linear_logprob

__all__ = ["head_logits", "linear_logprob"]
