"""Weights through Ray's object store: written once by the learner, read by every engine without passing the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from k3rl.errors import WeightSyncError
from k3rl.trajectory import PolicyVersion


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeights:
    """A reference into the object store; the tensors live as long as somebody holds it."""

    version: PolicyVersion
    ref: Any
    timeout_s: float

    def read(self) -> Mapping[str, torch.Tensor]:
        """The tensors, in the object store's shared memory."""
        import ray
        from ray.exceptions import RayError

        try:
            return ray.get(self.ref, timeout=self.timeout_s)
        except RayError as error:
            raise WeightSyncError(f"the weights of step {self.version.step} cannot be read: {error}") from error


def put(version: PolicyVersion, tensors: Mapping[str, torch.Tensor], timeout_s: float) -> StoredWeights:
    """Write ``tensors`` into the object store."""
    import ray

    return StoredWeights(version, ray.put(dict(tensors)), timeout_s)
