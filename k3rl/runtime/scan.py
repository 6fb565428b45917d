"""``k3rl scan``: what long contexts do to a model: decay, its reciprocal within a tile, attention entropy, KDA states.

The text streams through the model's cache in chunks. Memory grows with the latents of the MLA layers alone.
"""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from k3rl.config import load_model_config
from k3rl.errors import ConfigError
from k3rl.kernels.kda.reference import TILE
from k3rl.kernels.mla import mla_weights
from k3rl.model.batch import TokenBatch
from k3rl.model.cache import ValueCache
from k3rl.model.kda import KdaMixer
from k3rl.model.mla import MlaMixer
from k3rl.model.transformer import K3Model
from k3rl.observe.console import table
from k3rl.runtime.bench import environment
from k3rl.runtime.convert import DTYPES
from k3rl.weights.source import open_source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

QUERIES = 8
"""The last so many positions before a length are those whose attention entropy is taken."""
SCORES = {"cpu": 2**24, "cuda": 2**27}
"""Attention scores per head of a forward: chunks shorten as the context grows, so that scores take constant memory."""
QUANTILES = (0.01, 0.5, 0.99)
_BINS, _LOW, _HIGH = 6000, -12.0, 3.0
"""Histogram of log10(-g): a bin is 0.6 % wide. What lies outside counts in the outermost bin."""


@dataclass(slots=True)
class DecayScan:
    """Log decays g of one KDA layer, as they stream by."""

    dtype: torch.dtype
    low: float = math.inf
    high: float = -math.inf
    count: int = 0
    ones: int = 0
    strongest: float = 0.0
    histogram: torch.Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.float64))
    open_rows: torch.Tensor | None = None  # [< TILE, H, K], of the tile that is not full

    def add(self, g_THK: torch.Tensor) -> None:
        """Take the next tokens' decays into account."""
        self.low, self.high = min(self.low, g_THK.min().item()), max(self.high, g_THK.max().item())
        self.count += g_THK.numel()
        self.ones += int((g_THK.exp().to(self.dtype) == 1).sum())
        spread = (-g_THK).clamp(min=10**_LOW, max=10**_HIGH).log10().float()
        self.histogram += torch.histc(spread, _BINS, _LOW, _HIGH).double().cpu()
        rows = g_THK if self.open_rows is None else torch.cat([self.open_rows, g_THK])
        self.open_rows = rows[len(rows) // TILE * TILE :]
        padded = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, -len(rows) % TILE))
        # As the kernel does, from the tile's first row, whose own decay is in no reciprocal.
        total = padded.view(-1, TILE, *rows.shape[1:])[:, 1:].sum(1)
        self.strongest = max(self.strongest, -total.min().item())

    def quantile(self, share: float) -> float:
        """The g below which ``share`` of all lie."""
        weaker = self.histogram.cumsum(0)  # ascending in -g: the weakest decay comes first
        index = int(torch.searchsorted(weaker, (1 - share) * self.count))
        return -(10 ** (_LOW + (min(index, _BINS - 1) + 0.5) * (_HIGH - _LOW) / _BINS))

    def figures(self) -> dict[str, float]:
        """What was found so far."""
        return {
            "decay_min": self.low,
            **{f"decay_q{share:g}": self.quantile(share) for share in QUANTILES},
            "decay_max": self.high,
            "decays_rounding_to_1": self.ones / self.count,
            "tile_log_reciprocal": self.strongest,
            "overflow_margin": math.log(torch.finfo(self.dtype).max) - self.strongest,
        }


@torch.no_grad()
def scan(model: K3Model, ids_T: torch.Tensor, lengths: Sequence[int], chunk: int = 1024) -> Iterator[dict[str, Any]]:
    """Figures of every layer when the context is as long as each of ``lengths`` (ascending, at most T).

    A row has ``layer``, ``length`` and for KDA: ``decay_*``, log decay g (nats) of all tokens so far, as computed in
    the model's dtype, quantiles to 0.6 %; ``decays_rounding_to_1``, the share whose exp(g) is 1 in that dtype;
    ``tile_log_reciprocal``, the largest -sum(g) after the first row of a tile of 16, the logarithm of the reciprocal
    decay there (formed only where decay is bounded); ``overflow_margin``, how far it is below the dtype's largest
    number, in nats; ``state_norm_mean`` and ``_max``, Frobenius norms over heads, at the last full ``state_tile``. For
    MLA: ``entropy``, of the last ``QUERIES`` positions' attention in nats, mean over them and the heads, and
    ``entropy_share``, each divided by the logarithm of the number of keys.
    """
    weight = model.embed_tokens.weight
    kda = {i: DecayScan(weight.dtype) for i, layer in enumerate(model.layers) if isinstance(layer.self_attn, KdaMixer)}
    inputs: dict[int, torch.Tensor] = {}
    cache = ValueCache.empty(model.config, 1, weight.device, weight.dtype)
    at = 0
    with _watched(model, kda, inputs):
        for length in lengths:
            while at < length:
                size = max(1, min(chunk, SCORES[weight.device.type] // (at + chunk)))
                part = ids_T[at : min(at + size, length)].to(weight.device)
                found = model(TokenBatch.pack([part]), cache).cache
                assert isinstance(found, ValueCache)
                cache, at = found, at + len(part)
            for index, layer in enumerate(model.layers):
                mixer = layer.self_attn
                if isinstance(mixer, KdaMixer):
                    norms = torch.linalg.matrix_norm(cache.kda[mixer.slot].state[0])
                    state = {"state_norm_mean": norms.mean().item(), "state_norm_max": norms.max().item()}
                    figures = {**kda[index].figures(), **state}
                else:
                    assert isinstance(mixer, MlaMixer)
                    figures = _entropy(mixer, inputs[index], cache.latents[mixer.slot])
                yield {"layer": index, "length": length, **figures}


@contextmanager
def _watched(model: K3Model, kda: dict[int, DecayScan], inputs: dict[int, torch.Tensor]) -> Iterator[None]:
    """Feed ``kda`` from the KDA layers, and keep the last inputs [<= QUERIES, D] of the MLA layers in ``inputs``."""

    def watch(index: int) -> Any:
        def see(mixer: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            if isinstance(mixer, KdaMixer):
                kda[index].add(mixer.log_decay(arguments[0]))
            else:
                kept = [inputs[index]] if index in inputs else []
                inputs[index] = torch.cat([*kept, arguments[0]])[-QUERIES:]

        return see

    mixers = [model.get_submodule(f"layers.{i}.self_attn") for i in range(len(model.layers))]
    handles = [mixer.register_forward_pre_hook(watch(i)) for i, mixer in enumerate(mixers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _entropy(mixer: MlaMixer, inputs_QD: torch.Tensor, latents_NLX: torch.Tensor) -> dict[str, float]:
    num, length = len(inputs_QD), latents_NLX.shape[1]
    q_NQHX = mixer.queries(inputs_QD).view(1, num, mixer.heads, mixer.key_dim + mixer.pe_dim)
    offsets = torch.tensor([length - num], device=inputs_QD.device)
    weights_HQL = mla_weights(q_NQHX, latents_NLX, mixer.expansion, mixer.key_dim, offsets)[0]
    entropy_HQ = torch.special.entr(weights_HQL).sum(-1)
    keys_Q = torch.arange(length - num + 1, length + 1, device=inputs_QD.device, dtype=torch.float64)
    share = entropy_HQ / keys_Q.clamp(min=2).log()  # of one key the entropy is 0
    return {"entropy": entropy_HQ.mean().item(), "entropy_share": share.mean().item()}


def scan_folder(
    source: Path,
    out: Path,
    *,
    dtype: str,
    lengths: Sequence[int],
    text: Path | None,
    seed: int,
    chunk: int,
    device: str | None,
) -> None:
    """Scan ``source`` (a file of configs/model/, a checkpoint of a run, or a published folder); print and write it."""
    if not lengths or list(lengths) != sorted(set(lengths)) or lengths[0] < 2:
        raise ConfigError(f"lengths: must ascend from at least 2, got {list(lengths)}")
    if chunk < 1:
        raise ConfigError(f"chunk: must be at least 1, got {chunk}")
    model = _read(source, DTYPES[dtype]).to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    vocabulary = model.config.vocab_size
    if text is None:
        ids = torch.randint(0, vocabulary, (lengths[-1],), generator=torch.Generator().manual_seed(seed))
    else:
        content = text.read_bytes()
        ids = torch.tensor(list(content[: lengths[-1]]), dtype=torch.int64)
        if len(content) < lengths[-1]:
            raise ConfigError(f"text: has {len(content)} bytes, and the longest of lengths is {lengths[-1]}")
        if int(ids.max()) >= vocabulary:
            raise ConfigError(f"text: byte {int(ids.max())} is no token of a vocabulary of {vocabulary}")
    found = list(scan(model, ids, lengths, chunk))
    print(f"{source}, {dtype}")
    parts = {  # of a width that a terminal has
        "KDA: log decay": ("decay_",),
        "KDA: tiles and states": ("decays_", "tile_", "overflow_", "state_"),
        "MLA: attention": ("entropy",),
    }
    for title, starts in parts.items():
        rows = [{k: v for k, v in row.items() if k.startswith(("layer", "length", *starts))} for row in found]
        table(title, [row for row in rows if len(row) > 2])
    document = {
        "command": f"k3rl scan {source} --dtype {dtype} --lengths {','.join(map(str, lengths))} --chunk {chunk} "
        + (f"--seed {seed}" if text is None else f"--text {text}"),
        "environment": environment(),
        "rows": [row for figures in found for row in _result_rows(figures, dtype)],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {out}")


def _result_rows(figures: dict[str, Any], dtype: str) -> Iterator[dict[str, Any]]:
    shape = f"layer {figures['layer']}, {figures['length']} tokens, {dtype}"
    blank = dict.fromkeys(("baseline", "baseline_name", "floor"))
    for name, value in figures.items():
        if name not in ("layer", "length"):
            unit = "nats" if name.startswith(("decay_", "tile_", "overflow_")) or name == "entropy" else "1"
            goal = 0.0 if name == "overflow_margin" else None
            holds = None if goal is None else value > goal
            yield {"what": name, "shape": shape, "ours": value, **blank, "goal": goal, "unit": unit, "holds": holds}


def _read(source: Path, dtype: torch.dtype) -> K3Model:
    if source.is_file():
        return K3Model(load_model_config(source)).to(dtype).eval()
    return open_source(source).load_model(dtype).eval()
