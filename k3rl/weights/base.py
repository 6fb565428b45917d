"""Weights in transit: a version, where its tensors can be read, and the digest that tells whether they arrived."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from k3rl.trajectory import PolicyVersion


class WeightsHandle(Protocol):
    """One published version of the policy. It is small: the tensors travel when a reader asks for them."""

    @property
    def version(self) -> PolicyVersion: ...

    def read(self) -> Mapping[str, torch.Tensor]:
        """The tensors, perhaps in shared memory: read them, never write. Raises WeightSyncError past a deadline."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LocalWeights:
    """Weights in this process."""

    version: PolicyVersion
    tensors: Mapping[str, torch.Tensor]

    def read(self) -> Mapping[str, torch.Tensor]:
        """The tensors."""
        return self.tensors


def weights_digest(state_dict: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 (hex) over names in order, dtypes, shapes and bytes: equal exactly when the weights are bit-equal."""
    digest = hashlib.sha256()
    for name in sorted(state_dict):
        tensor = state_dict[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
