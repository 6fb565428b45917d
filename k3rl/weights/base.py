"""Weights in transit: the digest that tells whether what arrived is what was sent."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch


def weights_digest(state_dict: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 (hex) over names in order, dtypes, shapes and bytes: equal exactly when the weights are bit-equal."""
    digest = hashlib.sha256()
    for name in sorted(state_dict):
        tensor = state_dict[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
