"""``k3rl convert`` and ``k3rl sizes``: checkpoint folders in other forms, and what a model's shape costs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from k3rl.config import from_dict, load_model_config
from k3rl.model.config import cache_bytes, count_parameters, kda_state_bytes
from k3rl.model.pretrained import Shards, convert, write_folder
from k3rl.observe.console import table
from k3rl.rollout.chat_format import build_chat_format
from k3rl.rollout.formats.xtml import XtmlFormat
from k3rl.weights.source import open_source

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from k3rl.model.pretrained import ExpertFormat

CHAT_TEMPLATE = "chat_template.jinja"
"""Where Hugging Face's tokenizers look for it."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def convert_folder(
    source: Path, target: Path, *, dtype: str | None, experts: ExpertFormat | None, max_shard_gib: float
) -> None:
    """Write ``source``, a published folder or a checkpoint of a run, as the new published folder ``target``."""
    kind = None if dtype is None else DTYPES[dtype]
    shard_bytes = int(max_shard_gib * 2**30)
    found = open_source(source)
    if found.is_checkpoint:
        form = experts or found.config.expert_format
        write_folder(found.config, found.tensors(), target, kind, form, shard_bytes, None)
        _write_chat_files(found.folder, target)
    else:
        convert(source, target, dtype=kind, experts=experts, max_shard_bytes=shard_bytes)
    shards = Shards(target)
    print(f"{target}: {len(list(shards))} tensors, experts {shards.expert_format}")


def _write_chat_files(checkpoint: Path, target: Path) -> None:
    """Write the tokenizer and, where the format has one, the chat template of the run that ``checkpoint`` is of."""
    run_config = checkpoint.resolve().parent.parent / "config.json"
    if not run_config.is_file():
        print(f"no tokenizer written: {run_config}, which says the run's, is not there")
        return
    chat_format = build_chat_format(from_dict(json.loads(run_config.read_text())))
    chat_format.tokenizer.save(target)
    if isinstance(chat_format, XtmlFormat):
        (target / CHAT_TEMPLATE).write_text(chat_format.chat_template(), encoding="utf-8")


def print_sizes(paths: Sequence[Path]) -> None:
    """Print what each model (a file of configs/model/, or a folder of weights) weighs, one row each."""
    rows = []
    for path in paths:
        config = open_source(path).config if path.is_dir() else load_model_config(path)
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
