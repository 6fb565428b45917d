"""Triton kernels under its interpreter, where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, and kernels are imported at their first call


@pytest.fixture
def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operators run on Triton, interpreted."""
    from k3rl.kernels.common.interpreter import make_interpreter_right

    make_interpreter_right()
    monkeypatch.setenv("K3RL_KERNELS", "triton")
    with np.errstate(over="ignore"):  # what overflows is inf, as on a GPU
        yield
