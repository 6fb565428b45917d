"""Checkpoint folders: what was written is read, what was read is written again byte for byte, and errors list names."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3rl.config import ModelConfig, load_model_config
from k3rl.errors import CheckpointError, ConfigError
from k3rl.model.batch import TokenBatch
from k3rl.model.config import cache_bytes, count_parameters, kda_state_bytes
from k3rl.model.hf_config import from_hf_config, to_hf_config
from k3rl.model.pretrained import INDEX, convert, from_pretrained, layout, save_pretrained
from k3rl.model.transformer import K3Model

MODELS = Path(__file__).parents[2] / "configs/model"
K3 = load_model_config(MODELS / "k3_tiny.yaml")
LINEAR = dataclasses.replace(
    K3,
    kda_gate_bound=None,
    kda_output_gate_rank=32,
    q_lora_rank=None,
    mla_output_gate=False,
    routed_scale=2.446,
    latent_dim=None,
    attn_res_block=None,
    activation="swiglu",
)
FAMILIES = pytest.mark.parametrize("config", [K3, LINEAR], ids=["k3", "linear"])


def _model(config: ModelConfig) -> K3Model:
    model = K3Model(config, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)))
    return model


def _digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def _logits(model: K3Model) -> torch.Tensor:
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.lm_head(model(TokenBatch.pack([ids])).hidden)


@FAMILIES
def test_save_load_save_is_byte_identical_in_many_small_shards(config: ModelConfig, tmp_path: Path) -> None:
    model = _model(dataclasses.replace(config, value_head=True))
    save_pretrained(model, tmp_path / "a", max_shard_bytes=100_000)
    loaded = from_pretrained(tmp_path / "a")
    assert loaded.config == model.config
    assert torch.equal(_logits(loaded), _logits(model))
    save_pretrained(loaded, tmp_path / "b", max_shard_bytes=100_000, like=tmp_path / "a")
    assert _digests(tmp_path / "a") == _digests(tmp_path / "b")
    shards = list((tmp_path / "a").glob("model-*.safetensors"))
    assert len(shards) > 5
    index = json.loads((tmp_path / "a" / INDEX).read_text())
    assert set(index["weight_map"].values()) == {p.name for p in shards}
    assert index["metadata"]["total_size"] == sum(
        t.numel() * t.element_size() for p in shards for t in load_file(p).values()
    )


@FAMILIES
def test_bfloat16_folders_keep_what_must_stay_float32_and_come_back_bit_for_bit(
    config: ModelConfig, tmp_path: Path
) -> None:
    save_pretrained(_model(config), tmp_path / "a", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "a" / "model-00001-of-00001.safetensors")
    wide = {name.rsplit(".layers.", 1)[-1].split(".", 1)[-1] for name, t in tensors.items() if t.dtype == torch.float32}
    kda = {"A_log", "dt_bias", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "o_norm.weight"}
    assert wide == {f"self_attn.{name}" for name in kda} | {"block_sparse_moe.gate.e_score_correction_bias"}
    save_pretrained(from_pretrained(tmp_path / "a", dtype=torch.float32), tmp_path / "b", dtype=torch.bfloat16)
    assert _digests(tmp_path / "a") == _digests(tmp_path / "b")


def test_mxfp4_experts_are_packed_and_a_folder_of_them_comes_back_bit_for_bit(tmp_path: Path) -> None:
    save_pretrained(_model(K3), tmp_path / "a", dtype=torch.bfloat16, experts="mxfp4")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "mxfp4-pack-quantized"
    tensors = load_file(tmp_path / "a" / "model-00001-of-00001.safetensors")
    base = "language_model.model.layers.1.block_sparse_moe.experts.7.w2"
    assert tensors[f"{base}.weight_packed"].shape == (K3.latent_dim, K3.expert_dim // 2)
    assert tensors[f"{base}.weight_scale"].dtype == torch.uint8
    quantised = from_pretrained(tmp_path / "a")
    save_pretrained(quantised, tmp_path / "b", dtype=torch.bfloat16, experts="mxfp4")
    assert _digests(tmp_path / "a") == _digests(tmp_path / "b")
    convert(tmp_path / "a", tmp_path / "plain", experts="plain", max_shard_bytes=50_000)
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert torch.equal(_logits(from_pretrained(tmp_path / "plain")), _logits(quantised))
    convert(tmp_path / "plain", tmp_path / "again", experts="mxfp4")
    assert _digests(tmp_path / "again") == _digests(tmp_path / "a")


def test_vision_tensors_tokenizer_files_and_unknown_keys_travel_along(tmp_path: Path) -> None:
    save_pretrained(_model(K3), tmp_path / "a")
    whole = load_file(tmp_path / "a" / "model-00001-of-00001.safetensors")
    vision = {"vision_tower.patch.weight": torch.randn(3, 5), "mm_projector.proj.bias": torch.ones(2, dtype=torch.int8)}
    save_file({**whole, **vision}, tmp_path / "a" / "model-00001-of-00001.safetensors")
    index = json.loads((tmp_path / "a" / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(vision, "model-00001-of-00001.safetensors")
    (tmp_path / "a" / INDEX).write_text(json.dumps(index))
    (tmp_path / "a" / "tiktoken.model").write_bytes(b"\x00words")
    values = json.loads((tmp_path / "a" / "config.json").read_text())
    values |= {"bos_token_id": 7, "vision_config": {"layers": 27}}
    values["text_config"]["num_nextn_predict_layers"] = 0
    (tmp_path / "a" / "config.json").write_text(json.dumps(values))
    save_pretrained(from_pretrained(tmp_path / "a"), tmp_path / "b", like=tmp_path / "a", max_shard_bytes=200_000)
    convert(tmp_path / "a", tmp_path / "c", max_shard_bytes=200_000)
    assert _digests(tmp_path / "b") == _digests(tmp_path / "c")
    found = {n: t for p in (tmp_path / "b").glob("model-*") for n, t in load_file(p).items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in vision.items())
    assert (tmp_path / "b" / "tiktoken.model").read_bytes() == b"\x00words"
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == values


def test_a_folder_in_the_form_that_transformers_gives_it_is_read(tmp_path: Path) -> None:
    """It renames dense feed-forwards, and its own configurations have other keys; tests/oracles has it write one."""
    save_pretrained(_model(LINEAR), tmp_path / "a")
    values = json.loads((tmp_path / "a" / "config.json").read_text())
    del values["linear_attn_config"], values["first_k_dense_replace"], values["mla_use_nope"]
    values |= {"layer_types": ["linear_attention"] * 3 + ["full_attention"] * 2, "linear_conv_kernel_dim": 4}
    values |= {"linear_head_dim": 32, "linear_num_heads": 2, "mlp_layer_types": ["dense"] + ["sparse"] * 4}
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text(json.dumps(values))
    tensors = load_file(tmp_path / "a" / "model-00001-of-00001.safetensors")
    renamed = {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "b" / "model.safetensors")
    loaded = from_pretrained(tmp_path / "b")
    assert loaded.config == LINEAR
    assert torch.equal(_logits(loaded), _logits(_model(LINEAR)))
    save_pretrained(loaded, tmp_path / "c")
    assert _digests(tmp_path / "c") == _digests(tmp_path / "a")


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model-00001-of-00001.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_tensors_that_are_missing_not_expected_or_misshaped_are_listed_at_once(tmp_path: Path) -> None:
    save_pretrained(_model(LINEAR), tmp_path / "a")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.9.mlp.gate_proj.weight"] = torch.zeros(1)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()

    _edit(tmp_path / "a", change)
    with pytest.raises(CheckpointError) as caught:
        from_pretrained(tmp_path / "a")
    message = str(caught.value)
    assert "1 missing: model.norm.weight" in message
    assert "1 not expected: model.layers.9.mlp.gate_proj.weight" in message
    assert "1 of another shape: lm_head.weight is (255, 64), not (256, 64)" in message


def test_padding_of_the_decay_rate_is_stripped_and_must_be_zero(tmp_path: Path) -> None:
    save_pretrained(_model(K3), tmp_path / "a")
    name = "language_model.model.layers.0.self_attn.A_log"
    assert load_file(tmp_path / "a" / "model-00001-of-00001.safetensors")[name].shape == (32,)
    assert from_pretrained(tmp_path / "a").layers[0].self_attn.A_log.shape == (2,)  # type: ignore[union-attr]
    _edit(tmp_path / "a", lambda tensors: tensors[name].__setitem__(5, 1.0))
    with pytest.raises(CheckpointError, match=r"A_log: entries from 2 on are padding"):
        from_pretrained(tmp_path / "a")


def test_folders_that_are_none_are_named_and_nothing_is_overwritten(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        from_pretrained(tmp_path)
    save_pretrained(_model(K3), tmp_path / "a")
    with pytest.raises(CheckpointError, match="nothing is overwritten"):
        save_pretrained(_model(K3), tmp_path / "a")
    (tmp_path / "a" / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no model-00001-of-00001"):
        from_pretrained(tmp_path / "a")


def test_a_shape_that_no_published_family_has_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    mixed = dataclasses.replace(K3, attn_res_block=None)
    with pytest.raises(ConfigError, match=r"model\.attn_res_block: of another family"):
        save_pretrained(K3Model(mixed), tmp_path / "a")
    with pytest.raises(ConfigError, match=r"model\.kda_value_dim"):
        to_hf_config(dataclasses.replace(K3, kda_value_dim=16))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["k3_tiny", "k3_nano", "k3_mini", "k3_small", "k3", "kimi_linear_48b"])
def test_configurations_survive_config_json(name: str) -> None:
    config = load_model_config(MODELS / f"{name}.yaml")
    assert from_hf_config(json.loads(json.dumps(to_hf_config(config)))) == config


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
        ("num_expert_group", 8, "num_expert_group is 8"),
        ("model_type", "llama", "model_type"),
        ("num_hidden_layers", 9, "layers 1 to 9"),
        ("attention_bias", True, "attention_bias is True"),
        ("num_key_value_heads", 1, "num_key_value_heads is 1"),
        ("num_attention_heads", 4, "num_key_value_heads is 2; only 4"),
        ("mlp_layer_types", ["dense", "sparse", "dense", "sparse"], "only leading layers are dense"),
    ],
)
def test_what_a_config_json_asks_for_and_is_not_built_is_named(key: str, value: object, named: str) -> None:
    values = to_hf_config(LINEAR)
    with pytest.raises(CheckpointError, match=named):
        from_hf_config({**values, key: value})
    del values["linear_attn_config"]
    with pytest.raises(CheckpointError, match="no key 'linear_attn_config'"):
        from_hf_config(values)


def test_the_released_model_has_the_parameters_and_tensors_that_its_report_counts() -> None:
    config = load_model_config(MODELS / "k3.yaml")
    total, active = count_parameters(config)
    plan = layout(config, "mxfp4")
    text = sum(len(stored.shapes(shape)) for stored, shape in plan.values())
    assert text == 497_220 - 168  # without the vision tower's
    stored = sum(
        torch.Size(s).numel() for at, shape in layout(config, "plain").values() for s in at.shapes(shape).values()
    )
    assert stored == 2_779_484_478_208
    assert stored == total + 92 * 896 + 2 * 7168 + 69 * 32  # biases, the unused mix of layer 0, the padding of A_log
    assert round(active / 1e9, 2) == 104.19


@pytest.mark.parametrize(
    ("name", "total", "active", "token", "state"),
    [
        ("k3", 2_779_484_379_232, 104_189_515_872, 27_648, 434_110_464),
        ("kimi_linear_48b", 49_122_675_072, 3_106_965_888, 8_064, 41_943_040),
    ],
)
def test_sizes_of_the_published_models(name: str, total: int, active: int, token: int, state: int) -> None:
    config = load_model_config(MODELS / f"{name}.yaml")
    assert count_parameters(config) == (total, active)
    assert cache_bytes(config, 1) - cache_bytes(config, 0) == token
    assert kda_state_bytes(config) == state


def test_early_spellings_of_the_mixes_are_understood(tmp_path: Path) -> None:
    model = _model(K3)
    save_pretrained(model, tmp_path / "a")

    def respell(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if "_res_norm." in n or "_res_proj." in n]:
            kind = "norm" if "_res_norm." in name else "proj"
            tensors[name.replace(f"_res_{kind}.weight", f"_res.{kind}_weight")] = tensors.pop(name)

    _edit(tmp_path / "a", respell)
    assert torch.equal(_logits(from_pretrained(tmp_path / "a")), _logits(model))
