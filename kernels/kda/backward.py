"""KDA's gradients in Triton: one program per sequence goes backwards, one per group of tiles and one per tile follow.

Letters as in `kernel.py`. GROUP tiles of a sequence are a group: the state before it is the forward's, the gradient of
the state after it the reverse scan's, and what lies between is formed again. Formulas are those of README.md.
"""

# pyright: reportGeneralTypeIssues=false
# Triton's ranges are syntax to its compiler and no iterators to a type checker.

import triton
import triton.language as tl

from k3rl.kernels.kda.kernel import ROWS, decays, gate_rows


@triton.jit
def retreat(d_state, d_out, k_decay, q_decay, k_end, inverse, scores, end, D: tl.constexpr, EXACT: tl.constexpr):
    """One tile backwards: ∂E = ∂V [BV, R] and the gradient [BV, K] of the state before it.

    As in :func:`advance`, values are rows and the state is the left operand of its product.
    """
    d_out = tl.trans(d_out)
    d_delta = tl.dot(d_out, scores, input_precision=EXACT)
    # What needs no state comes first, and no product waits for more of them than in the forward.
    before = tl.dot(d_out, q_decay, acc=d_state * end[None, :], input_precision=EXACT)
    d_delta = tl.dot(d_state.to(D), tl.trans(k_end), acc=d_delta, input_precision=EXACT).to(D)
    d_error = tl.dot(d_delta, inverse, input_precision=EXACT)
    return d_error, tl.dot((-d_error).to(D), k_decay, acc=before, input_precision=EXACT)


@triton.jit
def reverse_tiles(
    d_state,
    first,
    stop,
    num_tiles,
    first_tile,
    first_group,
    start,
    limit,
    head,
    values,
    d_out_ptr,
    k_decay_ptr,
    q_decay_ptr,
    k_end_ptr,
    inverse_ptr,
    scores_ptr,
    end_ptr,
    d_v_ptr,
    d_states_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The state's gradient [BV, K] carried from after tile stop - 1 to before tile first, ∂V written on the way."""
    D: tl.constexpr = k_decay_ptr.dtype.element_ty
    rows, keys = tl.arange(0, ROWS), tl.arange(0, K)
    whole, square = rows[:, None] * K + keys[None, :], rows[:, None] * ROWS + rows[None, :]
    at = (rows * (H * V))[:, None] + values[None, :]
    for step in tl.range(0, stop - first, num_stages=STAGES):
        i = stop - 1 - step
        block, row = (first_tile + i) * H + head, start + i * ROWS
        begin, valid = (row * H + head) * V, (row + rows < limit)[:, None]
        wide, narrow = block * (ROWS * K), block * (ROWS * ROWS)
        if (i % GROUP == GROUP - 1) | (i == num_tiles - 1):
            group = (first_group + i // GROUP) * H + head
            tl.store(d_states_ptr + group * (K * V) + keys[None, :] * V + values[:, None], d_state.to(D))
        d_error, d_state = retreat(
            d_state,
            tl.load(d_out_ptr + begin + at, mask=valid, other=0.0).to(D),
            tl.load(k_decay_ptr + wide + whole),
            tl.load(q_decay_ptr + wide + whole),
            tl.load(k_end_ptr + wide + whole),
            tl.load(inverse_ptr + narrow + square),
            tl.load(scores_ptr + narrow + square),
            tl.load(end_ptr + block * K + keys),
            D,
            EXACT,
        )
        tl.store(d_v_ptr + begin + at, tl.trans(d_error).to(D), mask=valid)
    return d_state


@triton.jit
def reverse_kernel(
    d_out_ptr,  # [T, H, V]
    k_decay_ptr,  # factors as prepare_kernel and invert_kernel leave them
    q_decay_ptr,
    k_end_ptr,
    inverse_ptr,
    scores_ptr,
    end_ptr,
    d_v_ptr,  # [T, H, V]
    d_states_ptr,  # [groups, H, K, V] after each group
    d_final_ptr,  # [N, H, K, V] float32, of the state after `stops` tiles
    d_initial_ptr,  # [N, H, K, V] float32
    stops_ptr,
    cu_seqlens_ptr,
    first_tiles_ptr,
    first_groups_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of values and state of one sequence and head, for a block of values."""
    blocks: tl.constexpr = V // BV
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    sequence, head = pair // H, pair % H
    keys, values = tl.arange(0, K), (tl.program_id(0) % blocks) * BV + tl.arange(0, BV)
    start, limit = tl.load(cu_seqlens_ptr + sequence), tl.load(cu_seqlens_ptr + sequence + 1)
    first_tile, first_group = tl.load(first_tiles_ptr + sequence), tl.load(first_groups_ptr + sequence)
    num_tiles = (tl.load(first_tiles_ptr + sequence + 1) - first_tile).to(tl.int32)
    stop = tl.load(stops_ptr + sequence).to(tl.int32)
    at = pair * K * V + keys[None, :] * V + values[:, None]
    d_state = reverse_tiles(
        tl.zeros([BV, K], tl.float32), stop, num_tiles, num_tiles, first_tile, first_group, start, limit, head, values,
        d_out_ptr, k_decay_ptr, q_decay_ptr, k_end_ptr, inverse_ptr, scores_ptr, end_ptr, d_v_ptr, d_states_ptr, H, K,
        V, GROUP, EXACT, STAGES,
    )  # fmt: skip
    d_state = reverse_tiles(
        d_state + tl.load(d_final_ptr + at), 0, stop, num_tiles, first_tile, first_group, start, limit, head, values,
        d_out_ptr, k_decay_ptr, q_decay_ptr, k_end_ptr, inverse_ptr, scores_ptr, end_ptr, d_v_ptr, d_states_ptr, H, K,
        V, GROUP, EXACT, STAGES,
    )  # fmt: skip
    tl.store(d_initial_ptr + at, d_state)


@triton.jit
def factors_kernel(
    states_ptr,  # [groups, H, K, V] before each group
    d_states_ptr,  # [groups, H, K, V] after each group
    d_final_ptr,
    delta_ptr,  # [T, H, V]
    d_out_ptr,  # [T, H, V]
    d_v_ptr,  # [T, H, V]
    k_decay_ptr,
    q_decay_ptr,
    k_end_ptr,
    end_ptr,
    d_k_decay_ptr,  # [tiles, H, R, K] and so the next two
    d_q_decay_ptr,
    d_k_end_ptr,
    d_end_ptr,  # [tiles, H, K] float32
    d_scores_ptr,  # [tiles, H, R, R] float32: ∂O Δᵀ
    d_alike_ptr,  # [tiles, H, R, R] float32: -∂E Δᵀ
    groups_ptr,  # [groups] int64 sequence of each, N where there is no group
    stops_ptr,
    cu_seqlens_ptr,
    first_tiles_ptr,
    first_groups_ptr,
    num_sequences,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of the factors of a group's tiles, for one head and a block of key channels."""
    blocks: tl.constexpr = K // BK
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    part = tl.program_id(0) % blocks
    group, head = pair // H, pair % H
    sequence = tl.load(groups_ptr + group)
    if sequence == num_sequences:
        return
    D: tl.constexpr = k_decay_ptr.dtype.element_ty
    first = (group - tl.load(first_groups_ptr + sequence)).to(tl.int32) * GROUP
    first_tile, start = tl.load(first_tiles_ptr + sequence), tl.load(cu_seqlens_ptr + sequence)
    limit = tl.load(cu_seqlens_ptr + sequence + 1)
    num_tiles = (tl.load(first_tiles_ptr + sequence + 1) - first_tile).to(tl.int32)
    count, stop = tl.minimum(num_tiles - first, GROUP), tl.load(stops_ptr + sequence).to(tl.int32)
    rows, keys, values = tl.arange(0, ROWS), part * BK + tl.arange(0, BK), tl.arange(0, V)
    whole, square = rows[:, None] * K + keys[None, :], rows[:, None] * ROWS + rows[None, :]
    at, across = (rows * (H * V))[:, None] + values[None, :], keys[:, None] * V + values[None, :]
    d_state = tl.load(d_states_ptr + pair * (K * V) + across).to(tl.float32)
    for step in tl.range(0, count, num_stages=1):
        i = first + count - 1 - step
        if (i + 1 == stop) & (step > 0):
            d_state += tl.load(d_final_ptr + (sequence * H + head) * (K * V) + across)
        # From the group's first state again: to keep every state of the group would cost more than its few products.
        state = tl.load(states_ptr + pair * (K * V) + across).to(tl.float32)
        for j in tl.range(first, i, num_stages=STAGES):
            block, row = (first_tile + j) * H + head, start + j * ROWS
            delta = tl.load(delta_ptr + (row * H + head) * V + at, mask=(row + rows < limit)[:, None], other=0.0)
            k_end = tl.load(k_end_ptr + block * (ROWS * K) + whole)
            end = tl.load(end_ptr + block * K + keys)
            state = tl.dot(tl.trans(k_end), delta, acc=state * end[:, None], input_precision=EXACT)
        block, row = (first_tile + i) * H + head, start + i * ROWS
        begin, valid = (row * H + head) * V, (row + rows < limit)[:, None]
        wide, narrow = block * (ROWS * K), block * (ROWS * ROWS)
        d_out = tl.load(d_out_ptr + begin + at, mask=valid, other=0.0).to(D)
        d_error = tl.load(d_v_ptr + begin + at, mask=valid, other=0.0)
        delta = tl.load(delta_ptr + begin + at, mask=valid, other=0.0)
        tl.store(d_end_ptr + block * K + keys, tl.sum(state * d_state, 1))
        narrow_state = state.to(D)
        d_q_decay = tl.dot(narrow_state, tl.trans(d_out), input_precision=EXACT)
        d_k_decay = -tl.dot(narrow_state, tl.trans(d_error), input_precision=EXACT)
        tl.store(d_q_decay_ptr + wide + whole, tl.trans(d_q_decay.to(D)))
        tl.store(d_k_decay_ptr + wide + whole, tl.trans(d_k_decay.to(D)))
        d_k_end = tl.dot(d_state.to(D), tl.trans(delta), input_precision=EXACT)
        tl.store(d_k_end_ptr + wide + whole, tl.trans(d_k_end.to(D)))
        if part == 0:
            tl.store(d_scores_ptr + narrow + square, tl.dot(d_out, tl.trans(delta), input_precision=EXACT))
            tl.store(d_alike_ptr + narrow + square, -tl.dot(d_error, tl.trans(delta), input_precision=EXACT))
        end = tl.load(end_ptr + block * K + keys)
        q_decay, k_decay = tl.load(q_decay_ptr + wide + whole), tl.load(k_decay_ptr + wide + whole)
        d_state = tl.dot(tl.trans(q_decay), d_out, acc=d_state * end[:, None], input_precision=EXACT)
        d_state = tl.dot(tl.trans(-k_decay), d_error, acc=d_state, input_precision=EXACT)


@triton.jit
def finish_kernel(
    q_ptr,  # [T, H, K]
    k_ptr,  # [T, H, K]
    z_ptr,  # [T, H, K]
    b_ptr,  # [T, H]
    rate_ptr,  # [H] A_log, float32
    bias_ptr,  # [H, K] float32
    cu_seqlens_ptr,
    first_tiles_ptr,
    sequences_ptr,
    end_ptr,
    d_k_decay_ptr,
    d_q_decay_ptr,
    d_k_end_ptr,
    d_end_ptr,
    d_scores_ptr,
    d_alike_ptr,
    d_q_ptr,  # [T, H, K]
    d_k_ptr,  # [T, H, K]
    d_z_ptr,  # [T, H, K]
    d_b_ptr,  # [T, H]
    d_rate_ptr,  # [tiles, H] float32, each tile's share
    d_bias_ptr,  # [tiles, H, K] float32, each tile's share
    num_sequences,
    scale,
    lower_bound,
    H: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """From gradients of one tile's factors to those of its inputs."""
    tile, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    block = tile * H + head
    rows = tl.arange(0, ROWS)
    sequence = tl.load(sequences_ptr + tile)
    if sequence == num_sequences:
        tl.store(d_rate_ptr + block, 0.0)
        tl.store(d_bias_ptr + block * K + tl.arange(0, K), tl.zeros([K], tl.float32))
        return
    start = tl.load(cu_seqlens_ptr + sequence) + (tile - tl.load(first_tiles_ptr + sequence)) * ROWS
    limit = tl.load(cu_seqlens_ptr + sequence + 1)
    valid = start + rows < limit
    begin = start * H + head
    counts, narrow = valid[:, None], rows[:, None] * ROWS + rows[None, :]
    d_scores = tl.load(d_scores_ptr + block * (ROWS * ROWS) + narrow)
    d_alike = tl.load(d_alike_ptr + block * (ROWS * ROWS) + narrow)
    same = rows[:, None] == rows[None, :]
    # ∂β = ∂E · Δ / β², times β (1 - β) of the sigmoid, is ∂E · Δ exp(-b).
    b = tl.load(b_ptr + begin + rows * H, mask=valid, other=0.0).to(tl.float32)
    d_b = -tl.sum(tl.where(same, d_alike, 0.0), 1) * tl.where(b > -80.0, tl.exp(-b), 0.0)
    tl.store(d_b_ptr + begin + rows * H, d_b.to(d_b_ptr.dtype.element_ty), mask=valid)
    d_same = tl.sum(tl.where(same, d_scores, 0.0), 1)[:, None]
    before = rows[:, None] > rows[None, :]
    d_scores, d_alike = tl.where(before, d_scores, 0.0), tl.where(before, d_alike, 0.0)
    # Times exp(c), as small as e^-80, a gradient of a long batch would leave float32's range.
    peak = tl.max(tl.max(tl.maximum(tl.abs(d_scores), tl.abs(d_alike)), 1), 0)
    power = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.where(power == 0.0, 1.0, power)
    d_scores, d_alike = d_scores / power, d_alike / power

    # Nothing decays between the last row and the tile's end, nor does rounding error of it have to cancel.
    last = ((rows == ROWS - 1) | (start + rows == limit - 1))[:, None]
    rate, d_rate = tl.exp(tl.load(rate_ptr + head)), tl.zeros([ROWS], tl.float32)
    q_square, k_square = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for part in range(K // BK):
        at = (rows * (H * K))[:, None] + (part * BK + tl.arange(0, BK))[None, :]
        q = tl.load(q_ptr + begin * K + at, mask=counts, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + begin * K + at, mask=counts, other=0.0).to(tl.float32)
        q_square += tl.sum(q * q, 1)
        k_square += tl.sum(k * k, 1)
    q_length, k_length = tl.rsqrt(q_square + 1e-6), tl.rsqrt(k_square + 1e-6)
    q_along, k_along = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for part in range(K // BK):
        keys = part * BK + tl.arange(0, BK)
        at = (rows * (H * K))[:, None] + keys[None, :]
        wide = block * (ROWS * K) + rows[:, None] * K + keys[None, :]
        z = tl.load(z_ptr + begin * K + at, mask=counts, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + head * K + keys)
        gate, slope = gate_rows(z, rate, bias)
        decay, growth = decays(gate, lower_bound, valid)
        q = tl.load(q_ptr + begin * K + at, mask=counts, other=0.0).to(tl.float32) * (q_length * scale)[:, None]
        k = tl.load(k_ptr + begin * K + at, mask=counts, other=0.0).to(tl.float32) * k_length[:, None]
        # The power of two comes last: it is what keeps the product before it in range.
        d_q = decay * tl.dot(d_scores, k * growth, input_precision=EXACT) * power
        d_q += decay * tl.load(d_q_decay_ptr + wide).to(tl.float32)
        d_left = decay * tl.dot(d_alike, k * growth, input_precision=EXACT) * power
        d_left += decay * tl.load(d_k_decay_ptr + wide).to(tl.float32)
        d_right = tl.dot(tl.trans(d_scores), q * decay, input_precision=EXACT)
        d_right = tl.dot(tl.trans(d_alike), k * decay, acc=d_right, input_precision=EXACT)
        d_right = growth * d_right * power
        end = tl.load(end_ptr + block * K + keys)
        d_last = growth * end[None, :] * tl.load(d_k_end_ptr + wide).to(tl.float32)
        d_end = tl.load(d_end_ptr + block * K + keys)
        d_fall = tl.where(last, 0.0, k * d_last)
        to_last = tl.sum(d_fall, 0) + end * d_end
        d_g = tl.cumsum(q * d_q + k * (d_left - d_right) - d_fall, 0, reverse=True) + to_last[None, :]
        d_q += d_same * k
        d_k = d_left + d_right + d_last + d_same * q
        q_along += tl.sum(q * d_q, 1)
        k_along += tl.sum(k * d_k, 1)
        tl.store(d_q_ptr + begin * K + at, d_q.to(d_q_ptr.dtype.element_ty), mask=counts)
        tl.store(d_k_ptr + begin * K + at, d_k.to(d_k_ptr.dtype.element_ty), mask=counts)
        # Where the sigmoid is flat the gradient is 0, however large the rate.
        moves = (slope != 0.0) & counts
        d_inner = lower_bound * slope * d_g
        d_z = d_inner * tl.where(moves, rate, 0.0)
        tl.store(d_z_ptr + begin * K + at, d_z.to(d_z_ptr.dtype.element_ty), mask=counts)
        tl.store(d_bias_ptr + block * K + keys, tl.sum(d_z, 0))
        d_rate += tl.sum(d_z * (z + bias[None, :]), 1)
    tl.store(d_rate_ptr + block, tl.sum(d_rate, 0))
    # What a row would gain along itself its norm takes away; that is known now that all channels are.
    q_along /= scale * scale
    tl.debug_barrier()
    for part in range(K // BK):
        at = (rows * (H * K))[:, None] + (part * BK + tl.arange(0, BK))[None, :]
        q = tl.load(q_ptr + begin * K + at, mask=counts, other=0.0).to(tl.float32) * (q_length * scale)[:, None]
        d_q = tl.load(d_q_ptr + begin * K + at, mask=counts, other=0.0).to(tl.float32)
        d_q = (q_length * scale)[:, None] * (d_q - q * q_along[:, None])
        tl.store(d_q_ptr + begin * K + at, d_q.to(d_q_ptr.dtype.element_ty), mask=counts)
        k = tl.load(k_ptr + begin * K + at, mask=counts, other=0.0).to(tl.float32) * k_length[:, None]
        d_k = tl.load(d_k_ptr + begin * K + at, mask=counts, other=0.0).to(tl.float32)
        d_k = k_length[:, None] * (d_k - k * k_along[:, None])
        tl.store(d_k_ptr + begin * K + at, d_k.to(d_k_ptr.dtype.element_ty), mask=counts)
