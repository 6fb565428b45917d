"""KDA's Triton kernels, interpreted, against the token recurrence in float64; and what Hopper makes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from k3rl.kernels.kda import TilePlan, kda_chunk, kda_packed, kda_recurrent

pytestmark = pytest.mark.usefixtures("triton_kernels")
H, K, V = 2, 16, 32  # K unlike V, so that a transposed state is a shape error
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
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


COMPILE = """
import json
from k3rl.kernels.common.resources import compile_for_hopper
from k3rl.kernels.kda import chunk, kernel
wide = ("rate_ptr", "bias_ptr", "end_ptr", "lower_ptr", "beta_ptr", "initial_ptr", "final_ptr")
types = {name: "*fp32" for name in wide}
types |= {name: "*i64" for name in ("cu_seqlens_ptr", "first_tiles_ptr", "sequences_ptr", "stops_ptr")}
types |= {"num_sequences": "i32", "scale": "fp32", "lower_bound": "fp32"}
def stack(function, constants, **options):
    names = {n: "constexpr" if n in constants else types.get(n, "*bf16") for n in function.arg_names}
    return compile_for_hopper(function, names, constants, **options).stack_bytes
exact = {"H": 64, "K": 128, "EXACT": "bf16x3"}
scan = {**exact, "V": 128, "BV": chunk.SCAN["block_v"], "STAGES": chunk.SCAN["stages"], "INITIAL": True}
print(json.dumps([
    stack(kernel.prepare_kernel, {**exact, "BK": chunk.PREPARE["block_k"]}, num_warps=chunk.PREPARE["warps"]),
    stack(kernel.invert_kernel, {"H": 64, "BLOCKS": chunk.INVERT["blocks"]}, num_warps=chunk.INVERT["warps"]),
    stack(kernel.scan_kernel, scan, num_warps=chunk.SCAN["warps"]),
]))
"""


def test_for_hopper_no_register_is_spilled() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [0, 0, 0]
