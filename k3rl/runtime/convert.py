"""``k3rl convert`` and ``k3rl sizes``: checkpoint folders in other forms, and what a model's shape costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from k3rl.config import load_model_config, model_from_dict
from k3rl.model.config import cache_bytes, count_parameters, kda_state_bytes
from k3rl.model.hf_config import from_hf_config
from k3rl.model.pretrained import Shards, convert, write_folder
from k3rl.observe.console import table
from k3rl.weights.checkpoint import load

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from k3rl.model.pretrained import ExpertFormat

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def convert_folder(
    source: Path, target: Path, *, dtype: str | None, experts: ExpertFormat | None, max_shard_gib: float
) -> None:
    """Write ``source``, a published folder or a checkpoint of a run, as the new published folder ``target``."""
    kind = None if dtype is None else DTYPES[dtype]
    shard_bytes = int(max_shard_gib * 2**30)
    if (source / "manifest.json").is_file():
        checkpoint = load(source)
        config = model_from_dict(dict(checkpoint.model_config))
        write_folder(config, checkpoint.model.items(), target, kind, experts or "plain", shard_bytes, None)
    else:
        convert(source, target, dtype=kind, experts=experts, max_shard_bytes=shard_bytes)
    shards = Shards(target)
    print(f"{target}: {len(list(shards))} tensors, experts {shards.expert_format}")


def print_sizes(paths: Sequence[Path]) -> None:
    """Print what each model (a file of configs/model/, or a published folder) weighs, one row each."""
    rows = []
    for path in paths:
        config = from_hf_config(Shards(path).config) if path.is_dir() else load_model_config(path)
        total, active = count_parameters(config)
        rows.append(
            {
                "model": path.stem,
                "parameters": f"{total:,}",
                "active": f"{active:,}",
                "B/token": f"{cache_bytes(config, 1) - cache_bytes(config, 0):,}",
                "state MB": f"{kda_state_bytes(config) / 1e6:.2f}",
            }
        )
    table("Sizes; latents of a token in bfloat16, KDA states of a sequence in float32", rows)
