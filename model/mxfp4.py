"""MXFP4: 4-bit floats (E2M1) that share one power-of-two scale (E8M0) per 32 columns, as OCP's MX specification has it.

A byte holds two codes, that of the even column in its low half; bit 3 of a code is the sign, the rest the magnitude.
"""

from __future__ import annotations

from typing import Any

import torch

from k3rl.config import MXFP4_BLOCK as BLOCK

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_BIAS = 127


def unpack_mxfp4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values [..., C] of codes [..., C / 2] and scales [..., C / 32], both uint8. Exact in bfloat16 and float32."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).unflatten(-1, (scale.shape[-1], BLOCK))
    return _values(codes.long(), scale.to(torch.int32).unsqueeze(-1) - SCALE_BIAS, dtype)


def pack_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest codes and scales of ``weight`` [..., C], C a multiple of 32; ties go to the code that is even.

    The scale is the smallest power of two of which the largest value is less than 7, which rounds to 6: a larger one
    would give the same largest value and coarser others. So the largest becomes 4 or 6, and what :func:`unpack_mxfp4`
    gave of such blocks comes back bit for bit, except that zeros lose their sign and a block of zeros its scale. Raises
    ValueError for values that are not finite.
    """
    codes, exponent = _nearest(weight)
    pairs = codes.flatten(-2).unflatten(-1, (-1, 2)).to(torch.uint8)
    return pairs[..., 0] | pairs[..., 1] << 4, (exponent + SCALE_BIAS).squeeze(-1).to(torch.uint8)


def round_mxfp4(weight: torch.Tensor) -> torch.Tensor:
    """What :func:`unpack_mxfp4` makes of the packed ``weight`` [..., C], in its dtype; refuses the same.

    The gradient is that of the identity (https://arxiv.org/abs/1308.3432), for every value: none is clipped, since a
    block's scale follows its largest value, which rounding moves by a fifth at most.
    """
    return _StraightThrough.apply(weight)  # type: ignore[no-any-return]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _values(*_nearest(weight), weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


def _nearest(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., C / 32, 32] int64 and exponents [..., C / 32, 1] int32 of the scales."""
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"MXFP4 needs a multiple of {BLOCK} columns, got {weight.shape[-1]}")
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    if not bool(largest.isfinite().all()):
        raise ValueError("MXFP4 has no code for a value that is not finite")
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa 2^exponent, mantissa in [0.5, 1)
    exponent = torch.where(8 * mantissa < 7, exponent - 3, exponent - 2).clamp(-SCALE_BIAS, SCALE_BIAS)
    exponent = torch.where(largest == 0, -SCALE_BIAS, exponent)
    size = torch.ldexp(blocks.abs(), -exponent)
    # Between neighbours of the table; at exactly halfway the even code wins.
    table = torch.tensor(MAGNITUDES, device=weight.device)
    middle = (table[1:] + table[:-1]) / 2
    low, high = torch.bucketize(size, middle, right=False), torch.bucketize(size, middle, right=True)
    return torch.where(low % 2 == 0, low, high) | ((blocks < 0) & (low > 0)).long() << 3, exponent


def _values(codes: torch.Tensor, exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values [..., C] of what :func:`_nearest` gives."""
    table = torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)], dtype=torch.float32, device=codes.device)
    return torch.ldexp(table[codes], exponent).flatten(-2).to(dtype)
