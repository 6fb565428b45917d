"""KDA over packed sequences: the host's part, and the choice between Triton and reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from k3rl.kernels.common import choose_backend, refuse
from k3rl.kernels.kda.reference import TILE, kda_packed

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTHS = (16, 32, 64, 128)
# Of the choices tried on an H200 at T=8192 H=64 and T=32768 H=16 the fastest for both.
PREPARE = {"block_k": 32, "warps": 1}
INVERT = {"blocks": 8, "warps": 4}
SCAN = {"block_v": 64, "warps": 4, "stages": 4}
GROUP = 4
"""Tiles from one state that the forward keeps for the backward to the next."""
REVERSE = {"block_v": 64, "warps": 4, "stages": 4}
FACTORS = {"block_k": 64, "warps": 4, "stages": 1}
FINISH = {"block_k": 16, "warps": 1}


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Where the tiles of packed sequences lie; layers of one forward share it. Made without waiting for the device."""

    cu_seqlens: torch.Tensor  # [N + 1] int64
    first_tiles: torch.Tensor  # [N + 1] int64, number of the first tile of each sequence
    sequences: torch.Tensor  # [tiles] int64 sequence of each tile; N for numbers that are left over
    first_groups: torch.Tensor  # [N + 1] int64, number of the first group of tiles of each sequence
    groups: torch.Tensor  # [groups] int64 sequence of each group, as in sequences

    @staticmethod
    def make(cu_seqlens: torch.Tensor, num_rows: int) -> TilePlan:
        """Plan sequences ``cu_seqlens`` [N + 1] of together ``num_rows`` rows."""
        cu_seqlens = cu_seqlens.to(torch.int64)
        firsts, owners = [], []
        for rows in (TILE, GROUP * TILE):
            counts = (cu_seqlens.diff() + rows - 1) // rows
            firsts.append(torch.nn.functional.pad(counts.cumsum(0), (1, 0)))
            # At most so many, whatever the lengths: each sequence ends in one that is not full.
            numbers = torch.arange(num_rows // rows + len(counts), device=cu_seqlens.device)
            owners.append(torch.searchsorted(firsts[-1][1:], numbers, right=True))
        return TilePlan(cu_seqlens, firsts[0], owners[0], firsts[1], owners[1])


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

    On a CPU it is the reference, on a GPU Triton, its gradient too. A row's output depends, bit by bit, on the rows up
    to it alone, and a sequence's outputs and gradients on no other sequence.

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
    if choose_backend(q) == "reference":
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
    _check(q, k, v, z, b)
    if lower_bound < -5.4:
        # Sixteen rows of it, one more than the reference's, leave float32's range.
        raise refuse("kda_chunk", "lower_bound", lower_bound, "-5.4 and above")
    q, k, v, z, b = (x.contiguous() for x in (q, k, v, z, b))
    tensors = (q, k, v, z, b, A_log, dt_bias, initial_state)
    stops = plan.first_tiles.diff() if num_tiles_N is None else num_tiles_N.to(torch.int64)
    if torch.is_grad_enabled() and any(_wants_grad(x) for x in tensors):
        return _Kda.apply(*tensors, plan, stops, lower_bound)
    out, final, *_ = _forward(*tensors, plan, stops, lower_bound, save=False)
    return out, final


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


class _Kda(torch.autograd.Function):
    """The kernels and their gradient. Kept between the two: the inputs, Δ, M, A, and the state before every group."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, final, *kept = _forward(*args, save=True)
        *tensors, ctx.plan, stops, ctx.lower_bound = args
        ctx.save_for_backward(*tensors, stops, *kept)
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (*_backward(*grads, *ctx.saved_tensors, plan=ctx.plan, lower_bound=ctx.lower_bound), None, None, None)


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    plan: TilePlan,
    lower_bound: float,
    squares: Sequence[torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K ⊙ Γ, Q ⊙ Γ and K ⊙ exp(c_16 - c) [3, tiles, H, 16, K], exp(c_16) [tiles, H, K]; L, β and A into ``squares``."""
    from k3rl.kernels.kda.kernel import prepare_kernel

    heads, key = q.shape[1:]
    num, tiles = len(plan.cu_seqlens) - 1, len(plan.sequences)
    wide, end = q.new_empty(3, tiles, heads, TILE, key), q.new_empty(tiles, heads, key, dtype=torch.float32)
    prepare: Any = prepare_kernel
    prepare[(tiles * heads,)](
        q, k, z, b, A_log.float().contiguous(), dt_bias.float().contiguous(),
        plan.cu_seqlens, plan.first_tiles, plan.sequences,
        wide[0], wide[1], wide[2], *((end, end, end) if squares is None else squares), end, num, key**-0.5, lower_bound,
        H=heads, K=key, BK=min(PREPARE["block_k"], key), EXACT=_exact(q), SQUARES=squares is not None,
        num_warps=PREPARE["warps"],
    )  # fmt: skip
    return wide, end


def _exact(q: torch.Tensor) -> str:
    return "ieee" if q.dtype == torch.float32 else "bf16x3"


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor | None,
    plan: TilePlan,
    stops: torch.Tensor,
    lower_bound: float,
    save: bool,
) -> tuple[torch.Tensor, ...]:
    """Outputs and state; with ``save`` then Δ [T, H, V], M and A [2, tiles, H, 16, 16], states [groups, H, K, V]."""
    # Lazily: a machine without Triton runs the reference.
    from k3rl.kernels.kda.kernel import invert_kernel, scan_kernel

    heads, key, value = q.shape[1], q.shape[2], v.shape[2]
    num, tiles = len(plan.cu_seqlens) - 1, len(plan.sequences)
    square = q.new_empty(2, tiles, heads, TILE, TILE)
    lower, beta = (q.new_empty(tiles, heads, *shape, dtype=torch.float32) for shape in ((TILE, TILE), (TILE,)))
    wide, end = _prepare(q, k, z, b, A_log, dt_bias, plan, lower_bound, (lower, beta, square[1]))
    invert: Any = invert_kernel
    invert[(-(-tiles * heads // INVERT["blocks"]),)](
        lower, beta, square[0], plan.first_tiles, num, H=heads, BLOCKS=INVERT["blocks"], num_warps=INVERT["warps"]
    )
    out = torch.empty_like(v)
    final = q.new_empty(num, heads, key, value, dtype=torch.float32)
    delta, states = (torch.empty_like(v), q.new_empty(len(plan.groups), heads, key, value)) if save else (out, out)
    block_v = min(SCAN["block_v"], value)
    scan: Any = scan_kernel
    scan[(num * heads * (value // block_v),)](
        v, wide[0], wide[1], wide[2], square[0], square[1], end, out,
        final if initial_state is None else initial_state.float().contiguous(), final, delta, states,
        stops, plan.cu_seqlens, plan.first_tiles, plan.first_groups,
        H=heads, K=key, V=value, BV=block_v, GROUP=GROUP, EXACT=_exact(q), STAGES=SCAN["stages"],
        INITIAL=initial_state is not None, SAVE=save, num_warps=SCAN["warps"],
    )  # fmt: skip
    return out, final, delta, square, states


def _backward(
    d_out: torch.Tensor,
    d_final: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor | None,
    stops: torch.Tensor,
    delta: torch.Tensor,
    square: torch.Tensor,
    states: torch.Tensor,
    *,
    plan: TilePlan,
    lower_bound: float,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the eight tensors q to initial_state."""
    from k3rl.kernels.kda.backward import factors_kernel, finish_kernel, reverse_kernel

    heads, key, value = q.shape[1], q.shape[2], v.shape[2]
    num, tiles = len(plan.cu_seqlens) - 1, len(plan.sequences)
    d_out, d_final = d_out.contiguous(), d_final.contiguous()
    wide, end = _prepare(q, k, z, b, A_log, dt_bias, plan, lower_bound, None)
    d_q, d_k, d_v, d_z, d_b, d_states, d_initial = (torch.empty_like(x) for x in (q, k, v, z, b, states, d_final))
    block_v = min(REVERSE["block_v"], value)
    sizes = {"H": heads, "K": key, "EXACT": _exact(q)}
    reverse: Any = reverse_kernel
    reverse[(num * heads * (value // block_v),)](
        d_out, wide[0], wide[1], wide[2], square[0], square[1], end, d_v, d_states, d_final, d_initial,
        stops, plan.cu_seqlens, plan.first_tiles, plan.first_groups,
        **sizes, V=value, BV=block_v, GROUP=GROUP, STAGES=REVERSE["stages"], num_warps=REVERSE["warps"],
    )  # fmt: skip
    d_wide, d_end = torch.empty_like(wide), torch.empty_like(end)
    d_square = q.new_empty(2, tiles, heads, TILE, TILE, dtype=torch.float32)
    block_k = min(FACTORS["block_k"], key)
    factors: Any = factors_kernel
    factors[(len(plan.groups) * heads * (key // block_k),)](
        states, d_states, d_final, delta, d_out, d_v, wide[0], wide[1], wide[2], end,
        d_wide[0], d_wide[1], d_wide[2], d_end, d_square[0], d_square[1],
        plan.groups, stops, plan.cu_seqlens, plan.first_tiles, plan.first_groups, num,
        **sizes, V=value, BK=block_k, GROUP=GROUP, STAGES=FACTORS["stages"], num_warps=FACTORS["warps"],
    )  # fmt: skip
    d_rate, d_bias = (q.new_empty(tiles, heads, *shape, dtype=torch.float32) for shape in ((), (key,)))
    finish: Any = finish_kernel
    finish[(tiles * heads,)](
        q, k, z, b, A_log.float().contiguous(), dt_bias.float().contiguous(),
        plan.cu_seqlens, plan.first_tiles, plan.sequences, end,
        d_wide[0], d_wide[1], d_wide[2], d_end, d_square[0], d_square[1],
        d_q, d_k, d_z, d_b, d_rate, d_bias, num, key**-0.5, lower_bound,
        **sizes, BK=FINISH["block_k"], num_warps=FINISH["warps"],
    )  # fmt: skip
    # Summed over tiles in one order: no atomics.
    shared = (d_rate.sum(0).to(A_log.dtype), d_bias.sum(0).to(dt_bias.dtype))
    return d_q, d_k, d_v, d_z, d_b, *shared, None if initial_state is None else d_initial.to(initial_state.dtype)
