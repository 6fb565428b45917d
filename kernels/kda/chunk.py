"""KDA over packed sequences: the host's part, and the choice between Triton and reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from k3rl.kernels.common import choose_backend, refuse
from k3rl.kernels.kda.reference import TILE, kda_packed

WIDTHS = (16, 32, 64, 128)
# Of the choices tried on an H200 at T=8192 H=64 and T=32768 H=16 the fastest for both.
PREPARE = {"block_k": 32, "warps": 1}
INVERT = {"blocks": 8, "warps": 4}
SCAN = {"block_v": 64, "warps": 4, "stages": 4}


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Where the tiles of packed sequences lie; layers of one forward share it. Made without waiting for the device."""

    cu_seqlens: torch.Tensor  # [N + 1] int64
    first_tiles: torch.Tensor  # [N + 1] int64, number of the first tile of each sequence
    sequences: torch.Tensor  # [tiles] int64 sequence of each tile; N for numbers that are left over

    @staticmethod
    def make(cu_seqlens: torch.Tensor, num_rows: int) -> TilePlan:
        """Plan sequences ``cu_seqlens`` [N + 1] of together ``num_rows`` rows."""
        cu_seqlens = cu_seqlens.to(torch.int64)
        tiles = (cu_seqlens.diff() + TILE - 1) // TILE
        first = torch.nn.functional.pad(tiles.cumsum(0), (1, 0))
        # At most so many tiles, whatever the lengths: each sequence ends in one that is not full.
        numbers = torch.arange(num_rows // TILE + len(tiles), device=cu_seqlens.device)
        return TilePlan(cu_seqlens, first, torch.searchsorted(first[1:], numbers, right=True))


def kda_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    plan: TilePlan,
    initial_state: torch.Tensor | None = None,
    num_tiles_N: torch.Tensor | None = None,
    lower_bound: float = -5.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """KDA of packed sequences with the norm of q and k, the gate and beta inside.

    On a CPU, or where a gradient is wanted, it is the reference; else Triton. A row's output depends, bit by bit, on
    the rows up to it alone.

    Args:
        q: [T, H, K] after convolution and SiLU, not normalised, not scaled.
        k: [T, H, K], likewise.
        v: [T, H, V].
        z: [T, H, K] the gate's input, see :func:`kda_gate`.
        b: [T, H] beta before its sigmoid.
        A_log: [H] float32.
        dt_bias: [H, K] float32.
        plan: of the sequences.
        initial_state: [N, H, K, V] float32, zero if None.
        num_tiles_N: [N] the returned state of sequence n is that after so many tiles of 16 rows; None: after all rows.
        lower_bound: of the log decay, in (-5.8, 0).

    Returns:
        Outputs [T, H, V] in v's type and the state [N, H, K, V] float32.
    """
    if not -5.8 < lower_bound < 0:
        raise ValueError(f"lower_bound must lie in (-5.8, 0), got {lower_bound}")
    tensors: list[Any] = [q, k, v, z, b, A_log, dt_bias, initial_state]
    if choose_backend(q) == "reference" or (torch.is_grad_enabled() and any(_wants_grad(x) for x in tensors)):
        return kda_packed(
            q,
            k,
            v,
            z,
            b,
            A_log,
            dt_bias,
            cu_seqlens=plan.cu_seqlens,
            initial_state=initial_state,
            num_tiles_N=num_tiles_N,
            lower_bound=lower_bound,
        )
    return _forward(q, k, v, z, b, A_log, dt_bias, plan, initial_state, num_tiles_N, lower_bound)


def _wants_grad(x: torch.Tensor | None) -> bool:
    return x is not None and x.requires_grad


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, b: torch.Tensor) -> None:
    rows, heads, width = q.shape
    if width not in WIDTHS or v.shape[-1] not in WIDTHS:
        raise refuse("kda_chunk", "(K, V)", (width, v.shape[-1]), f"each one of {WIDTHS}")
    wanted = (q.shape, q.shape, (rows, heads, v.shape[-1]), (rows, heads))
    for name, x, want in zip("kzvb", (k, z, v, b), wanted, strict=True):
        if x.shape != want:
            raise ValueError(f"kda_chunk: {name} must be {tuple(want)} beside q {tuple(q.shape)}, got {tuple(x.shape)}")
    for name, x in zip("qkvzb", (q, k, v, z, b), strict=True):
        if x.dtype not in (torch.bfloat16, torch.float32):
            raise refuse("kda_chunk", f"{name}'s type", x.dtype, "bfloat16 and float32")
    if q.dtype != v.dtype:
        raise refuse("kda_chunk", "v's type", v.dtype, f"q's, {q.dtype}")


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    plan: TilePlan,
    initial_state: torch.Tensor | None,
    num_tiles_N: torch.Tensor | None,
    lower_bound: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    # Lazily: a machine without Triton runs the reference.
    from k3rl.kernels.kda.kernel import invert_kernel, prepare_kernel, scan_kernel

    _check(q, k, v, z, b)
    q, k, v, z, b = (x.contiguous() for x in (q, k, v, z, b))
    heads, key, value = q.shape[1], q.shape[2], v.shape[2]
    num, tiles = len(plan.cu_seqlens) - 1, len(plan.sequences)
    exact = "ieee" if q.dtype == torch.float32 else "bf16x3"
    wide = q.new_empty(3, tiles, heads, TILE, key)
    square = q.new_empty(2, tiles, heads, TILE, TILE)
    end, lower, beta = (
        q.new_empty(tiles, heads, *shape, dtype=torch.float32) for shape in ((key,), (TILE, TILE), (TILE,))
    )
    out = torch.empty_like(v)
    final = q.new_empty(num, heads, key, value, dtype=torch.float32)
    prepare: Any = prepare_kernel
    prepare[(tiles * heads,)](
        q, k, z, b, A_log.float().contiguous(), dt_bias.float().contiguous(),
        plan.cu_seqlens, plan.first_tiles, plan.sequences,
        wide[0], wide[1], wide[2], lower, beta, square[1], end, num, key**-0.5, lower_bound,
        H=heads, K=key, BK=min(PREPARE["block_k"], key), EXACT=exact, num_warps=PREPARE["warps"],
    )  # fmt: skip
    invert: Any = invert_kernel
    invert[(-(-tiles * heads // INVERT["blocks"]),)](
        lower, beta, square[0], plan.first_tiles, num, H=heads, BLOCKS=INVERT["blocks"], num_warps=INVERT["warps"]
    )
    block_v = min(SCAN["block_v"], value)
    scan: Any = scan_kernel
    scan[(num * heads * (value // block_v),)](
        v, wide[0], wide[1], wide[2], square[0], square[1], end, out,
        final if initial_state is None else initial_state.float().contiguous(), final,
        plan.first_tiles.diff() if num_tiles_N is None else num_tiles_N.to(torch.int64),
        plan.cu_seqlens, plan.first_tiles,
        H=heads, K=key, V=value, BV=block_v, EXACT=exact, STAGES=SCAN["stages"], INITIAL=initial_state is not None,
        num_warps=SCAN["warps"],
    )  # fmt: skip
    return out, final
