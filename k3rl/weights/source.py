"""Weights to start from: a run's checkpoint or a published folder, told apart by what lies in them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3rl.config import ModelConfig, model_from_dict
from k3rl.errors import CheckpointError, ConfigError
from k3rl.model.hf_config import from_hf_config
from k3rl.model.pretrained import Shards, read_tensors
from k3rl.model.transformer import K3Model
from k3rl.weights.checkpoint import find_latest, load, read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

NOT_WEIGHTS = ("state_tile", "head_init", "initializer_range", "expert_format", "value_head")
"""Keys of a model in which a source may differ: how one starts and computes, not what weights there are. A value head
that only one of the two has is left out or starts afresh."""


@dataclass(frozen=True, slots=True)
class Source:
    """A folder of weights. Nothing but its description has been read."""

    folder: Path
    config: ModelConfig
    vocabulary: str | None
    """What the ids mean to a run; None in a published folder, whose tokenizer lies beside the weights."""

    @property
    def is_checkpoint(self) -> bool:
        return self.vocabulary is not None

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Names of the model's state and their values; CheckpointError for what is missing or damaged."""
        return load(self.folder).model.items() if self.is_checkpoint else read_tensors(self.folder)[1]

    def load_model(self, dtype: torch.dtype) -> K3Model:
        """The whole model, on the CPU."""
        model = K3Model(self.config, device="meta").to(dtype).to_empty(device="cpu")
        self.fill(model)
        return model

    @torch.no_grad()
    def fill(self, model: K3Model) -> None:
        """Copy into the parameters and buffers of ``model``, one at a time."""
        state = model.state_dict()
        for name, tensor in self.tensors():
            if name in state:
                state[name].copy_(tensor)

    def require(self, config: ModelConfig, vocabulary: str) -> None:
        """Raise ConfigError that says how the source's model or vocabulary is another one."""
        same = {name: getattr(config, name) for name in NOT_WEIGHTS}
        there = dataclasses.asdict(dataclasses.replace(self.config, **same))
        here = dataclasses.asdict(config)
        differing = [f"{n}: {there[n]} there, {here[n]} here" for n in here if there[n] != here[n]]
        if differing:
            raise ConfigError(f"init_from: {self.folder} is of another model ({', '.join(differing)})")
        if self.vocabulary not in (None, vocabulary):
            raise ConfigError(
                f"init_from: {self.folder} was trained with other token ids ({self.vocabulary}, here {vocabulary}); "
                "chat_format and tokenizer must be the same"
            )


def open_source(folder: Path) -> Source:
    """Describe a checkpoint, the last good checkpoint of the run that ``folder`` is, or a published folder.

    Raises:
        CheckpointError: it is none of them, or what describes it is damaged.
    """
    if (folder / "checkpoints").is_dir():
        found, _ = find_latest(folder / "checkpoints")
        if found is None:
            raise CheckpointError(f"{folder} is a run without a checkpoint")
        folder = found
    if (folder / "manifest.json").is_file():
        manifest = read_manifest(folder / "manifest.json")
        return Source(folder, model_from_dict(manifest["model_config"]), manifest["vocabulary"])
    return Source(folder, from_hf_config(Shards(folder).config), None)
