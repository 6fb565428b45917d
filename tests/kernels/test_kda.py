"""KDA against its token recurrence."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from k3rl.kernels.kda import (
    join_spans,
    kda_decode,
    kda_gate,
    kda_recurrent,
    kda_softplus_gate,
    kda_span,
    kda_tiles,
    l2norm,
    short_conv,
)

Form = Callable[..., tuple[torch.Tensor, torch.Tensor]]
K, V = 16, 32  # unequal, so that a transposed state is a shape error (B50)


def _inputs(length: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = normal(2, length, 2, K), normal(2, length, 2, K), normal(2, length, 2, V)
    return [q, k, v, normal(2, length, 2, K), normal(2, length, 2), normal(2, 2, K, V), normal(2), normal(2, K)]


def _run(
    form: Form, leaves: list[torch.Tensor], with_state: bool, bounded: bool = True, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, z, b, state, a_log, dt_bias = leaves
    # Without a bound, decay down to exp(-200) a token: any ratio of two rows' decay overflows.
    g = kda_gate(z, a_log, dt_bias, -5.0) if bounded else kda_softplus_gate(40 * z, a_log, dt_bias)
    if form is kda_tiles:
        options["bounded"] = bounded
    initial = state if with_state else None
    return form(l2norm(q) * K**-0.5, l2norm(k), v, g, torch.sigmoid(b), initial, **options)


def _gradients(
    form: Form, inputs: list[torch.Tensor], with_state: bool, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, state = _run(form, leaves, with_state, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    ((out * weights).sum() + (state * state).sum()).backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return out.detach(), state.detach(), grads


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 130])
def test_tiles_equal_the_recurrence_with_all_gradients(length: int, with_state: bool, tile: int, bounded: bool) -> None:
    inputs = _inputs(length)
    want = _gradients(kda_recurrent, inputs, with_state, bounded=bounded)
    got = _gradients(kda_tiles, inputs, with_state, bounded=bounded, tile=tile)
    for a, b in zip((got[0], got[1], *got[2]), (want[0], want[1], *want[2]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("with_state", [False, True])
def test_float32_tiles_equal_the_float64_recurrence_at_1000_tokens(with_state: bool) -> None:
    want = _gradients(kda_recurrent, _inputs(1000), with_state)
    got = _gradients(kda_tiles, _inputs(1000, torch.float32), with_state)
    for a, b in zip((got[0], got[1], *got[2]), (want[0], want[1], *want[2]), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 65])
def test_later_tokens_change_no_bit_of_earlier_outputs(length: int, bounded: bool) -> None:
    q, k, v, z, b, state = _inputs(130, torch.float32)[:6]
    g = -5 * torch.sigmoid(z) if bounded else -(40 * z).exp().clamp(max=1e4)
    rows: Any = [l2norm(q), l2norm(k), v, g, torch.sigmoid(b)]
    form = partial(kda_tiles, initial_state=state, bounded=bounded)
    whole = form(*rows)[0]
    assert whole.isfinite().all()
    assert torch.equal(form(*(x[:, :length] for x in rows))[0], whole[:, :length])
    changed: Any = [torch.cat([x[:, :length], 0.5 * x[:, length:]], 1) for x in rows]
    assert torch.equal(form(*changed)[0][:, :length], whole[:, :length])


def test_masked_rows_change_neither_the_state_nor_a_gradient() -> None:
    inputs = _inputs(20)
    q, k, v, z, b, state = inputs[:6]
    g, beta = -torch.rand_like(z), torch.sigmoid(b)
    leaves: Any = [x.requires_grad_() for x in (q, k, v, g, beta, state)]
    padded: Any = [torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, 30)) for x in leaves[:5]]
    plain, long = kda_tiles(*leaves[:5], initial_state=state), kda_tiles(*padded, initial_state=state)
    torch.testing.assert_close(plain[1], long[1])
    a = torch.autograd.grad(plain[1].square().sum() + plain[0].sum(), leaves)
    b = torch.autograd.grad(long[1].square().sum() + long[0].sum(), leaves)
    torch.testing.assert_close(a, b)


def test_b40_recurrence_starts_afresh_at_a_boundary() -> None:
    ones = torch.ones(2, 2, 1, 1)
    v = torch.tensor([[2.0, 4.0], [8.0, 0.0]]).view(2, 2, 1, 1)
    g, beta = torch.full((2, 2, 1, 1), math.log(0.5)), torch.full((2, 2, 1), 0.5)
    for form in (kda_recurrent, kda_tiles):
        out = form(ones, ones, v, g, beta)[0].flatten()
        torch.testing.assert_close(out[:3], torch.tensor([1.0, 2.25, 4.0]))


def test_b40_recurrence_that_does_not_start_afresh_leaks() -> None:
    """What the numbers of the test above would be without the boundary: they can tell."""
    ones, v = torch.ones(1, 3, 1, 1), torch.tensor([2.0, 4.0, 8.0]).view(1, 3, 1, 1)
    g, beta = torch.full((1, 3, 1, 1), math.log(0.5)), torch.full((1, 3, 1), 0.5)
    for form in (kda_recurrent, kda_tiles):
        torch.testing.assert_close(form(ones, ones, v, g, beta)[0].flatten(), torch.tensor([1.0, 2.25, 4.5625]))


def test_b40_convolution_sees_no_token_of_its_neighbour() -> None:
    weight = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    x = torch.arange(1.0, 6.0).unsqueeze(1)
    out, window = short_conv(x, weight, torch.tensor([0, 3, 5]))
    assert out.flatten().tolist() == [1000, 2100, 3210, 4000, 5400]
    assert window.squeeze(-1).tolist() == [[1, 2, 3], [0, 4, 5]]
    out, _ = short_conv(x[3:], weight, torch.tensor([0, 2]), window[:1])
    assert out.flatten().tolist() == [4321, 5432]


@pytest.mark.parametrize("gate", [-5.0, 0.0, None])
@pytest.mark.parametrize("length", [64, 130])
def test_b46_extreme_gates_have_finite_and_right_gradients(length: int, gate: float | None) -> None:
    inputs = _inputs(length)
    g = torch.where(inputs[3] > 0, -5.0, 0.0).double() if gate is None else torch.full_like(inputs[3], gate)
    args = [l2norm(inputs[0]), l2norm(inputs[1]), inputs[2], g, torch.sigmoid(inputs[4]), inputs[5]]
    results = []
    for form, dtype in ((kda_recurrent, torch.float64), (kda_tiles, torch.float32)):
        leaves: Any = [x.to(dtype).requires_grad_() for x in args]
        out, state = form(*leaves)
        results.append([out, state, *torch.autograd.grad(out.square().sum() + state.square().sum(), leaves)])
    for want, got in zip(*results, strict=True):
        assert torch.isfinite(got).all()
        assert (got - want).norm() <= 1e-4 * want.norm()


def test_b46_an_overflowing_rate_has_gradient_zero() -> None:
    z = torch.tensor([[[1.0, -1.0, 2.0]]], requires_grad=True)
    a_log = torch.tensor([100.0], requires_grad=True)
    bias = torch.zeros(1, 3, requires_grad=True)
    for grad in torch.autograd.grad(kda_gate(z, a_log, bias, -5.0).sum(), (z, a_log, bias)):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_b47_gate_is_a_scaled_sigmoid_and_not_a_softplus() -> None:
    gate = kda_gate(torch.tensor([[0.0], [2.0]]), torch.tensor([0.0, math.log(2)]), torch.zeros(2, 1), -5.0)
    torch.testing.assert_close(gate.flatten(), torch.tensor([-2.5, -4.910069]))


def test_b50_prefill_then_decode_equals_prefill_and_unknown_keywords_are_refused() -> None:
    for length in (1, 15, 64, 65):
        inputs = _inputs(length + 8)
        whole, final = _run(kda_tiles, inputs, True)
        state = _run(kda_tiles, [*(x[:, :length] for x in inputs[:5]), *inputs[5:]], True)[1]
        for t in range(length, length + 8):
            row = [x[:, t : t + 1] for x in inputs[:5]]
            out, state = _run(kda_tiles, [*row, state, *inputs[6:]], True)
            torch.testing.assert_close(out[:, 0], whole[:, t])
        torch.testing.assert_close(state, final)
    with pytest.raises(TypeError):
        _run(kda_tiles, _inputs(1), True, transpose_state=True)


def test_b50_a_square_state_is_keys_by_values_when_it_is_read_and_when_it_is_written() -> None:
    """Rows by columns are keys by values; with K = V nothing but numbers tells a transposed state."""
    inputs = _inputs(1)
    q, k, z, b = inputs[0], l2norm(inputs[1]), inputs[3], torch.sigmoid(inputs[4])
    v, state = inputs[2][..., :K], inputs[5][..., :K]
    g = -torch.rand_like(z)
    decayed = g[:, 0].exp().unsqueeze(-1) * state
    error = b[:, 0].unsqueeze(-1) * (v[:, 0] - (decayed * k[:, 0].unsqueeze(-1)).sum(-2))
    written = decayed + k[:, 0].unsqueeze(-1) * error.unsqueeze(-2)
    read = (written * q[:, 0].unsqueeze(-1)).sum(-2)
    for form in (kda_recurrent, kda_tiles):
        out, after = form(q, k, v, g, b, state)
        torch.testing.assert_close(out[:, 0], read)
        torch.testing.assert_close(after, written)
    by_head: Any = [x.transpose(1, 2) for x in (k, v, g, b.unsqueeze(-1))]
    out, after = kda_decode(q[:, 0], *by_head, state_NHKV=state)
    torch.testing.assert_close(out, read)
    torch.testing.assert_close(after, written)


def test_a_text_that_repeats_itself_costs_no_digits() -> None:
    inputs = _inputs(48, torch.float64)
    q, k, v, state = l2norm(inputs[0]), l2norm(inputs[1][:, :1]).expand_as(inputs[1]), inputs[2], inputs[5]
    g, beta = torch.full_like(inputs[3], -1e-3), torch.full_like(inputs[4], 0.999)
    want, _ = kda_recurrent(q, k, v, g, beta, state)
    got, _ = kda_tiles(*(x.float() for x in (q, k, v, g, beta)), initial_state=state.float())
    assert (got - want).norm() <= 2e-6 * want.norm()


@pytest.mark.parametrize("bounded", [True, False])
def test_decoding_a_row_gives_what_the_tiles_give(bounded: bool) -> None:
    q, k, v, z, b, state = _inputs(13, torch.float32)[:6]
    g, beta = -torch.rand_like(z) * (1 if bounded else 100), torch.sigmoid(b)
    rows = (l2norm(q), l2norm(k), v, g, beta)
    whole, _ = kda_tiles(*rows, initial_state=state, bounded=bounded)
    by_head: Any = [x.transpose(1, 2) for x in (*rows[1:4], beta.unsqueeze(-1))]
    last, _ = kda_decode(rows[0][:, -1], *by_head, state_NHKV=state, bounded=bounded)
    torch.testing.assert_close(last.reshape(whole[:, -1].shape), whole[:, -1], atol=2e-6, rtol=0)


def _rows(length: int, bounded: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _, k, v, z, b, _, a_log, dt_bias = _inputs(length)
    g = kda_gate(z, a_log, dt_bias, -5.0) if bounded else kda_softplus_gate(40 * z, a_log, dt_bias)
    return l2norm(k), v, g, torch.sigmoid(b)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("length", [1, 16, 37, 64])
def test_a_span_is_the_product_of_its_tokens_and_the_state_that_they_reach(length: int, bounded: bool) -> None:
    k, v, g, beta = _rows(length, bounded)
    carry = torch.eye(K, dtype=torch.float64).expand(2, 2, K, K)
    for t in range(length):  # (I - beta k k^T) diag(alpha), the newest on the left
        step = torch.eye(K, dtype=torch.float64) - beta[:, t, :, None, None] * k[:, t, :, :, None] * k[:, t, :, None, :]
        carry = (step * g[:, t].exp().unsqueeze(-2)) @ carry
    reached = kda_recurrent(k, k, v, g, beta)[1]
    torch.testing.assert_close(kda_span(k, v, g, beta, bounded), torch.cat([reached, carry], dim=-1))


@pytest.mark.parametrize("bounded", [True, False])
def test_joined_spans_leave_the_state_of_the_whole(bounded: bool) -> None:
    k, v, g, beta = _rows(101, bounded)
    ends = [slice(0, 16), slice(16, 64), slice(64, 101)]
    spans = [kda_span(k[:, at], v[:, at], g[:, at], beta[:, at], bounded) for at in ends]
    torch.testing.assert_close(join_spans(spans), kda_recurrent(k, k, v, g, beta)[1])
