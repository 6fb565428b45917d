"""Triton's interpreter computes on bf16 what a GPU would, and the dispatch chooses what it says."""

# pyright: reportGeneralTypeIssues=false
# Triton's ranges are syntax to its compiler and no iterators to a type checker.

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from k3rl.kernels.common import choose_backend

pytestmark = pytest.mark.usefixtures("triton_kernels")


@triton.jit
def _arithmetic(a_ptr, b_ptr, out_ptr, dot_ptr, N: tl.constexpr):
    """Sum, product, maximum, narrowing, choice and sign of [N, N]; a product of matrices."""
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    results = (a + b, a * b, tl.maximum(a, b), (a.to(tl.float32) / 3).to(tl.bfloat16), tl.where(a > b, a, b), -a)
    for i in tl.static_range(6):
        tl.store(out_ptr + i * N * N + at, results[i])
    tl.store(dot_ptr + at, tl.dot(a, b))


@triton.jit
def _sum(a_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(a_ptr + tl.arange(0, N)), 0))


@triton.jit
def _count(out_ptr, num):
    total = 0
    for i in range(num):
        total += i
    tl.store(out_ptr, total)


def test_bf16_in_the_interpreter_is_the_bf16_of_torch() -> None:
    a, b = (torch.randn(16, 16, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2))
    out, dot = torch.empty(6, 16, 16, dtype=torch.bfloat16), torch.empty(16, 16)
    kernel: Any = _arithmetic
    kernel[(1,)](a, b, out, dot, N=16)
    want = [a + b, a * b, torch.maximum(a, b), (a.float() / 3).bfloat16(), torch.where(a > b, a, b), -a]
    assert torch.equal(out, torch.stack(want))
    torch.testing.assert_close(dot, a.float() @ b.float())


def test_a_sum_of_bf16_is_refused() -> None:
    kernel: Any = _sum
    with pytest.raises(Exception, match="widen to float32 first"):
        kernel[(1,)](torch.ones(16, dtype=torch.bfloat16), torch.empty(1), N=16)


def test_a_loop_may_be_bounded_by_an_argument() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    kernel: Any = _count
    kernel[(1,)](out, 5)
    assert int(out) == 10


def test_the_variable_forces_a_backend_and_a_wrong_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.zeros(1)
    assert choose_backend(tensor) == "triton"
    monkeypatch.setenv("K3RL_KERNELS", "reference")
    assert choose_backend(tensor) == "reference"
    monkeypatch.delenv("K3RL_KERNELS")
    assert choose_backend(tensor) == "reference"
    monkeypatch.setenv("K3RL_KERNELS", "cuda")
    with pytest.raises(ValueError, match="K3RL_KERNELS is 'cuda': it must be triton, reference or unset"):
        choose_backend(tensor)
