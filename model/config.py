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


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """(total, active): all trained parameters, and those that one token's forward reads, embedding table apart."""
    c = config
    num_mla = len(c.mla_layers)
    mixers = num_mla * _mla_parameters(c) + (c.num_layers - num_mla) * _kda_parameters(c)
    # Two norms a layer and the last one; with mixes, a norm and a query for each of two a layer, one of them not in the
    # first layer, and for the output.
    vectors = (2 * c.num_layers + 1) * c.hidden_size
    if c.attn_res_block is not None:
        vectors += 4 * c.num_layers * c.hidden_size
    num_moe = c.num_layers - c.num_dense_layers
    dense = c.num_dense_layers * 3 * c.hidden_size * c.dense_dim
    fixed = c.hidden_size * c.num_experts + 3 * c.hidden_size * c.shared_dim
    if c.latent_dim is not None:
        fixed += 2 * c.hidden_size * c.latent_dim + c.latent_dim
    expert = 3 * (c.latent_dim or c.hidden_size) * c.expert_dim
    table = c.vocab_size * c.hidden_size
    head = c.hidden_size + 1 if c.value_head else 0
    active = mixers + vectors + dense + num_moe * (fixed + c.experts_per_token * expert) + table + head
    return active + num_moe * (c.num_experts - c.experts_per_token) * expert + table, active


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
