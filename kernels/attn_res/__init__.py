"""Block attention residuals."""

from k3rl.kernels.attn_res.reference import attn_res_mix

__all__ = ["attn_res_mix"]
