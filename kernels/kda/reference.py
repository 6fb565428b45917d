"""Kimi Delta Attention in plain torch.

Letters: N sequences (padded to T rows), H heads, K key width, V value width, W taps of the convolution, C channels.
A padded row has k = g = beta = 0: it leaves the state as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TILE = 16
"""Rows whose decay ratios are formed as products of exponentials: 15 * 5 = 75 stays under float32's limit of 88."""


class _Gate(torch.autograd.Function):
    """bound * sigmoid(exp(A_log) (z + dt_bias)), whose gradient is 0 where the sigmoid is flat.

    Plain autograd multiplies an exactly zero slope by exp(A_log), which is inf for large A_log: NaN.
    """

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, bound: float) -> torch.Tensor:
        rate = A_log.exp().unsqueeze(-1)
        shifted = z + dt_bias
        # exp(A_log) = inf times a shift of exactly 0 is 0, the limit of every finite rate.
        inner = torch.where(shifted == 0, torch.zeros_like(shifted), rate * shifted)
        gate = torch.sigmoid(inner)
        ctx.save_for_backward(rate, shifted, inner, gate)
        ctx.bound = bound
        return bound * gate

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        rate, shifted, inner, gate = ctx.saved_tensors
        slope = gate * (1 - gate)
        inner_grad = grads[0] * ctx.bound * slope
        zero = torch.zeros_like(slope)
        dz = torch.where(slope == 0, zero, inner_grad * rate)
        d_log = torch.where(slope == 0, zero, inner_grad * torch.where(shifted == 0, zero, inner))
        heads = d_log.shape[-2]
        dz_rows = dz.reshape(dz[..., 0, 0].numel(), heads, dz.shape[-1])
        return dz, d_log.sum(-1).reshape(dz_rows.shape[0], heads).sum(0), dz_rows.sum(0), None


def kda_gate(z: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float) -> torch.Tensor:
    """Log decay in (lower_bound, 0): ``lower_bound * sigmoid(exp(A_log) * (z + dt_bias))``.

    Args:
        z: [..., H, K].
        A_log: [H].
        dt_bias: [H, K].
        lower_bound: negative.
    """
    return _Gate.apply(z, A_log, dt_bias, lower_bound)


def kda_softplus_gate(z: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """Log decay of Kimi Linear, at most 0: ``-exp(A_log) * softplus(z + dt_bias)``. Shapes as in :func:`kda_gate`."""
    return -A_log.exp().unsqueeze(-1) * torch.nn.functional.softplus(z + dt_bias)


def l2norm(inputs: torch.Tensor) -> torch.Tensor:
    """Unit length along the last axis, with 1e-6 inside the root."""
    return inputs * torch.rsqrt(inputs.square().sum(-1, keepdim=True) + 1e-6)


def kda_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence, token by token: the definition. Arguments and results as in :func:`kda_tiles`."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]) if initial_state is None else initial_state
    outputs = []
    for t in range(q.shape[1]):
        state = g[:, t].exp().unsqueeze(-1) * state
        error = beta[:, t].unsqueeze(-1) * (v[:, t] - torch.einsum("nhkv,nhk->nhv", state, k[:, t]))
        state = state + k[:, t].unsqueeze(-1) * error.unsqueeze(-2)
        outputs.append(torch.einsum("nhkv,nhk->nhv", state, q[:, t]))
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(v), state


def _invert_unit_lower(lower: torch.Tensor) -> torch.Tensor:
    """(I + L)^-1 for strictly lower triangular 16 x 16 L, by forward substitution.

    The product (I - L)(I + L^2)(I + L^4)(I + L^8) is as exact on paper, but for alike keys (a text that repeats itself)
    its terms reach 10^3 and cancel: three digits of float32 are lost.
    """
    eye = torch.eye(TILE, dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(lower + eye, eye.expand_as(lower), upper=False, unitriangular=True)


def _decayed_products(
    lefts: Sequence[torch.Tensor], k: torch.Tensor, cumulative: torch.Tensor, bounded: bool
) -> list[torch.Tensor]:
    """For each of ``lefts``: ``sum_k left_ik k_jk exp(c_ik - c_jk)`` below the diagonal of a tile, 0 elsewhere.

    Bounded decay makes it a product of matrices. Unbounded decay would overflow there, so that every pair of rows gets
    an exponential of its own.
    """
    if bounded:
        # Anchored at the first row: any other anchor lies in some row's future, whose rounding would then depend on it.
        first = cumulative[..., :1, :]
        rise, k_fall = (cumulative - first).exp(), (k * (first - cumulative).exp()).transpose(-1, -2)
        return [((left * rise) @ k_fall).tril(-1) for left in lefts]
    rows = torch.arange(cumulative.shape[-2], device=cumulative.device)
    before = (rows.unsqueeze(1) > rows).unsqueeze(-1)
    # Masked before the exponential: what overflows there would make the gradient NaN even where it is dropped.
    pairs = (cumulative.unsqueeze(-2) - cumulative.unsqueeze(-3)).masked_fill(~before, -torch.inf).exp()
    return [torch.einsum("...ik,...jk,...ijk->...ij", left, k, pairs) for left in lefts]


def kda_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    tile: int = TILE,
    num_tiles_N: torch.Tensor | None = None,
    bounded: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunked KDA. A row's result depends, bit by bit, on the rows up to it alone.

    Args:
        q: [N, T, H, K], already scaled.
        k: [N, T, H, K].
        v: [N, T, H, V].
        g: [N, T, H, K] log decay, at most 0.
        beta: [N, T, H].
        initial_state: [N, H, K, V], zero if None.
        tile: state checkpoint interval, a multiple of 16; the arithmetic is in rows of 16 whatever it is.
        num_tiles_N: [N] the returned state of sequence n is that after so many tiles; None: after all rows.
        bounded: g is at least -5.8; without it decay may be as strong as it likes, at 16 times the exponentials.

    Returns:
        Outputs [N, T, H, V] and the state [N, H, K, V].
    """
    if tile % TILE:
        raise ValueError(f"tile must be a multiple of {TILE}, got {tile}")
    num, rows, heads, key_dim = q.shape
    parts = -(-rows // TILE)
    q, k, v, g, beta = (_to_parts(x, parts) for x in (q, k, v, g, beta.unsqueeze(-1)))
    state = q.new_zeros(num, heads, key_dim, v.shape[-1]) if initial_state is None else initial_state
    cumulative = g.cumsum(-2)
    decay = cumulative.exp()
    alike, scores = _decayed_products([k, q], k, cumulative, bounded)
    inverse = _invert_unit_lower(beta * alike) * beta.transpose(-1, -2)
    pseudo, keys = inverse @ v, inverse @ (k * decay)
    # The diagonal has no decay. Left in the product it would give each gate a gradient of pure rounding error.
    scores = scores + torch.diag_embed((q * k).sum(-1))
    q_decay = q * decay
    k_end = (k * (cumulative[..., -1:, :] - cumulative).exp()).transpose(-1, -2)
    last = decay[..., -1, :].unsqueeze(-1)
    stop = None if num_tiles_N is None else (num_tiles_N * (tile // TILE)).view(num, 1, 1, 1)
    outputs = []
    current = kept = state
    slices = (x.unbind(1) for x in (pseudo, keys, scores, q_decay, k_end, last))
    for i, (u, w, s, qd, ke, end) in enumerate(zip(*slices, strict=True)):
        delta = u - w @ current
        outputs.append(qd @ current + s @ delta)
        current = end * current + ke @ delta
        kept = current if stop is None else torch.where(stop > i, current, kept)
    if not outputs:
        return v.new_zeros(num, 0, heads, v.shape[-1]), state
    o = torch.stack(outputs, 1).transpose(2, 3).reshape(num, parts * TILE, heads, v.shape[-1])
    return o[:, :rows], kept


def kda_span(
    k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, bounded: bool = True
) -> torch.Tensor:
    """What a span of rows does to any state S before it: it leaves ``reached + carry @ S``.

    ``carry`` is the product of (I - beta k k^T) diag(exp(g)) over the rows, the newest on the left, and ``reached`` the
    state that they reach from zero. Both follow the recurrence: carry is what becomes of I when all values are zero.

    Args:
        k: as in :func:`kda_tiles`, as are v, g, beta and bounded.

    Returns:
        [N, H, K, V + K], reached before carry. See :func:`join_spans`.
    """
    num, _, heads, key_dim = k.shape
    eye = torch.eye(key_dim, dtype=k.dtype, device=k.device).expand(num, heads, key_dim, key_dim)
    start = torch.cat([k.new_zeros(num, heads, key_dim, v.shape[-1]), eye], dim=-1)
    values = torch.nn.functional.pad(v, (0, key_dim))
    return kda_tiles(k, k, values, g, beta, start, bounded=bounded)[1]


def join_spans(spans_NHKX: Sequence[torch.Tensor]) -> torch.Tensor:
    """The state [N, H, K, V] after consecutive spans of a sequence that starts with the first of them."""
    key_dim = spans_NHKX[0].shape[-2]
    state = spans_NHKX[0][..., :-key_dim]
    for span in spans_NHKX[1:]:
        state = span[..., :-key_dim] + span[..., -key_dim:] @ state
    return state


def kda_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    num_tiles_N: torch.Tensor | None = None,
    lower_bound: float = -5.0,
    form: Callable[..., tuple[torch.Tensor, torch.Tensor]] = kda_tiles,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm, gate, beta and :func:`kda_tiles` of packed sequences: what the Triton kernels compute.

    Arguments and results are those of :func:`k3rl.kernels.kda.kda_chunk`; ``form`` may be :func:`kda_recurrent`, if
    all sequences are equally long.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    lengths = cu_seqlens.diff()
    at_P = torch.arange(int(lengths.max()), device=q.device)
    counts_NP = at_P < lengths.unsqueeze(1)
    # Row T is zero: it fills up the sequences.
    rows_NP = torch.where(counts_NP, cu_seqlens[:-1].unsqueeze(1) + at_P, len(q))
    g = kda_gate(z.to(wide), A_log.to(wide), dt_bias.to(wide), lower_bound)
    rows = (l2norm(q.to(wide)) * q.shape[-1] ** -0.5, l2norm(k.to(wide)), v.to(wide), g, torch.sigmoid(b.to(wide)))
    padded = [torch.cat([x, x.new_zeros(1, *x.shape[1:])])[rows_NP] for x in rows]
    options = {} if num_tiles_N is None else {"num_tiles_N": num_tiles_N}
    out_NPHV, state = form(*padded, initial_state=initial_state, **options)
    return out_NPHV[counts_NP].to(v.dtype), state


def kda_decode(
    q_NHK: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state_NHKV: torch.Tensor,
    bounded: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`kda_tiles` says of one new token per sequence: its output [N, H, V] and the state after it.

    The rows are the token's and those before it since ``state_NHKV``; zero rows may follow. They need no query, and
    the tile is as high as the longest sequence needs.

    Args:
        q_NHK: the new token's query, already scaled.
        k: [N, H, T, K], as are v [N, H, T, V], g [N, H, T, K] and beta [N, H, T, 1].
        state_NHKV: the state before the rows.
        bounded: as in :func:`kda_tiles`.
    """
    for start in range(0, k.shape[2], TILE):
        k_R, v_R, beta_R = (x[:, :, start : start + TILE] for x in (k, v, beta))
        cumulative = g[:, :, start : start + TILE].cumsum(-2)
        decay = cumulative.exp()
        lower = beta_R * _decayed_products([k_R], k_R, cumulative, bounded)[0]
        error = beta_R * (v_R - (k_R * decay) @ state_NHKV)
        delta = torch.linalg.solve_triangular(lower, error, upper=False, unitriangular=True)
        k_end = k_R * (cumulative[..., -1:, :] - cumulative).exp()
        state_NHKV = decay[..., -1, :].unsqueeze(-1) * state_NHKV + k_end.transpose(-1, -2) @ delta
    return (q_NHK.unsqueeze(-2) @ state_NHKV).squeeze(-2), state_NHKV


def _to_parts(rows: torch.Tensor, parts: int) -> torch.Tensor:
    """[N, T, H, X] to [N, parts, H, 16, X], zero rows at the end."""
    num, length, heads, width = rows.shape
    if length < parts * TILE:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, parts * TILE - length))
    return rows.reshape(num, parts, TILE, heads, width).transpose(2, 3).contiguous()


def conv_plan(cu_seqlens: torch.Tensor, taps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where :func:`short_conv` reads: row indices [T, W] for outputs and [N, W - 1] for the next window.

    They index the rows of all windows, [N (W - 1)], followed by the T inputs.
    """
    device = cu_seqlens.device
    lengths = cu_seqlens.diff()
    num, width = len(lengths), taps - 1
    sequence_T = torch.repeat_interleave(torch.arange(num, device=device), lengths)
    local_T = torch.arange(len(sequence_T), device=device) - cu_seqlens[:-1][sequence_T]

    def locate(sequence: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        window = sequence * width + width + position
        return torch.where(position < 0, window, num * width + cu_seqlens[:-1][sequence] + position)

    back_W = torch.arange(taps, device=device) - width
    taps_TW = locate(sequence_T.unsqueeze(1), local_T.unsqueeze(1) + back_W)
    ends_NW = lengths.unsqueeze(1) + torch.arange(width, device=device) - width
    return taps_TW, locate(torch.arange(num, device=device).unsqueeze(1), ends_NW)


def conv_decode(
    inputs_NC: torch.Tensor, weight_CW: torch.Tensor, window_NWC: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`short_conv` of one new token per sequence."""
    source_NWC = torch.cat([window_NWC.to(inputs_NC.dtype), inputs_NC.unsqueeze(1)], dim=1)
    return (source_NWC * weight_CW.t()).sum(1), source_NWC[:, 1:]


def short_conv(
    inputs_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    cu_seqlens: torch.Tensor,
    window_NWC: torch.Tensor | None = None,
    plan: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal depthwise convolution of packed sequences; the last tap multiplies the current token.

    Args:
        inputs_TC: [T, C].
        weight_CW: [C, W].
        cu_seqlens: [N + 1].
        window_NWC: [N, W - 1, C] inputs before the first token; zero if None.
        plan: what :func:`conv_plan` gave, when several layers share it.

    Returns:
        Outputs [T, C] and the window after the last token [N, W - 1, C].
    """
    taps = weight_CW.shape[1]
    num, channels = len(cu_seqlens) - 1, inputs_TC.shape[1]
    taps_TW, ends_NW = conv_plan(cu_seqlens, taps) if plan is None else plan
    if window_NWC is None:
        window_NWC = inputs_TC.new_zeros(num, taps - 1, channels)
    source = torch.cat([window_NWC.reshape(num * (taps - 1), channels).to(inputs_TC.dtype), inputs_TC])
    out = inputs_TC * weight_CW[:, -1]
    for tap in range(taps - 1):
        out = torch.addcmul(out, source.index_select(0, taps_TW[:, tap]), weight_CW[:, tap])
    return out, source.index_select(0, ends_NW.flatten()).view(num, taps - 1, channels)
