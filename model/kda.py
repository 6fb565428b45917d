"""The KDA mixer. Letters: T tokens, N sequences, P padded rows, H heads, K key width, V value width, D model width."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from k3rl.kernels.kda import kda_gate, kda_tiles, l2norm, short_conv
from k3rl.model.cache import KdaCache
from k3rl.model.layers import RMSNorm, linear

if TYPE_CHECKING:
    from k3rl.config import ModelConfig
    from k3rl.model.cache import Layout


class ShortConv(nn.Module):
    """Holds a depthwise filter under its checkpoint name."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))


class KdaMixer(nn.Module):
    """Kimi Delta Attention with short convolutions, a bounded decay gate and a normalised, gated output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = config
        self.heads, self.key_dim, self.value_dim = c.num_heads, c.kda_key_dim, c.kda_value_dim
        self.lower_bound, self.tile = c.gate_lower_bound, c.state_tile
        keys, values = self.heads * self.key_dim, self.heads * self.value_dim
        self.q_proj, self.k_proj = linear(c.hidden_size, keys), linear(c.hidden_size, keys)
        self.v_proj = linear(c.hidden_size, values)
        self.q_conv1d, self.k_conv1d = ShortConv(keys, c.conv_kernel), ShortConv(keys, c.conv_kernel)
        self.v_conv1d = ShortConv(values, c.conv_kernel)
        self.f_a_proj, self.f_b_proj = linear(c.hidden_size, c.kda_gate_rank), linear(c.kda_gate_rank, keys)
        self.b_proj, self.g_proj = linear(c.hidden_size, self.heads), linear(c.hidden_size, values)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(keys))
        self.o_norm = RMSNorm(self.value_dim, c.rms_norm_eps)
        self.o_proj = linear(values, c.hidden_size)

    def forward(
        self, inputs_TD: torch.Tensor, layout: Layout, cache: KdaCache | None
    ) -> tuple[torch.Tensor, KdaCache | None]:
        """Mix [T, D] and return the cache after it (None when there was none)."""
        rows_THX, window = self._project(inputs_TD, layout, cache)
        num, padded = layout.kda_in.shape
        width = rows_THX.shape[-1]
        sources = [rows_THX, rows_THX.new_zeros(1, self.heads, width)]
        if cache is not None:
            # Open rows need no query: their outputs were read when they were new.
            held = nn.functional.pad(cache.open_rows, (self.key_dim, 0))
            sources.insert(0, held.reshape(num * self.tile, self.heads, width))
        source = torch.cat(sources)
        rows_NPHX = source.index_select(0, layout.kda_in.flatten()).view(num, padded, self.heads, width)
        q, k, v, g, beta = rows_NPHX.split([self.key_dim, self.key_dim, self.value_dim, self.key_dim, 1], dim=-1)
        state = None if cache is None else cache.state
        out_NPHV, state = kda_tiles(q, k, v, g, beta.squeeze(-1), state, self.tile, layout.kda_full)
        out_THV = out_NPHV.reshape(num * padded, self.heads, self.value_dim).index_select(0, layout.kda_out)
        gate = torch.sigmoid(self.g_proj(inputs_TD))
        normed = self.o_norm(out_THV.to(inputs_TD.dtype)).reshape(len(inputs_TD), self.heads * self.value_dim)
        result = self.o_proj(normed * gate)
        if cache is None:
            return result, None
        kept = source.index_select(0, layout.kda_open.flatten())[..., self.key_dim :]
        return result, KdaCache(state, kept.view(num, self.tile, self.heads, width - self.key_dim), window)

    def _project(
        self, inputs_TD: torch.Tensor, layout: Layout, cache: KdaCache | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [T, H, q | k | v | g | beta], at least float32, and the next convolution window."""
        qkv = torch.cat([self.q_proj(inputs_TD), self.k_proj(inputs_TD), self.v_proj(inputs_TD)], dim=-1)
        filters = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight]).squeeze(1)
        window = None if cache is None else cache.window
        mixed, window = short_conv(qkv, filters, layout.cu_seqlens, window, layout.conv)
        wide = torch.promote_types(inputs_TD.dtype, torch.float32)
        keys = self.heads * self.key_dim
        q, k, v = nn.functional.silu(mixed.to(wide)).split([keys, keys, self.heads * self.value_dim], dim=-1)
        shape = (len(inputs_TD), self.heads, self.key_dim)
        q = l2norm(q.reshape(shape)) * self.key_dim**-0.5
        k = l2norm(k.reshape(shape))
        z = self.f_b_proj(self.f_a_proj(inputs_TD)).to(wide).reshape(shape)
        g = kda_gate(z, self.A_log.to(wide), self.dt_bias.to(wide).view(shape[1:]), self.lower_bound)
        beta = torch.sigmoid(self.b_proj(inputs_TD).to(wide)).unsqueeze(-1)
        v = v.reshape(len(inputs_TD), self.heads, self.value_dim)
        return torch.cat([q, k, v, g, beta], dim=-1), window
