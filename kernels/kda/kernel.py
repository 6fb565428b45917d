"""KDA in Triton: one program per tile and head prepares, one per sequence, head and block of values scans.

Letters: N sequences, T packed rows, H heads, K key width, V value width, BV values of one program, R the 16 rows of a
tile. D is the type of matrix operands, bf16 or float32; sums, decay and state are float32. Tiles of all sequences are
numbered through; a tile's factors lie together, [tiles, H, R, ...]. Formulas and their order are those of README.md.
"""

import triton
import triton.language as tl

ROWS = tl.constexpr(16)


@triton.jit
def invert_unit_lower(lower):
    """(I + L)^-1 for strictly lower triangular L [R, R], by forward substitution in float32."""
    rows = tl.arange(0, ROWS)
    inverse = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
    for i in tl.static_range(1, ROWS):
        factors = tl.sum(tl.where(rows[:, None] == i, lower, 0.0), 0)
        update = tl.sum(factors[:, None] * inverse, 0)
        inverse = tl.where(rows[:, None] == i, inverse - update[None, :], inverse)
    return inverse


@triton.jit
def unit_rows(x):
    """L2 norm to 1 of rows [R, K], as `l2norm`."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def log_decay(z, rate, bias, lower_bound, valid):
    """Gate of rows [R, K]; a row that does not count does not decay."""
    shifted = z + bias[None, :]
    # exp(A_log) = inf times a shift of exactly 0 is 0, the limit of every finite rate.
    inner = tl.where(shifted == 0.0, 0.0, rate * shifted)
    return tl.where(valid[:, None], lower_bound * tl.sigmoid(inner), 0.0)


@triton.jit
def tile_factors(q, k, g, beta, D: tl.constexpr, EXACT: tl.constexpr):
    """What a tile is to its state: -M (K Γ), Q Γ, K exp(c_R - c), M, A and exp(c_R).

    Args:
        q: [R, K] unit and scaled; k unit, g log decay; all float32, rows that do not count 0.
        beta: [R].
        D: type of the operands of products between factors.
        EXACT: precision of float32 products.
    """
    rows = tl.arange(0, ROWS)
    before = rows[:, None] > rows[None, :]
    c = tl.cumsum(g, 0)
    first = tl.sum(tl.where(rows[:, None] == 0, c, 0.0), 0)[None, :]
    last = tl.sum(tl.where(rows[:, None] == ROWS - 1, c, 0.0), 0)
    # Anchored at the first row: any other lies in some row's future, whose rounding would then depend on it.
    rise = tl.exp(c - first)
    k_fall = tl.trans(k * tl.exp(first - c))
    alike = tl.dot(k * rise, k_fall, input_precision=EXACT)
    scores = tl.dot(q * rise, k_fall, input_precision=EXACT)
    inverse = invert_unit_lower(tl.where(before, beta[:, None] * alike, 0.0)) * beta[None, :]
    # The diagonal has no decay: it stays outside of the product, or gates get a gradient of pure rounding error.
    diagonal = tl.where(rows[:, None] == rows[None, :], tl.sum(q * k, 1)[:, None], 0.0)
    scores = tl.where(before, scores, diagonal)
    decay = tl.exp(c)
    narrow = inverse.to(D)
    keys = -tl.dot(narrow, (k * decay).to(D), input_precision=EXACT)
    return keys, q * decay, k * tl.exp(last[None, :] - c), narrow, scores, tl.exp(last)


@triton.jit
def advance(state, v, keys, q_decay, k_end, inverse, scores, end, D: tl.constexpr, EXACT: tl.constexpr):
    """One tile: outputs [BV, R] and the state [BV, K] after it.

    Values are rows of everything here: the state is each product's left operand as it stands in registers, and no warp
    waits for another's part of it.
    """
    narrow = state.to(D)
    delta = tl.dot(tl.trans(v), tl.trans(inverse), input_precision=EXACT)
    delta = tl.dot(narrow, tl.trans(keys), acc=delta, input_precision=EXACT).to(D)
    out = tl.dot(narrow, tl.trans(q_decay), input_precision=EXACT)
    out = tl.dot(delta, tl.trans(scores), acc=out, input_precision=EXACT)
    return out, tl.dot(delta, k_end, acc=state * end[None, :], input_precision=EXACT)


@triton.jit
def prepare_kernel(
    q_ptr,  # [T, H, K]
    k_ptr,  # [T, H, K]
    z_ptr,  # [T, H, K]
    b_ptr,  # [T, H]
    rate_ptr,  # [H] A_log, float32
    bias_ptr,  # [H, K] float32
    cu_seqlens_ptr,  # [N + 1] int64
    first_tiles_ptr,  # [N + 1] int64
    sequences_ptr,  # [tiles] int64, N where there is no tile
    keys_ptr,  # [tiles, H, R, K] and so the next two
    q_decay_ptr,
    k_end_ptr,
    inverse_ptr,  # [tiles, H, R, R] and so the next
    scores_ptr,
    end_ptr,  # [tiles, H, K] float32
    num_sequences,
    scale,
    lower_bound,
    H: tl.constexpr,
    K: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Factors of one tile of one head."""
    tile, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    sequence = tl.load(sequences_ptr + tile)
    if sequence == num_sequences:
        return
    D: tl.constexpr = keys_ptr.dtype.element_ty
    rows, keys = tl.arange(0, ROWS), tl.arange(0, K)
    start = tl.load(cu_seqlens_ptr + sequence) + (tile - tl.load(first_tiles_ptr + sequence)) * ROWS
    valid = start + rows < tl.load(cu_seqlens_ptr + sequence + 1)
    at = ((start + rows) * H + head)[:, None] * K + keys[None, :]
    q = tl.load(q_ptr + at, mask=valid[:, None], other=0.0).to(tl.float32)
    k = tl.load(k_ptr + at, mask=valid[:, None], other=0.0).to(tl.float32)
    z = tl.load(z_ptr + at, mask=valid[:, None], other=0.0).to(tl.float32)
    b = tl.load(b_ptr + (start + rows) * H + head, mask=valid, other=0.0).to(tl.float32)
    g = log_decay(z, tl.exp(tl.load(rate_ptr + head)), tl.load(bias_ptr + head * K + keys), lower_bound, valid)
    beta = tl.where(valid, tl.sigmoid(b), 0.0)
    minus_keys, q_decay, k_end, inverse, scores, end = tile_factors(
        unit_rows(q) * scale, unit_rows(k), g, beta, D, EXACT
    )
    block = tile * H + head
    whole = (block * ROWS + rows)[:, None] * K + keys[None, :]
    square = (block * ROWS + rows)[:, None] * ROWS + rows[None, :]
    tl.store(keys_ptr + whole, minus_keys.to(D))
    tl.store(q_decay_ptr + whole, q_decay.to(D))
    tl.store(k_end_ptr + whole, k_end.to(D))
    tl.store(inverse_ptr + square, inverse)
    tl.store(scores_ptr + square, scores.to(D))
    tl.store(end_ptr + block * K + keys, end)


@triton.jit
def scan_tiles(
    state,
    begin,
    stop,
    first_tile,
    start,
    limit,
    head,
    values,
    v_ptr,
    keys_ptr,
    q_decay_ptr,
    k_end_ptr,
    inverse_ptr,
    scores_ptr,
    end_ptr,
    out_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The state [BV, K] carried through tiles begin to stop of one sequence, outputs written on the way."""
    D: tl.constexpr = keys_ptr.dtype.element_ty
    rows, keys = tl.arange(0, ROWS), tl.arange(0, K)
    for i in tl.range(begin, stop, num_stages=STAGES):
        block = (first_tile + i) * H + head
        whole = (block * ROWS + rows)[:, None] * K + keys[None, :]
        square = (block * ROWS + rows)[:, None] * ROWS + rows[None, :]
        row = start + i * ROWS + rows
        at = (row * H + head)[:, None] * V + values[None, :]
        v = tl.load(v_ptr + at, mask=(row < limit)[:, None], other=0.0).to(D)
        out, state = advance(
            state,
            v,
            tl.load(keys_ptr + whole),
            tl.load(q_decay_ptr + whole),
            tl.load(k_end_ptr + whole),
            tl.load(inverse_ptr + square),
            tl.load(scores_ptr + square),
            tl.load(end_ptr + block * K + keys),
            D,
            EXACT,
        )
        tl.store(out_ptr + at, tl.trans(out).to(out_ptr.dtype.element_ty), mask=(row < limit)[:, None])
    return state


@triton.jit
def scan_kernel(
    v_ptr,  # [T, H, V]
    keys_ptr,
    q_decay_ptr,
    k_end_ptr,
    inverse_ptr,
    scores_ptr,
    end_ptr,
    out_ptr,  # [T, H, V]
    initial_ptr,  # [N, H, K, V] float32, not read unless INITIAL
    final_ptr,  # [N, H, K, V] float32
    stops_ptr,  # [N] int64 tiles before the state that is returned
    cu_seqlens_ptr,
    first_tiles_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
    INITIAL: tl.constexpr,
):
    """Outputs of one sequence and head for a block of values, and the state after `stops` tiles."""
    blocks: tl.constexpr = V // BV
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    sequence, head = pair // H, pair % H
    keys, values = tl.arange(0, K), (tl.program_id(0) % blocks) * BV + tl.arange(0, BV)
    start, limit = tl.load(cu_seqlens_ptr + sequence), tl.load(cu_seqlens_ptr + sequence + 1)
    first_tile = tl.load(first_tiles_ptr + sequence)
    num_tiles = (tl.load(first_tiles_ptr + sequence + 1) - first_tile).to(tl.int32)
    stop = tl.load(stops_ptr + sequence).to(tl.int32)
    at = pair * K * V + keys[None, :] * V + values[:, None]
    if INITIAL:
        state = tl.load(initial_ptr + at)
    else:
        state = tl.zeros([BV, K], tl.float32)
    state = scan_tiles(
        state, 0, stop, first_tile, start, limit, head, values, v_ptr, keys_ptr, q_decay_ptr, k_end_ptr, inverse_ptr,
        scores_ptr, end_ptr, out_ptr, H, K, V, EXACT, STAGES,
    )  # fmt: skip
    tl.store(final_ptr + at, state)
    scan_tiles(
        state, stop, num_tiles, first_tile, start, limit, head, values, v_ptr, keys_ptr, q_decay_ptr, k_end_ptr,
        inverse_ptr, scores_ptr, end_ptr, out_ptr, H, K, V, EXACT, STAGES,
    )  # fmt: skip
