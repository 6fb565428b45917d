"""Which implementation of an operator runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

VARIABLE = "K3RL_KERNELS"


def choose_backend(tensor: torch.Tensor) -> Literal["triton", "reference"]:
    """Triton for a CUDA tensor, the reference for any other; the environment variable K3RL_KERNELS forces one."""
    forced = os.environ.get(VARIABLE)
    if forced is None:
        return "triton" if tensor.is_cuda else "reference"
    if forced == "triton" or forced == "reference":
        return forced
    raise ValueError(f"{VARIABLE} is {forced!r}: it must be triton, reference or unset")


def refuse(operator: str, what: str, got: object, supported: str) -> ValueError:
    """The error for an input that a Triton kernel does not take."""
    return ValueError(
        f"{operator} on Triton: {what} is {got}, supported is {supported}; {VARIABLE}=reference takes any"
    )
