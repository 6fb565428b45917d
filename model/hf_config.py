"""A model's configuration as Hugging Face folders write it, and back.

Two families: ``kimi_k3``, whose text model is nested under ``text_config``, and ``kimi_linear``, which is flat.
A configuration that is neither, such as K3 without AttnRes, has no such form and is refused.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from k3rl.config import ModelConfig
from k3rl.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

EXTRA = "k3rl"
"""Key of config.json with what only this project knows: how to initialise, the state's tile, a value head, how
experts are trained."""
EXTRA_FIELDS = ("state_tile", "head_init", "value_head", "expert_format")
MLA_NORM_EPS = 1e-6
"""The class's default in the published code; config.json does not say it."""
K3, LINEAR = "kimi_k3", "kimi_linear"
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Belong to the tokenizer. Where they are not said, transformers takes those of the released vocabulary, which is too
large for another."""


def family(config: ModelConfig) -> str:
    """``kimi_k3`` or ``kimi_linear``; ConfigError names the choices that are of the other one."""
    k3 = {
        "kda_gate_bound": config.kda_gate_bound is not None,
        "kda_output_gate_rank": config.kda_output_gate_rank is None,
        "mla_output_gate": config.mla_output_gate,
        "latent_dim": config.latent_dim is not None,
        "attn_res_block": config.attn_res_block is not None,
        "activation": config.activation == "situ",
    }
    if len(set(k3.values())) > 1:
        fewer = sum(k3.values()) * 2 <= len(k3)
        odd = ", ".join(f"model.{name}" for name, is_k3 in k3.items() if is_k3 == fewer)
        raise ConfigError(f"{odd}: of another family than the rest; folders hold either Kimi K3 or Kimi Linear")
    return K3 if k3["activation"] else LINEAR


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """Contents of config.json; ConfigError for a shape that it cannot say."""
    c, kind = config, family(config)
    _refuse_unsayable(c)
    text, extra = _shared_keys(c), {name: getattr(c, name) for name in EXTRA_FIELDS}
    if kind == LINEAR:
        return {"architectures": ["KimiLinearForCausalLM"], **text, EXTRA: extra}
    text["linear_attn_config"] |= {"use_full_rank_gate": True, "gate_lower_bound": c.kda_gate_bound}
    text |= {
        "activation_situ_beta": c.situ_beta,
        "activation_situ_linear_beta": c.situ_linear_beta,
        "routed_expert_hidden_size": c.latent_dim,
        "latent_moe_use_norm": True,
        "mla_use_output_gate": True,
        "attn_res_block_size": c.attn_res_block,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": K3,
        "tie_word_embeddings": False,
        "text_config": text,
        EXTRA: extra,
    }


def _shared_keys(c: ModelConfig) -> dict[str, Any]:
    """What both families say."""
    full = [i + 1 for i in c.mla_layers]
    linear: dict[str, Any] = {
        "full_attn_layers": full,
        "kda_layers": [i + 1 for i in range(c.num_layers) if i + 1 not in full],
        "num_heads": c.num_heads,
        "head_dim": c.kda_key_dim,
        "short_conv_kernel_size": c.conv_kernel,
    }
    return {
        "model_type": LINEAR,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_heads,
        "intermediate_size": c.dense_dim,
        "hidden_act": {"situ": "situ", "swiglu": "silu"}[c.activation],
        "rms_norm_eps": c.rms_norm_eps,
        "initializer_range": c.initializer_range,
        "first_k_dense_replace": c.num_dense_layers,
        "moe_layer_freq": 1,
        "num_experts": c.num_experts,
        "num_experts_per_token": c.experts_per_token,
        "num_shared_experts": c.shared_dim // c.expert_dim,
        "moe_intermediate_size": c.expert_dim,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": c.routed_scale,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "q_lora_rank": c.q_lora_rank,
        "kv_lora_rank": c.kv_lora_rank,
        "qk_nope_head_dim": c.qk_nope_dim,
        "qk_rope_head_dim": c.qk_rope_dim,
        "v_head_dim": c.v_head_dim,
        "mla_use_nope": True,
        "tie_word_embeddings": False,
        "linear_attn_config": linear,
    }


def _refuse_unsayable(c: ModelConfig) -> None:
    problems = {
        "kda_value_dim": c.kda_key_dim != c.kda_value_dim,
        "kda_gate_rank": c.kda_gate_rank != c.kda_key_dim,
        "kda_output_gate_rank": c.kda_output_gate_rank not in (None, c.kda_key_dim),
        "shared_dim": c.shared_dim % c.expert_dim != 0,
        "mla_norm_eps": c.mla_norm_eps != MLA_NORM_EPS,
    }
    if any(problems.values()):
        named = ", ".join(f"model.{name}" for name, wrong in problems.items() if wrong)
        raise ConfigError(
            f"{named}: config.json cannot say it (one width of a KDA head, also that of the gates' ranks; shared_dim a "
            f"multiple of expert_dim; mla_norm_eps {MLA_NORM_EPS:g})"
        )


def from_hf_config(values: Mapping[str, Any]) -> ModelConfig:
    """Read config.json, nested or flat. CheckpointError names a key that is missing or says what we do not build."""
    text = values.get("text_config", values)
    if text.get("model_type") != LINEAR:
        raise CheckpointError(f"config.json: model_type is {values.get('model_type')!r}, not {K3!r} or {LINEAR!r}")
    try:
        return _read(text, values.get(EXTRA, {}))
    except KeyError as error:
        raise CheckpointError(f"config.json: no key {error.args[0]!r}") from error


def _read(text: Mapping[str, Any], extra: Mapping[str, Any]) -> ModelConfig:
    linear = _linear_attention(text)
    layers = text["num_hidden_layers"]
    mla, kda = linear["full_attn_layers"], linear["kda_layers"]
    if sorted([*mla, *kda]) != list(range(1, layers + 1)):
        raise CheckpointError(f"config.json: full_attn_layers and kda_layers must share out the layers 1 to {layers}")
    expected = {"moe_renormalize": True, "num_expert_group": 1, "moe_layer_freq": 1, "tie_word_embeddings": False}
    expected |= {"moe_router_activation_func": "sigmoid", "mla_use_nope": True, "attention_bias": False}
    expected |= {"num_key_value_heads": text["num_attention_heads"]}
    for key, value in expected.items():
        if text.get(key, value) != value:
            raise CheckpointError(f"config.json: {key} is {text[key]!r}; only {value!r} is built here")
    if linear["num_heads"] != text["num_attention_heads"]:
        raise CheckpointError(
            f"config.json: KDA has {linear['num_heads']} heads and MLA {text['num_attention_heads']}; "
            "one number is built here"
        )
    activation = {"situ": "situ", "silu": "swiglu"}.get(text["hidden_act"])
    if activation is None:
        raise CheckpointError(f"config.json: hidden_act is {text['hidden_act']!r}; 'situ' and 'silu' are built here")
    width = linear["head_dim"]
    optional = {"situ_beta": "activation_situ_beta", "situ_linear_beta": "activation_situ_linear_beta"}
    fields = {name: text[key] for name, key in optional.items() if key in text}
    return ModelConfig(
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        num_layers=layers,
        mla_layers=tuple(i - 1 for i in mla),
        num_heads=text["num_attention_heads"],
        kda_key_dim=width,
        kda_value_dim=width,
        kda_gate_rank=width,
        kda_gate_bound=linear.get("gate_lower_bound"),
        kda_output_gate_rank=None if linear.get("use_full_rank_gate") else width,
        conv_kernel=linear["short_conv_kernel_size"],
        q_lora_rank=text["q_lora_rank"],
        kv_lora_rank=text["kv_lora_rank"],
        qk_nope_dim=text["qk_nope_head_dim"],
        qk_rope_dim=text["qk_rope_head_dim"],
        v_head_dim=text["v_head_dim"],
        mla_output_gate=text.get("mla_use_output_gate", False),
        num_dense_layers=_dense_layers(text),
        dense_dim=text["intermediate_size"],
        num_experts=text["num_experts"],
        experts_per_token=text["num_experts_per_token"],
        routed_scale=text["routed_scaling_factor"],
        latent_dim=text.get("routed_expert_hidden_size"),
        expert_dim=text["moe_intermediate_size"],
        shared_dim=text["num_shared_experts"] * text["moe_intermediate_size"],
        attn_res_block=text.get("attn_res_block_size"),
        activation=activation,  # type: ignore[arg-type]
        rms_norm_eps=text["rms_norm_eps"],
        mla_norm_eps=MLA_NORM_EPS,
        initializer_range=text["initializer_range"],
        **fields,
        **{name: value for name, value in extra.items() if name in {f.name for f in dataclasses.fields(ModelConfig)}},
    )


def _linear_attention(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """The published key, or made of what transformers writes in its place."""
    if "linear_attn_config" in text or "layer_types" not in text:
        return text["linear_attn_config"]
    of_type = {
        kind: [i + 1 for i, name in enumerate(text["layer_types"]) if name == kind]
        for kind in ("full_attention", "linear_attention")
    }
    return {
        "full_attn_layers": of_type["full_attention"],
        "kda_layers": of_type["linear_attention"],
        "num_heads": text["linear_num_heads"],
        "head_dim": text["linear_head_dim"],
        "short_conv_kernel_size": text["linear_conv_kernel_dim"],
    }


def _dense_layers(text: Mapping[str, Any]) -> int:
    """The published key, or what transformers writes, which wins there if both stand."""
    types = text.get("mlp_layer_types")
    if types is None:
        return text["first_k_dense_replace"]
    num = types.count("dense")
    if types != ["dense"] * num + ["sparse"] * (len(types) - num):
        raise CheckpointError(f"config.json: mlp_layer_types is {types!r}; only leading layers are dense here")
    return num
