"""Checkpoint folders in Hugging Face's layout, read and written tensor by tensor.

``config.json``, ``model-0000i-of-0000n.safetensors`` with their index, and whatever else the folder holds (tokenizer,
template). Tensor names and shapes are those of the published checkpoints. The model's own tensors differ in four ways:
the experts of a layer are stacked, ``A_log`` is not padded, a low-rank gate is one module, and AttnRes has a module for
each mix. Converting holds a file that is read, one that is written, and one layer's experts.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from k3rl.errors import CheckpointError
from k3rl.model.hf_config import K3, SPECIAL_TOKENS, family, from_hf_config, to_hf_config
from k3rl.model.mxfp4 import BLOCK, pack_mxfp4, round_mxfp4, unpack_mxfp4
from k3rl.model.transformer import K3Model

if TYPE_CHECKING:
    from k3rl.config import ModelConfig

INDEX = "model.safetensors.index.json"
VALUE_HEAD = "value_head.safetensors"
PASSED_THROUGH = ("vision_tower.", "mm_projector.")
"""Tensors of a folder that the text model does not have and that travel along byte for byte."""
FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias", "_conv1d.weight", "o_norm.weight")
"""Ends of the names that stay float32 whatever the rest is stored in."""
MXFP4_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "group_size": BLOCK, "symmetric": True, "scale_dtype": "uint8"},
        }
    },
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "lm_head"],
}

OTHER_SPELLINGS = (
    # Dense feed-forwards in folders that transformers wrote: on saving it renames every ``mlp``.
    (re.compile(r"(\.layers\.\d+)\.block_sparse_moe\.((?:gate|up|down)_proj\.weight)$"), r"\1.mlp.\2"),
    # Mixes in some early files.
    (re.compile(r"(self_attention_res|mlp_res|output_attn_res)\.(norm|proj)_weight$"), r"\1_\2.weight"),
)
"""Names that mean a published one."""

ExpertFormat = Literal["plain", "mxfp4"]
Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Plain:
    """One tensor of the checkpoint."""

    name: str

    def shapes(self, shape: torch.Size) -> dict[str, tuple[int, ...]]:
        """Checkpoint tensors by name, for a tensor of ``shape``."""
        return {self.name: tuple(shape)}

    def load(self, read: Read) -> torch.Tensor:
        """The model's tensor."""
        return read(self.name)

    def store(self, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Checkpoint tensors of the model's."""
        yield self.name, tensor


@dataclass(frozen=True, slots=True)
class PaddedDecay:
    """``A_log``, stored with zeros behind it (K3) or with axes of one around it (Kimi Linear)."""

    name: str
    heads: int
    stored: tuple[int, ...]

    def shapes(self, shape: torch.Size) -> dict[str, tuple[int, ...]]:
        return {self.name: self.stored}

    def load(self, read: Read) -> torch.Tensor:
        flat = read(self.name).flatten()
        if bool(flat[self.heads :].any()):
            raise CheckpointError(f"{self.name}: entries from {self.heads} on are padding and must be 0")
        return flat[: self.heads]

    def store(self, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        size = max(self.stored)
        yield self.name, torch.cat([tensor, tensor.new_zeros(size - self.heads)]).view(self.stored)


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """One projection of all experts of a layer."""

    prefix: str  # up to the expert's number
    projection: str  # w1, w2 or w3
    experts: int
    form: ExpertFormat
    rounded: bool  # to MXFP4 in the model's forward, so also where they are stored plain

    def shapes(self, shape: torch.Size) -> dict[str, tuple[int, ...]]:
        _, rows, columns = shape
        if self.form == "plain":
            return {f"{self._base(i)}.weight": (rows, columns) for i in range(self.experts)}
        shapes: dict[str, tuple[int, ...]] = {}
        for i in range(self.experts):
            shapes[f"{self._base(i)}.weight_packed"] = (rows, columns // 2)
            shapes[f"{self._base(i)}.weight_scale"] = (rows, columns // BLOCK)
        return shapes

    def load(self, read: Read) -> torch.Tensor:
        return torch.stack([self._load_one(read, i) for i in range(self.experts)])

    def store(self, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for i, weight in enumerate(tensor.unbind(0)):
            if self.form == "plain":
                yield f"{self._base(i)}.weight", round_mxfp4(weight) if self.rounded else weight
            else:
                packed, scale = pack_mxfp4(weight)
                yield f"{self._base(i)}.weight_packed", packed
                yield f"{self._base(i)}.weight_scale", scale

    def _base(self, expert: int) -> str:
        return f"{self.prefix}{expert}.{self.projection}"

    def _load_one(self, read: Read, expert: int) -> torch.Tensor:
        base = self._base(expert)
        if self.form == "plain":
            return read(f"{base}.weight")
        return unpack_mxfp4(read(f"{base}.weight_packed"), read(f"{base}.weight_scale"))


Stored = Plain | PaddedDecay | StackedExperts


def layout(config: ModelConfig, experts: ExpertFormat) -> dict[str, tuple[Stored, torch.Size]]:
    """How each of the model's tensors is stored, with its shape in the model, in order of the layers."""
    is_k3 = family(config) == K3
    outer = "language_model." if is_k3 else ""
    state = K3Model(config, device="meta").state_dict()
    return {
        name: (_stored(name, config, outer, is_k3, experts), tensor.shape)
        for name, tensor in state.items()
        if not name.startswith("value_head.")
    }


def _stored(name: str, config: ModelConfig, outer: str, is_k3: bool, experts: ExpertFormat) -> Stored:
    if name == "lm_head.weight":
        return Plain(f"{outer}lm_head.weight")
    full = f"{outer}model.{name}"
    if found := re.fullmatch(r"(.*\.experts\.)(w[123])", full):
        return StackedExperts(found[1], found[2], config.num_experts, experts, config.expert_format == "mxfp4")
    if full.endswith(".A_log"):
        padded = (max(config.num_heads, config.kda_key_dim),) if is_k3 else (1, 1, config.num_heads, 1)
        return PaddedDecay(full, config.num_heads, padded)
    full = re.sub(r"(self_attention_res|mlp_res|output_attn_res)\.(norm|proj)\.", r"\1_\2.", full)
    return Plain(re.sub(r"\.g_proj\.([01])\.", lambda m: f".g_{'ab'[int(m[1])]}_proj.", full))


class Shards:
    """The safetensors files of a folder as one table of tensors, each read when it is asked for.

    One file is open at a time: a file's pages count as this process's memory for as long as it is.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} is no checkpoint folder: it has no config.json")
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        if (folder / INDEX).is_file():
            files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        else:
            files = ["model.safetensors"]
        self._file: dict[str, Path] = {}
        self._spelt: dict[str, str] = {}
        self._open: tuple[Path, Any] | None = None
        for file in files:
            if not (folder / file).is_file():
                raise CheckpointError(f"{folder} has no {file}, which its index names")
            with safe_open(folder / file, framework="pt") as opened:
                names = opened.keys()  # safe_open is no mapping
                spelt = {_published(name): name for name in names}
            self._file |= dict.fromkeys(spelt, folder / file)
            self._spelt |= spelt

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __contains__(self, name: str) -> bool:
        return name in self._file

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._opened(name).get_slice(self._spelt[name]).get_shape())

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU."""
        return self._opened(name).get_tensor(self._spelt[name])

    def _opened(self, name: str) -> Any:
        from safetensors import safe_open

        file = self._file[name]
        if self._open is None or self._open[0] != file:
            self._open = None  # before the next one is mapped
            self._open = file, safe_open(file, framework="pt")
        return self._open[1]

    @property
    def expert_format(self) -> ExpertFormat:
        return "mxfp4" if any(name.endswith(".weight_packed") for name in self._file) else "plain"

    def check(self, wanted: dict[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError that lists what is missing, not expected, or of another shape."""
        missing = [name for name in wanted if name not in self]
        unexpected = [n for n in self if n not in wanted and not n.startswith(PASSED_THROUGH)]
        wrong = [
            f"{name} is {self.shape(name)}, not {shape}"
            for name, shape in wanted.items()
            if name in self and self.shape(name) != shape and not name.endswith(".A_log")
        ]
        found = {"missing": missing, "not expected": unexpected, "of another shape": wrong}
        if any(found.values()):
            listed = [f"{len(n)} {what}: {', '.join(n[:5])}{', ...' * (len(n) > 5)}" for what, n in found.items() if n]
            raise CheckpointError("the checkpoint does not fit its config.json: " + "; ".join(listed))


def _published(name: str) -> str:
    for pattern, replacement in OTHER_SPELLINGS:
        name = pattern.sub(replacement, name)
    return name


def read_tensors(folder: str | Path) -> tuple[ModelConfig, Iterator[tuple[str, torch.Tensor]]]:
    """The configuration, and the model's tensors one by one, each as stored. Everything is checked before the first."""
    shards = Shards(Path(folder))
    config = from_hf_config(shards.config)
    plan = layout(config, shards.expert_format)
    shards.check({n: s for stored, shape in plan.values() for n, s in stored.shapes(shape).items()})

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, (stored, _) in plan.items():
            yield name, stored.load(shards.read)
        if config.value_head:
            yield from _read_value_head(Path(folder))

    return config, tensors()


def _read_value_head(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    if not (folder / VALUE_HEAD).is_file():
        raise CheckpointError(f"{folder} has no {VALUE_HEAD}, which its config.json asks for")
    yield from load_file(folder / VALUE_HEAD).items()


def from_pretrained(
    folder: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> K3Model:
    """Load a model of either family; its parameters are of ``dtype`` whatever they were stored in.

    Raises CheckpointError that lists the tensors that are missing, not expected or of another shape.
    """
    config, tensors = read_tensors(folder)
    model = K3Model(config, device="meta").to(dtype).to_empty(device=device)
    state = model.state_dict()
    for name, tensor in tensors:
        state[name].copy_(tensor)
    return model


def save_pretrained(
    model: K3Model,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    experts: ExpertFormat | None = None,
    max_shard_bytes: int = 5 * 2**30,
    like: str | Path | None = None,
) -> None:
    """Write ``model`` as a new folder.

    Args:
        model: of one of the two families.
        folder: must not exist.
        dtype: of the stored tensors, but for those that stay float32; None keeps each as it is.
        experts: how the routed experts are stored, None as ``model.config.expert_format`` says. A model that is trained
            in MXFP4 is written with the values that its forward uses, in either form.
        max_shard_bytes: size of a file, unless one tensor alone is larger.
        like: folder whose tokenizer, further keys of config.json and vision tensors are carried over.
    """
    state = model.state_dict()
    form = experts or model.config.expert_format
    write_folder(model.config, state.items(), folder, dtype, form, max_shard_bytes, like)


def convert(
    source: str | Path,
    target: str | Path,
    *,
    dtype: torch.dtype | None = None,
    experts: ExpertFormat | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Write another form of a checkpoint folder, without holding the model; ``experts`` None keeps their format."""
    config, tensors = read_tensors(source)
    form = experts or Shards(Path(source)).expert_format
    write_folder(config, tensors, target, dtype, form, max_shard_bytes, source)


def write_folder(
    config: ModelConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    folder: str | Path,
    dtype: torch.dtype | None,
    experts: ExpertFormat,
    max_shard_bytes: int,
    like: str | Path | None,
) -> None:
    """Write the model's ``tensors`` and all else a folder needs; it appears under its name once it is whole."""
    folder = Path(folder)
    if folder.exists():
        raise CheckpointError(f"{folder} exists; choose another folder, nothing is overwritten")
    values = dict.fromkeys(SPECIAL_TOKENS) if like is None else {}
    values |= to_hf_config(config)  # refused before anything is written
    plan = layout(config, experts)
    source = None if like is None else Shards(Path(like))
    draft = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)

    value_head: dict[str, torch.Tensor] = {}

    def parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for at, part in plan[name][0].store(tensor.detach().cpu()):
            yield at, part if dtype is None or not part.is_floating_point() else part.to(_kept(at, dtype))

    def stored() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            if name in plan:
                yield from parts(name, tensor)
            else:
                value_head[name] = tensor.detach().cpu().clone()
            del tensor  # before the next one is stacked
        if source is not None:
            yield from ((name, source.read(name)) for name in sorted(source) if name.startswith(PASSED_THROUGH))

    # No larger buffer than can be filled: a small machine refuses to set 5 GiB aside.
    most = sum(8 * shape.numel() for _, shape in plan.values())
    if like is not None:
        most += sum(path.stat().st_size for path in Path(like).glob("*.safetensors"))
    _write_shards(draft, stored(), min(max_shard_bytes, most))
    if value_head:
        from safetensors.torch import save_file

        save_file(value_head, draft / VALUE_HEAD)
    if like is not None and source is not None:
        values = {**source.config, **values}
        if "text_config" in values:
            values["text_config"] = source.config.get("text_config", {}) | values["text_config"]
        for path in Path(like).iterdir():
            if path.is_file() and path.suffix != ".safetensors" and path.name not in ("config.json", INDEX):
                shutil.copy2(path, draft / path.name)
    values.pop("quantization_config", None)
    if experts == "mxfp4":
        values["quantization_config"] = MXFP4_CONFIG
    (draft / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    draft.rename(folder)


def _kept(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.endswith(FLOAT32) else dtype


def _write_shards(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], max_shard_bytes: int) -> None:
    """Write files as they fill up, then give them their names, which say how many there are, and write the index."""
    from safetensors.torch import save_file

    # One buffer for every file: many small tensors that live as long as a file would leave holes all over the heap.
    buffer = torch.empty(max_shard_bytes, dtype=torch.uint8)
    pending: dict[str, torch.Tensor] = {}
    files: list[list[str]] = []
    used = total = 0

    def flush() -> None:
        save_file(pending, folder / f"{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        start = -(-used // 8) * 8  # where any element may begin
        if pending and start + num_bytes > max_shard_bytes:
            flush()
            start = 0
        if num_bytes > max_shard_bytes:
            pending[name] = tensor.contiguous().clone()  # has a file of its own
        else:
            pending[name] = buffer[start : start + num_bytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        used, total = start + num_bytes, total + num_bytes
        del tensor
    flush()
    weight_map = {}
    for i, names in enumerate(files):
        final = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"{i}.safetensors").rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
