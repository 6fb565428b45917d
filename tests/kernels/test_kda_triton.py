"""KDA's Triton kernels, interpreted, against the token recurrence in float64; and what Hopper makes of them."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from k3rl.config import load_model_config
from k3rl.kernels.kda import TilePlan, kda_chunk, kda_packed, kda_recurrent, kda_tiles
from k3rl.model.cache import ValueMemory
from k3rl.model.kda import KdaMixer

pytestmark = pytest.mark.usefixtures("triton_kernels")
MODELS = Path(__file__).parents[2] / "configs" / "model"
H, K, V = 2, 16, 32  # K unlike V, so that a transposed state is a shape error
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
NAMES = ("q", "k", "v", "z", "b", "A_log", "dt_bias", "initial_state")
SHIFTS = {"random": 0.0, "long memory": -8.5, "saturated": 12.0}


def _inputs(rows: int, dtype: torch.dtype = torch.float32, shift: float = 0.0, width: int = K) -> list[Any]:
    """q, k, v, z, b, A_log, dt_bias."""
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    wide = [normal(rows, H, width), normal(rows, H, width), normal(rows, H, V), normal(rows, H, width), normal(rows, H)]
    return [*(x.to(dtype) for x in wide), 0.3 * normal(H), normal(H, width) + shift]


def _doubled(inputs: list[Any]) -> list[Any]:
    return [x.double() for x in inputs]


def _rows(inputs: list[Any], length: int) -> list[Any]:
    """The same with the first ``length`` rows."""
    return [*(x[:length] for x in inputs[:5]), *inputs[5:]]


def _state(num: int, width: int = K) -> torch.Tensor:
    return torch.randn(num, H, width, V, generator=torch.Generator().manual_seed(num))


def _plan(*lengths: int) -> TilePlan:
    return TilePlan.make(torch.tensor([0, *lengths]).cumsum(0), sum(lengths))


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.norm())


def _weights(lengths: Sequence[int], dtype: torch.dtype, width: int = K, scale: float = 1.0) -> list[torch.Tensor]:
    """Gradients of outputs and of final states."""
    generator = torch.Generator().manual_seed(5)
    shapes = (sum(lengths), H, V), (len(lengths), H, width, V)
    out, state = (scale * torch.randn(*shape, generator=generator) for shape in shapes)
    return [out.to(dtype), state]


def _gradients(inputs: list[Any], weights: list[torch.Tensor], run: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Of the seven inputs and the initial state, through ``run``."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    results = run(*leaves[:7], initial_state=leaves[7], **options)
    torch.autograd.backward(results, [w.to(x.dtype) for w, x in zip(weights, results, strict=True)])
    return {name: x.grad for name, x in zip(NAMES, leaves, strict=True)}


def _gradient_errors(
    inputs: list[Any], lengths: Sequence[int], scale: float = 1.0, num_tiles: Sequence[int] | None = None
) -> dict[str, float]:
    """Against float64: the recurrence for one sequence, the tiles for several."""
    weights = _weights(lengths, inputs[0].dtype, inputs[0].shape[-1], scale)
    plan, stops = _plan(*lengths), None if num_tiles is None else torch.tensor(num_tiles)
    got = _gradients(inputs, weights, kda_chunk, plan=plan, num_tiles_N=stops)
    form = kda_recurrent if len(lengths) == 1 and stops is None else kda_tiles
    options = {"cu_seqlens": plan.cu_seqlens, "num_tiles_N": stops, "form": form}
    want = _gradients(_doubled(inputs), weights, kda_packed, **options)
    assert all(got[name].dtype == x.dtype for name, x in zip(NAMES, inputs, strict=True))
    return {name: _error(got[name], want[name]) for name in NAMES}


def _within(errors: dict[str, float], dtype: torch.dtype) -> bool:
    # Each number of these two sums products of both signs, and a test has few numbers of them.
    return all(e <= LIMIT[dtype] * (2.5 if name in ("b", "A_log") else 1) for name, e in errors.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 65])
@pytest.mark.parametrize("with_state", [False, True])
def test_one_sequence_is_the_recurrence_in_float64(length: int, dtype: torch.dtype, with_state: bool) -> None:
    inputs, state = _inputs(length, dtype), _state(1) if with_state else None
    out, final = kda_chunk(*inputs, plan=_plan(length), initial_state=state)
    wide = None if state is None else state.double()
    want = kda_packed(*_doubled(inputs), cu_seqlens=torch.tensor([0, length]), initial_state=wide, form=kda_recurrent)
    assert out.dtype == dtype
    assert final.dtype == torch.float32
    assert _error(out, want[0]) <= LIMIT[dtype]
    assert _error(final, want[1]) <= LIMIT[dtype]


@pytest.mark.parametrize("regime", SHIFTS)
@pytest.mark.parametrize("width", [16, 64])
def test_gates_of_every_regime_lose_no_digits(regime: str, width: int) -> None:
    inputs, state = _inputs(40, shift=SHIFTS[regime], width=width), _state(1, width)
    out, final = kda_chunk(*inputs, plan=_plan(40), initial_state=state)
    want = kda_packed(
        *_doubled(inputs), cu_seqlens=torch.tensor([0, 40]), initial_state=state.double(), form=kda_recurrent
    )
    assert _error(out, want[0]) <= 1e-5
    assert _error(final, want[1]) <= 1e-5


def test_a_text_that_repeats_itself_costs_no_digits() -> None:
    inputs = _inputs(48, shift=-8.5)
    inputs[1] = inputs[1][:1].expand(48, H, K).contiguous()
    inputs[4] = torch.full_like(inputs[4], 7.0)
    out, _ = kda_chunk(*inputs, plan=_plan(48))
    want = kda_packed(*_doubled(inputs), cu_seqlens=torch.tensor([0, 48]), form=kda_recurrent)
    assert _error(out, want[0]) <= 2e-6


@pytest.mark.parametrize("lengths", [(1, 15, 16, 17, 33), (0, 5, 0, 0, 20, 0), (64,)])
def test_a_packed_sequence_is_bitwise_what_it_is_alone(lengths: Sequence[int]) -> None:
    inputs, state = _inputs(sum(lengths)), _state(len(lengths))
    out, final = kda_chunk(*inputs, plan=_plan(*lengths), initial_state=state)
    begin = 0
    for n, length in enumerate(lengths):
        part: Any = [x[begin : begin + length] for x in inputs[:5]]
        if length:
            alone, last = kda_chunk(*part, *inputs[5:], plan=_plan(length), initial_state=state[n : n + 1])
            assert torch.equal(alone, out[begin : begin + length])
            assert torch.equal(last[0], final[n])
        else:
            assert torch.equal(final[n], state[n])
        begin += length


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_later_tokens_change_no_bit_of_earlier_outputs(length: int) -> None:
    inputs = _inputs(50)
    whole, _ = kda_chunk(*inputs, plan=_plan(50))
    assert torch.equal(kda_chunk(*_rows(inputs, length), plan=_plan(length))[0], whole[:length])
    changed: Any = [torch.cat([x[:length], -2 * x[length:]]) for x in inputs[:5]]
    assert torch.equal(kda_chunk(*changed, *inputs[5:], plan=_plan(50))[0][:length], whole[:length])


def test_a_sequence_goes_on_bitwise_from_the_state_at_a_tile() -> None:
    inputs = _inputs(70)
    whole, final = kda_chunk(*inputs, plan=_plan(70))
    _, middle = kda_chunk(*inputs, plan=_plan(70), num_tiles_N=torch.tensor([2]))
    rest: Any = [x[32:] for x in inputs[:5]]
    out, last = kda_chunk(*rest, *inputs[5:], plan=_plan(38), initial_state=middle)
    assert torch.equal(out, whole[32:])
    assert torch.equal(last, final)


def test_an_overflowing_rate_gives_finite_outputs() -> None:
    inputs = _inputs(20)
    inputs[5] = torch.tensor([100.0, -100.0])
    out, final = kda_chunk(*inputs, plan=_plan(20))
    want = kda_packed(*_doubled(inputs), cu_seqlens=torch.tensor([0, 20]))
    assert _error(out, want[0]) <= 1e-5
    assert _error(final, want[1]) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 70])
def test_gradients_are_the_recurrences_in_float64(length: int, dtype: torch.dtype) -> None:
    errors = _gradient_errors([*_inputs(length, dtype), _state(1)], [length])
    assert _within(errors, dtype), errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("regime", SHIFTS)
def test_gradients_at_gates_of_every_regime_lose_no_digits(regime: str, dtype: torch.dtype) -> None:
    errors = _gradient_errors([*_inputs(40, dtype, SHIFTS[regime], 64), _state(1, 64)], [40])
    assert _within(errors, dtype), errors


def test_no_digit_is_lost_at_the_strongest_gate_that_is_taken() -> None:
    inputs, weights, plan = [*_inputs(20, shift=50.0), _state(1)], _weights([20], torch.float32), _plan(20)
    out, final = kda_chunk(*inputs[:7], initial_state=inputs[7], plan=plan, lower_bound=-5.4)
    options: dict[str, Any] = {"cu_seqlens": plan.cu_seqlens, "form": kda_recurrent, "lower_bound": -5.4}
    wide = _doubled(inputs)
    want = kda_packed(*wide[:7], initial_state=wide[7], **options)
    assert _error(out, want[0]) <= 1e-5
    assert _error(final, want[1]) <= 1e-5
    got = _gradients(inputs, weights, kda_chunk, plan=plan, lower_bound=-5.4)
    against = _gradients(wide, weights, kda_packed, **options)
    assert all(_error(got[name], against[name]) <= 1e-5 for name in ("q", "k", "v", "b", "initial_state"))


@pytest.mark.parametrize("scale", [1e-12, 1e6])
def test_gradients_keep_their_digits_at_the_gates_bound_however_small_or_large(scale: float) -> None:
    errors = _gradient_errors([*_inputs(20, shift=SHIFTS["saturated"]), _state(1)], [20], scale)
    assert _within(errors, torch.float32), errors


@pytest.mark.parametrize("num_tiles", [None, (0, 0, 4, 1, 0, 2)])
def test_gradients_of_packed_sequences_and_of_a_state_at_any_tile(num_tiles: Sequence[int] | None) -> None:
    lengths = (5, 0, 80, 16, 0, 33)
    errors = _gradient_errors([*_inputs(sum(lengths)), _state(len(lengths))], lengths, num_tiles=num_tiles)
    assert _within(errors, torch.float32), errors


def test_gradients_of_a_text_that_repeats_itself() -> None:
    inputs = _inputs(48, shift=-8.5)
    inputs[1] = inputs[1][:1].expand(48, H, K).contiguous()
    inputs[4] = torch.full_like(inputs[4], 7.0)
    errors = _gradient_errors([*inputs, _state(1)], [48])
    assert _within(errors, torch.float32), errors


def test_gradients_are_finite_and_right_at_an_overflowing_rate_empty_rows_and_a_beta_of_zero() -> None:
    inputs = [*_inputs(20), _state(1)]
    inputs[5] = torch.tensor([100.0, 0.0])
    inputs[0][3], inputs[1][5], inputs[4][7], inputs[4][8] = 0.0, 0.0, -200.0, 200.0
    weights, plan = _weights([20], torch.float32), _plan(20)
    got = _gradients(inputs, weights, kda_chunk, plan=plan)
    want = _gradients(_doubled(inputs), weights, kda_packed, cu_seqlens=plan.cu_seqlens)
    assert all(_error(got[name], want[name]) <= 1e-5 for name in NAMES)


def test_gradients_of_a_packed_sequence_are_bitwise_what_they_are_alone() -> None:
    lengths, begin = (1, 0, 17, 70, 16), 0
    inputs, weights = [*_inputs(sum(lengths)), _state(len(lengths))], _weights(lengths, torch.float32)
    packed = _gradients(inputs, weights, kda_chunk, plan=_plan(*lengths))
    for n, length in enumerate(lengths):
        rows, state = slice(begin, begin + length), slice(n, n + 1)
        if length:
            part = [*(x[rows] for x in inputs[:5]), *inputs[5:7], inputs[7][state]]
            alone = _gradients(part, [weights[0][rows], weights[1][state]], kda_chunk, plan=_plan(length))
            assert all(torch.equal(alone[name], packed[name][rows]) for name in NAMES[:5])
            assert torch.equal(alone["initial_state"], packed["initial_state"][state])
        else:
            assert torch.equal(packed["initial_state"][state], weights[1][state])
        begin += length


@pytest.mark.parametrize("length", [15, 16, 33])
def test_later_tokens_without_a_loss_change_no_bit_of_earlier_gradients(length: int) -> None:
    inputs, weights = [*_inputs(50), _state(1)], _weights([50], torch.float32)
    weights = [torch.cat([weights[0][:length], torch.zeros(50 - length, H, V)]), torch.zeros_like(weights[1])]
    whole = _gradients(inputs, weights, kda_chunk, plan=_plan(50))
    changed = [*(torch.cat([x[:length], -2 * x[length:]]) for x in inputs[:5]), *inputs[5:]]
    others = _gradients(changed, weights, kda_chunk, plan=_plan(50))
    shorter = [*_rows(inputs[:7], length), inputs[7]]
    alone = _gradients(shorter, [weights[0][:length], weights[1]], kda_chunk, plan=_plan(length))
    for name in NAMES[:5]:
        assert torch.equal(whole[name][:length], others[name][:length])
        assert torch.equal(whole[name][:length], alone[name])
        assert not whole[name][length:].any()
    assert torch.equal(whole["initial_state"], alone["initial_state"])


def test_gradients_read_nothing_that_was_not_written_and_repeat_bitwise(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (20, 0, 70)
    inputs, weights = [*_inputs(90), _state(3)], _weights(lengths, torch.float32)
    want = _gradients(inputs, weights, kda_chunk, plan=_plan(*lengths))

    def poisoned(make: Any) -> Any:
        def run(*args: Any, **options: Any) -> torch.Tensor:
            made = make(*args, **options)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        return run

    for owner, name in ((torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    got = _gradients(inputs, weights, kda_chunk, plan=_plan(*lengths))
    assert all(torch.equal(got[name], want[name]) for name in NAMES)


def test_what_needs_no_gradient_gets_none() -> None:
    inputs = _inputs(20)
    inputs[2].requires_grad_()
    kda_chunk(*inputs, plan=_plan(20))[0].sum().backward()
    assert [x.grad is None for x in inputs] == [True, True, False, True, True, True, True]


NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python names from 3.13 on


def _sparse(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory where they are touched."""
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def test_rows_whose_offset_needs_more_than_32_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # fla#1080: 2^31 elements from the first row to these; values reach 2^32.
    length, far = 20, 2**31 // (H * K) + 8
    inputs, weights = [*_inputs(length), _state(1)], _weights([length], torch.float32)
    want = _gradients(inputs, weights, kda_chunk, plan=_plan(length))
    out, _ = kda_chunk(*inputs[:7], initial_state=inputs[7], plan=_plan(length))

    def shift(rows: torch.Tensor) -> torch.Tensor:
        moved = _sparse((far + length, *rows.shape[1:]), rows.dtype)
        moved[far:] = rows
        return moved

    monkeypatch.setattr(torch, "empty_like", lambda x: _sparse(x.shape, x.dtype))
    plan = dataclasses.replace(_plan(length), cu_seqlens=torch.tensor([far, far + length]))
    leaves = [shift(x).requires_grad_() if i < 5 else x.clone().requires_grad_() for i, x in enumerate(inputs)]
    moved, final = kda_chunk(*leaves[:7], initial_state=leaves[7], plan=plan)
    got = torch.autograd.grad([moved, final], leaves, [shift(weights[0]), weights[1]])
    assert torch.equal(moved[far:], out)
    for i, name in enumerate(NAMES):
        assert torch.equal(got[i][far:] if i < 5 else got[i], want[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mixer_trains_through_the_kernels_as_through_the_reference(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(
        load_model_config(MODELS / "k3_tiny.yaml"), kda_key_dim=K, kda_value_dim=V, num_heads=H
    )
    generator = torch.Generator().manual_seed(6)
    mixer, bounds = KdaMixer(config, 0), torch.tensor([0, 5, 5, 38])
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    inputs, weights = torch.randn(2, 38, config.hidden_size, generator=generator)

    def results(backend: str, dtype: torch.dtype) -> list[Any]:
        monkeypatch.setenv("K3RL_KERNELS", backend)
        layer = copy.deepcopy(mixer).to(dtype)
        leaf = inputs.to(dtype).requires_grad_()
        out = layer(leaf, ValueMemory.fresh(config, bounds))
        out.backward(weights.to(dtype))
        return [out.detach(), leaf.grad, *(p.grad for p in layer.parameters())]

    want = results("reference", torch.float64)
    got, plain = results("triton", dtype), results("reference", dtype)
    for x, y, w in zip(got, plain, want, strict=True):
        # In bf16 the projections round as well: the kernels may not add to that.
        assert _error(x, w) <= max(2e-5 if dtype == torch.float32 else 0.0, 1.5 * _error(y, w))


def test_what_the_kernels_do_not_take_is_named() -> None:
    inputs = _inputs(4)
    with pytest.raises(ValueError, match=r"\(K, V\) is \(12, 32\), supported is each one of"):
        kda_chunk(inputs[0][..., :12], *inputs[1:], plan=_plan(4))
    with pytest.raises(ValueError, match=r"q's type is torch.float16, supported is bfloat16 and float32"):
        kda_chunk(inputs[0].half(), *inputs[1:], plan=_plan(4))
    with pytest.raises(ValueError, match=r"k must be \(4, 2, 16\)"):
        kda_chunk(inputs[0], inputs[1][:3], *inputs[2:], plan=_plan(4))
    with pytest.raises(ValueError, match=r"lower_bound must lie in \(-5.8, 0\)"):
        kda_chunk(*inputs, plan=_plan(4), lower_bound=-6.0)
    with pytest.raises(ValueError, match=r"lower_bound is -5.5, supported is -5.4 and above"):
        kda_chunk(*inputs, plan=_plan(4), lower_bound=-5.5)


COMPILE = """
import json
from k3rl.kernels.common.resources import compile_for_hopper
from k3rl.kernels.kda import backward, chunk, kernel
wide = "rate bias end lower beta initial final d_final d_initial d_end d_scores d_alike d_rate d_bias".split()
types = {f"{name}_ptr": "*fp32" for name in wide}
types |= {f"{name}_ptr": "*i64" for name in "cu_seqlens first_tiles first_groups sequences groups stops".split()}
types |= {"num_sequences": "i32", "scale": "fp32", "lower_bound": "fp32"}
def stack(function, settings, **constants):
    given = {k.upper().replace("BLOCK_", "B"): v for k, v in settings.items() if k != "warps"}
    given |= {"H": 64, "K": 128, "V": 128, "EXACT": "bf16x3", "GROUP": chunk.GROUP, **constants}
    given = {k: v for k, v in given.items() if k in function.arg_names}
    names = {n: "constexpr" if n in given else types.get(n, "*bf16") for n in function.arg_names}
    return compile_for_hopper(function, names, given, num_warps=settings["warps"]).stack_bytes
print(json.dumps([
    *(stack(kernel.prepare_kernel, chunk.PREPARE, SQUARES=squares) for squares in (False, True)),
    stack(kernel.invert_kernel, chunk.INVERT),
    *(stack(kernel.scan_kernel, chunk.SCAN, INITIAL=True, SAVE=save) for save in (False, True)),
    stack(backward.reverse_kernel, chunk.REVERSE),
    stack(backward.factors_kernel, chunk.FACTORS),
    stack(backward.finish_kernel, chunk.FINISH),
]))
"""


def test_for_hopper_no_register_is_spilled() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [0] * 8
