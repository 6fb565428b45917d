"""KDA in Triton: one program per tile and head prepares, one per sequence, head and block of values scans.

Letters: N sequences, T packed rows, H heads, K key width, V value width, BV values of one program, R the 16 rows of a
tile. D is the type of matrix operands, bf16 or float32; sums, decay and state are float32. Tiles of all sequences are
numbered through; a tile's factors lie together, [tiles, H, R, ...]. Formulas and their order are those of README.md.
"""

# pyright: reportGeneralTypeIssues=false
# Triton's ranges are syntax to its compiler and no iterators to a type checker.

import triton
import triton.language as tl

ROWS = tl.constexpr(16)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def gate_rows(z, rate, bias):
    """The gate's sigmoid of rows [R, K], and its derivative."""
    shifted = z + bias[None, :]
    # exp(A_log) = inf times a shift of exactly 0 is 0, the limit of every finite rate.
    inner = tl.where(shifted == 0.0, 0.0, rate * shifted)
    # One exponential that cannot overflow, for both; either end of the sigmoid keeps its digits.
    small = tl.exp(-tl.abs(inner))
    large = 1.0 / (1.0 + small)
    return tl.where(inner < 0.0, small * large, large), small * large * large


@triton.jit
def decays(gate, lower_bound, valid):
    """Decay exp(c) of some key channels from the tile's start to each row and its inverse exp(-c), [R, BK].

    That start lies in no row's future, on which its rounding would depend. Rows that do not count do not decay; gate
    times lower_bound is the log decay.
    """
    # In powers of two, which the GPU has.
    c = tl.cumsum(tl.where(valid[:, None], gate * (lower_bound * LOG2_E), 0.0), 0)
    return tl.exp2(c), tl.exp2(-c)


@triton.jit
def advance(state, v, k_decay, q_decay, k_end, inverse, scores, end, D: tl.constexpr, EXACT: tl.constexpr):
    """One tile: outputs [BV, R], Δ [BV, R] and the state [BV, K] after it.

    Values are rows of everything here: the state is each product's left operand as it stands in registers, and no warp
    waits for another's part of it.
    """
    narrow = state.to(D)
    held = tl.dot(narrow, tl.trans(k_decay), input_precision=EXACT)
    out = tl.dot(narrow, tl.trans(q_decay), input_precision=EXACT)
    # M (V - K Γ S) in two products: the first waits for no state.
    delta = tl.dot(tl.trans(v), tl.trans(inverse), input_precision=EXACT)
    delta = tl.dot((-held).to(D), tl.trans(inverse), acc=delta, input_precision=EXACT).to(D)
    out = tl.dot(delta, tl.trans(scores), acc=out, input_precision=EXACT)
    return out, delta, tl.dot(delta, k_end, acc=state * end[None, :], input_precision=EXACT)


@triton.jit
def invert_kernel(
    lower_ptr,  # [tiles, H, R, R] float32
    beta_ptr,  # [tiles, H, R] float32
    inverse_ptr,  # [tiles, H, R, R]
    first_tiles_ptr,
    num_sequences,
    H: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """(I + L)^-1 diag(beta) of strictly lower L, by forward substitution: one column of one block in each thread."""
    blocks, columns = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS), tl.arange(0, ROWS)
    valid = (blocks < tl.load(first_tiles_ptr + num_sequences) * H)[:, None]
    at = blocks[:, None] * ROWS
    beta = tl.load(beta_ptr + at + columns[None, :], mask=valid, other=0.0)
    solved = ()
    for i in tl.static_range(ROWS):
        value = tl.where(columns[None, :] == i, beta, 0.0)
        for j in tl.static_range(i):
            value -= tl.load(lower_ptr + (at + i) * ROWS + j, mask=valid, other=0.0) * solved[j]
        solved += (value,)
        tl.store(inverse_ptr + (at + i) * ROWS + columns[None, :], value.to(inverse_ptr.dtype.element_ty), mask=valid)


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
    k_decay_ptr,  # [tiles, H, R, K] and so the next two
    q_decay_ptr,
    k_end_ptr,
    lower_ptr,  # [tiles, H, R, R] float32
    beta_ptr,  # [tiles, H, R] float32
    scores_ptr,  # [tiles, H, R, R]
    end_ptr,  # [tiles, H, K] float32
    num_sequences,
    scale,
    lower_bound,
    H: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    EXACT: tl.constexpr,
    SQUARES: tl.constexpr,
):
    """Factors of one tile of one head; without SQUARES those alone that are as wide as the keys."""
    tile, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    sequence = tl.load(sequences_ptr + tile)
    if sequence == num_sequences:
        return
    D: tl.constexpr = k_decay_ptr.dtype.element_ty
    rows = tl.arange(0, ROWS)
    start = tl.load(cu_seqlens_ptr + sequence) + (tile - tl.load(first_tiles_ptr + sequence)) * ROWS
    valid = start + rows < tl.load(cu_seqlens_ptr + sequence + 1)
    # int64 where a tile begins, int32 inside of it: half the registers.
    block, begin = tile * H + head, start * H + head
    rate = tl.exp(tl.load(rate_ptr + head))
    # Few channels at a time: one warp holds them in registers, and warps never wait for one another.
    q_square, k_square = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for part in range(K // BK):
        at = (rows * (H * K))[:, None] + (part * BK + tl.arange(0, BK))[None, :]
        q = tl.load(q_ptr + begin * K + at, mask=valid[:, None], other=0.0).to(tl.float32)
        k = tl.load(k_ptr + begin * K + at, mask=valid[:, None], other=0.0).to(tl.float32)
        q_square += tl.sum(q * q, 1)
        k_square += tl.sum(k * k, 1)
    q_unit, k_unit = tl.rsqrt(q_square + 1e-6) * scale, tl.rsqrt(k_square + 1e-6)
    alike, scores = tl.zeros([ROWS, ROWS], tl.float32), tl.zeros([ROWS, ROWS], tl.float32)
    same = tl.zeros([ROWS], tl.float32)
    for part in range(K // BK):
        keys = part * BK + tl.arange(0, BK)
        at = (rows * (H * K))[:, None] + keys[None, :]
        q = tl.load(q_ptr + begin * K + at, mask=valid[:, None], other=0.0).to(tl.float32) * q_unit[:, None]
        k = tl.load(k_ptr + begin * K + at, mask=valid[:, None], other=0.0).to(tl.float32) * k_unit[:, None]
        z = tl.load(z_ptr + begin * K + at, mask=valid[:, None], other=0.0).to(tl.float32)
        gate, _ = gate_rows(z, rate, tl.load(bias_ptr + head * K + keys))
        decay, growth = decays(gate, lower_bound, valid)
        q_decay, k_decay, k_growth = q * decay, k * decay, k * growth
        if SQUARES:
            alike = tl.dot(k_decay, tl.trans(k_growth), acc=alike, input_precision=EXACT)
            scores = tl.dot(q_decay, tl.trans(k_growth), acc=scores, input_precision=EXACT)
            same += tl.sum(q * k, 1)
        end = tl.sum(tl.where(rows[:, None] == ROWS - 1, decay, 0.0), 0)
        whole = rows[:, None] * K + keys[None, :]
        tl.store(k_decay_ptr + block * (ROWS * K) + whole, k_decay.to(D))
        tl.store(q_decay_ptr + block * (ROWS * K) + whole, q_decay.to(D))
        tl.store(k_end_ptr + block * (ROWS * K) + whole, (k_growth * end[None, :]).to(D))
        tl.store(end_ptr + block * K + keys, end)
    if SQUARES:
        b = tl.load(b_ptr + begin + rows * H, mask=valid, other=0.0).to(tl.float32)
        beta = tl.where(valid, tl.sigmoid(b), 0.0)
        before = rows[:, None] > rows[None, :]
        # The diagonal has no decay: it stays outside of the product, or gates get a gradient of pure rounding error.
        diagonal = tl.where(rows[:, None] == rows[None, :], same[:, None], 0.0)
        square = rows[:, None] * ROWS + rows[None, :]
        tl.store(lower_ptr + block * (ROWS * ROWS) + square, tl.where(before, beta[:, None] * alike, 0.0))
        tl.store(scores_ptr + block * (ROWS * ROWS) + square, tl.where(before, scores, diagonal).to(D))
        tl.store(beta_ptr + block * ROWS + rows, beta)


@triton.jit
def scan_tiles(
    state,
    first,
    stop,
    first_tile,
    first_group,
    start,
    limit,
    head,
    values,
    v_ptr,
    k_decay_ptr,
    q_decay_ptr,
    k_end_ptr,
    inverse_ptr,
    scores_ptr,
    end_ptr,
    out_ptr,
    delta_ptr,
    states_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
    SAVE: tl.constexpr,
):
    """The state [BV, K] carried through tiles first to stop of one sequence, outputs written on the way."""
    D: tl.constexpr = k_decay_ptr.dtype.element_ty
    rows, keys = tl.arange(0, ROWS), tl.arange(0, K)
    whole, square = rows[:, None] * K + keys[None, :], rows[:, None] * ROWS + rows[None, :]
    at = (rows * (H * V))[:, None] + values[None, :]
    for i in tl.range(first, stop, num_stages=STAGES):
        block, row = (first_tile + i) * H + head, start + i * ROWS
        begin, valid = (row * H + head) * V, (row + rows < limit)[:, None]
        wide, narrow = block * (ROWS * K), block * (ROWS * ROWS)
        v = tl.load(v_ptr + begin + at, mask=valid, other=0.0).to(D)
        out, delta, after = advance(
            state,
            v,
            tl.load(k_decay_ptr + wide + whole),
            tl.load(q_decay_ptr + wide + whole),
            tl.load(k_end_ptr + wide + whole),
            tl.load(inverse_ptr + narrow + square),
            tl.load(scores_ptr + narrow + square),
            tl.load(end_ptr + block * K + keys),
            D,
            EXACT,
        )
        tl.store(out_ptr + begin + at, tl.trans(out).to(out_ptr.dtype.element_ty), mask=valid)
        if SAVE:
            tl.store(delta_ptr + begin + at, tl.trans(delta), mask=valid)
            if i % GROUP == 0:
                group = (first_group + i // GROUP) * H + head
                tl.store(states_ptr + group * (K * V) + keys[None, :] * V + values[:, None], state.to(D))
        state = after
    return state


@triton.jit
def scan_kernel(
    v_ptr,  # [T, H, V]
    k_decay_ptr,
    q_decay_ptr,
    k_end_ptr,
    inverse_ptr,
    scores_ptr,
    end_ptr,
    out_ptr,  # [T, H, V]
    initial_ptr,  # [N, H, K, V] float32, not read unless INITIAL
    final_ptr,  # [N, H, K, V] float32
    delta_ptr,  # [T, H, V], written with SAVE alone
    states_ptr,  # [groups, H, K, V] before each group of tiles, written with SAVE alone
    stops_ptr,  # [N] int64 tiles before the state that is returned
    cu_seqlens_ptr,
    first_tiles_ptr,
    first_groups_ptr,  # [N + 1] int64
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
    INITIAL: tl.constexpr,
    SAVE: tl.constexpr,
):
    """Outputs of one sequence and head for a block of values, and the state after `stops` tiles.

    With SAVE also what the backward wants of it: Δ, and the state before every group of GROUP tiles.
    """
    blocks: tl.constexpr = V // BV
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    sequence, head = pair // H, pair % H
    keys, values = tl.arange(0, K), (tl.program_id(0) % blocks) * BV + tl.arange(0, BV)
    start, limit = tl.load(cu_seqlens_ptr + sequence), tl.load(cu_seqlens_ptr + sequence + 1)
    first_tile, first_group = tl.load(first_tiles_ptr + sequence), tl.load(first_groups_ptr + sequence)
    num_tiles = (tl.load(first_tiles_ptr + sequence + 1) - first_tile).to(tl.int32)
    stop = tl.load(stops_ptr + sequence).to(tl.int32)
    at = pair * K * V + keys[None, :] * V + values[:, None]
    state = tl.load(initial_ptr + at) if INITIAL else tl.zeros([BV, K], tl.float32)
    state = scan_tiles(
        state, 0, stop, first_tile, first_group, start, limit, head, values, v_ptr, k_decay_ptr, q_decay_ptr,
        k_end_ptr, inverse_ptr, scores_ptr, end_ptr, out_ptr, delta_ptr, states_ptr, H, K, V, GROUP, EXACT, STAGES,
        SAVE,
    )  # fmt: skip
    tl.store(final_ptr + at, state)
    scan_tiles(
        state, stop, num_tiles, first_tile, first_group, start, limit, head, values, v_ptr, k_decay_ptr, q_decay_ptr,
        k_end_ptr, inverse_ptr, scores_ptr, end_ptr, out_ptr, delta_ptr, states_ptr, H, K, V, GROUP, EXACT, STAGES,
        SAVE,
    )  # fmt: skip
