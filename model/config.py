"""Sizes that follow from a model's configuration, in plain Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3rl.config import ModelConfig


def _kda_parameters(c: ModelConfig) -> int:
    heads, key, value, dim = c.num_heads, c.kda_key_dim, c.kda_value_dim, c.hidden_size
    projections = dim * heads * (2 * key + value) + heads * value * dim
    rank = c.kda_output_gate_rank
    out_gate = dim * heads * value if rank is None else rank * (dim + heads * value)
    decay = c.kda_gate_rank * (dim + heads * key) + heads + heads * key
    return projections + out_gate + c.conv_kernel * heads * (2 * key + value) + decay + heads * dim + value


def _mla_parameters(c: ModelConfig) -> int:
    heads, dim, value = c.num_heads, c.hidden_size, c.v_head_dim
    queries, rank = heads * (c.qk_nope_dim + c.qk_rope_dim), c.q_lora_rank
    query = dim * queries if rank is None else rank * (dim + 1 + queries)
    keys = dim * (c.kv_lora_rank + c.qk_rope_dim) + c.kv_lora_rank + c.kv_lora_rank * heads * (c.qk_nope_dim + value)
    return query + keys + (1 + c.mla_output_gate) * dim * heads * value


def _expert_parameters(c: ModelConfig) -> int:
    return 3 * (c.latent_dim or c.hidden_size) * c.expert_dim


def _layer_parameters(c: ModelConfig, index: int) -> int:
    mixer = _mla_parameters(c) if index in c.mla_layers else _kda_parameters(c)
    # Two norms; with mixes, a norm and a query for each of two, but for one in the first layer.
    vectors = 2 + (0 if c.attn_res_block is None else 2 if index == 0 else 4)
    if index < c.num_dense_layers:
        return mixer + vectors * c.hidden_size + 3 * c.hidden_size * c.dense_dim
    latent = 0 if c.latent_dim is None else 2 * c.hidden_size * c.latent_dim + c.latent_dim
    router, shared = c.hidden_size * c.num_experts, 3 * c.hidden_size * c.shared_dim
    return mixer + vectors * c.hidden_size + latent + router + shared + c.experts_per_token * _expert_parameters(c)


def active_parameters(config: ModelConfig) -> list[int]:
    """Parameters that one token's forward reads, embedding table apart: in each layer, and after the last."""
    c = config
    vectors = 1 if c.attn_res_block is None else 3  # a norm; with mixes, one's norm and query
    head = c.hidden_size + 1 if c.value_head else 0
    after = vectors * c.hidden_size + c.vocab_size * c.hidden_size + head
    return [*(_layer_parameters(c, i) for i in range(c.num_layers)), after]


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """(total, active): all trained parameters, and those that one token's forward reads, embedding table apart."""
    c = config
    active, idle = sum(active_parameters(c)), c.num_experts - c.experts_per_token
    experts = (c.num_layers - c.num_dense_layers) * idle * _expert_parameters(c)
    return active + experts + c.vocab_size * c.hidden_size, active


def kda_state_bytes(config: ModelConfig) -> int:
    """Bytes of one sequence's float32 KDA states, whatever its length."""
    num_kda = config.num_layers - len(config.mla_layers)
    return 4 * num_kda * config.num_heads * config.kda_key_dim * config.kda_value_dim


def cache_bytes(config: ModelConfig, num_tokens: int, element_bytes: int = 2) -> int:
    """Bytes of one sequence's cache: states, open rows (float32), convolution windows and latents."""
    c = config
    num_kda = c.num_layers - len(c.mla_layers)
    open_rows = 4 * c.state_tile * c.num_heads * (2 * c.kda_key_dim + c.kda_value_dim + 1)
    window = element_bytes * (c.conv_kernel - 1) * c.num_heads * (2 * c.kda_key_dim + c.kda_value_dim)
    latents = element_bytes * num_tokens * len(c.mla_layers) * (c.kv_lora_rank + c.qk_rope_dim)
    return kda_state_bytes(c) + num_kda * (open_rows + window) + latents
