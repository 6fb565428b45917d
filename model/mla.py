"""The multi-head latent attention mixer, without positions.

Letters: T tokens, N sequences, Q padded queries, L keys, H heads, R latent width, A pe width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from k3rl.kernels.mla import mla_absorbed, mla_expanded
from k3rl.model.layers import COLUMNS, ROWS, WHOLE, RMSNorm, linear

if TYPE_CHECKING:
    from k3rl.config import ModelConfig
    from k3rl.model.cache import Memory

ABSORB_QUERIES = 16
"""Up to this many new tokens per sequence, attending to the latents costs less than expanding the whole context."""


class MlaMixer(nn.Module):
    """Full causal attention over a compressed latent, with an output gate in K3."""

    # Cut by heads. The latents are whole: every rank's heads read all of them.
    placements: ClassVar = {
        "q_proj.weight": ROWS,
        "q_a_proj.weight": WHOLE,
        "q_a_layernorm.weight": WHOLE,
        "q_b_proj.weight": ROWS,
        "kv_a_proj_with_mqa.weight": WHOLE,
        "kv_a_layernorm.weight": WHOLE,
        "kv_b_proj.weight": ROWS,
        "g_proj.weight": ROWS,
        "o_proj.weight": COLUMNS,
    }

    def __init__(self, config: ModelConfig, slot: int) -> None:
        super().__init__()
        c = config
        self.slot = slot  # in the cache
        self.heads, self.key_dim, self.value_dim = c.num_heads, c.qk_nope_dim, c.v_head_dim
        self.rank, self.pe_dim = c.kv_lora_rank, c.qk_rope_dim
        queries = self.heads * (self.key_dim + self.pe_dim)
        if c.q_lora_rank is None:
            self.q_proj = linear(c.hidden_size, queries)
        else:
            self.q_a_proj = linear(c.hidden_size, c.q_lora_rank)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.mla_norm_eps)
            self.q_b_proj = linear(c.q_lora_rank, queries)
        self.has_low_rank_query = c.q_lora_rank is not None
        self.kv_a_proj_with_mqa = linear(c.hidden_size, self.rank + self.pe_dim)
        self.kv_a_layernorm = RMSNorm(self.rank, c.mla_norm_eps)
        self.kv_b_proj = linear(self.rank, self.heads * (self.key_dim + self.value_dim))
        self.g_proj = linear(c.hidden_size, self.heads * self.value_dim) if c.mla_output_gate else None
        self.o_proj = linear(self.heads * self.value_dim, c.hidden_size)

    def forward(self, inputs_TD: torch.Tensor, memory: Memory) -> torch.Tensor:
        """Mix [T, D], adding this layer's latents to the cache."""
        layout = memory.layout
        num, queries = layout.query_in.shape
        q_TX = self.queries(inputs_TD)
        latent_TX, pe_TA = self.kv_a_proj_with_mqa(inputs_TD).split([self.rank, self.pe_dim], dim=-1)
        new_TX = torch.cat([self.kv_a_layernorm(latent_TX), pe_TA], dim=-1)
        latents_NLX = memory.append_latents(self.slot, new_TX)
        q_rows = torch.cat([q_TX, q_TX.new_zeros(1, q_TX.shape[1])]).index_select(0, layout.query_in.flatten())
        q_NQHX = q_rows.view(num, queries, self.heads, self.key_dim + self.pe_dim)
        attend = mla_absorbed if queries <= ABSORB_QUERIES else mla_expanded
        out = attend(q_NQHX, latents_NLX, self.expansion, self.key_dim, layout.offsets)
        out_TX = out.reshape(num * queries, self.heads * self.value_dim).index_select(0, layout.query_out)
        return self.o_proj(out_TX if self.g_proj is None else out_TX * torch.sigmoid(self.g_proj(inputs_TD)))

    @property
    def expansion(self) -> torch.Tensor:
        """What expands a latent: per head, rows of its key, then of its value."""
        return self.kv_b_proj.weight.view(self.heads, self.key_dim + self.value_dim, self.rank)

    def queries(self, inputs_TD: torch.Tensor) -> torch.Tensor:
        """Queries [T, H (K + A)]."""
        if self.has_low_rank_query:
            return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(inputs_TD)))
        return self.q_proj(inputs_TD)
