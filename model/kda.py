"""The KDA mixer. Letters: T tokens, N sequences, P padded rows, H heads, K key width, V value width, D model width."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from k3rl.kernels.common import choose_backend
from k3rl.kernels.kda import (
    conv_decode,
    kda_chunk,
    kda_decode,
    kda_gate,
    kda_softplus_gate,
    kda_tiles,
    l2norm,
    short_conv,
)
from k3rl.model.cache import KdaRows
from k3rl.model.layers import COLUMNS, ROWS, WHOLE, RMSNorm, linear, output_gate

if TYPE_CHECKING:
    from k3rl.config import ModelConfig
    from k3rl.kernels.kda import TilePlan
    from k3rl.model.cache import KdaPast, Layout, Memory


class ShortConv(nn.Module):
    """Holds a depthwise filter under its checkpoint name."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))


class KdaMixer(nn.Module):
    """Kimi Delta Attention with short convolutions, a decay gate and a normalised, gated output."""

    # Cut by heads. What is in front of the heads is whole, and so is the norm that they share.
    placements: ClassVar = {
        **{f"{x}_{kind}.weight": ROWS for x in "qkv" for kind in ("proj", "conv1d")},
        "f_a_proj.weight": WHOLE,
        "f_b_proj.weight": ROWS,
        "b_proj.weight": ROWS,
        "g_proj.weight": ROWS,
        "g_proj.0.weight": WHOLE,
        "g_proj.1.weight": ROWS,
        "A_log": ROWS,
        "dt_bias": ROWS,
        "o_norm.weight": WHOLE,
        "o_proj.weight": COLUMNS,
    }

    def __init__(self, config: ModelConfig, slot: int) -> None:
        super().__init__()
        c = config
        self.slot = slot  # in the cache
        self.heads, self.key_dim, self.value_dim = c.num_heads, c.kda_key_dim, c.kda_value_dim
        self.bound, self.tile = c.kda_gate_bound, c.state_tile
        keys, values = self.heads * self.key_dim, self.heads * self.value_dim
        self.q_proj, self.k_proj = linear(c.hidden_size, keys), linear(c.hidden_size, keys)
        self.v_proj = linear(c.hidden_size, values)
        self.q_conv1d, self.k_conv1d = ShortConv(keys, c.conv_kernel), ShortConv(keys, c.conv_kernel)
        self.v_conv1d = ShortConv(values, c.conv_kernel)
        self.f_a_proj, self.f_b_proj = linear(c.hidden_size, c.kda_gate_rank), linear(c.kda_gate_rank, keys)
        self.b_proj = linear(c.hidden_size, self.heads)
        self.g_proj = output_gate(c.hidden_size, values, c.kda_output_gate_rank)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(keys))
        self.o_norm = RMSNorm(self.value_dim, c.rms_norm_eps)
        self.o_proj = linear(values, c.hidden_size)

    def forward(self, inputs_TD: torch.Tensor, memory: Memory) -> torch.Tensor:
        """Mix [T, D], reading and writing this layer's part of the cache."""
        layout, before = memory.layout, memory.read_kda(self.slot)
        mixed_TC, window = self._convolve(inputs_TD, layout, before)
        if layout.tiles is not None and self.bound is not None and choose_backend(inputs_TD) == "triton":
            out_THV = self._fused(inputs_TD, mixed_TC, layout.tiles, self.bound)
        else:
            rows_THX = self._rows(inputs_TD, mixed_TC)
            if isinstance(before, KdaRows) and layout.decode:
                out_THV, state, kept = self._decode(rows_THX, layout, before)
            else:
                out_THV, state, kept = self._tiles(rows_THX, layout, before)
            if isinstance(before, KdaRows):
                memory.write_kda(self.slot, KdaRows(state, kept, window))
        gate = torch.sigmoid(self.g_proj(inputs_TD))
        normed = self.o_norm(out_THV.to(inputs_TD.dtype)).reshape(len(inputs_TD), self.heads * self.value_dim)
        return self.o_proj(normed * gate)

    def _decode(
        self, rows_NHX: torch.Tensor, layout: Layout, before: KdaRows
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One token per sequence: outputs [N, H, V], and the cache's state and open rows after it."""
        num, padded = layout.kda_in.shape
        q, new = rows_NHX.split([self.key_dim, rows_NHX.shape[-1] - self.key_dim], dim=-1)
        at = (torch.arange(num, device=q.device), layout.offsets % self.tile)
        rows = before.open_rows.index_put(at, new)
        sizes = [self.key_dim, self.value_dim, self.key_dim, 1]
        k, v, g, beta = (x.transpose(1, 2).contiguous() for x in rows[:, :padded].split(sizes, dim=-1))
        out, state = kda_decode(q, k, v, g, beta, before.state, self.bound is not None)
        if not layout.any_full:
            return out, before.state, rows
        full = layout.kda_full.bool().view(num, 1, 1, 1)
        return out, torch.where(full, state, before.state), rows.masked_fill(full, 0)

    def _tiles(
        self, rows_THX: torch.Tensor, layout: Layout, before: KdaPast | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Any number of tokens: outputs [T, H, V], and the cache's state and open rows after them."""
        num, padded = layout.kda_in.shape
        width = rows_THX.shape[-1]
        sources = [rows_THX, rows_THX.new_zeros(1, self.heads, width)]
        if isinstance(before, KdaRows):
            # Open rows need no query: their outputs were read when they were new.
            held = nn.functional.pad(before.open_rows, (self.key_dim, 0))
            sources.append(held.reshape(num * self.tile, self.heads, width))
        source = torch.cat(sources)
        rows_NPHX = source.index_select(0, layout.kda_in.flatten()).view(num, padded, self.heads, width)
        q, k, v, g, beta = rows_NPHX.split([self.key_dim, self.key_dim, self.value_dim, self.key_dim, 1], dim=-1)
        beta, bounded = beta.squeeze(-1), self.bound is not None
        state = None if before is None else before.state_before(k, v, g, beta, bounded)
        out_NPHV, state = kda_tiles(q, k, v, g, beta, state, self.tile, layout.kda_full, bounded)
        out_THV = out_NPHV.reshape(num * padded, self.heads, self.value_dim).index_select(0, layout.kda_out)
        if not isinstance(before, KdaRows):
            return out_THV, state, state.new_zeros(0)
        kept = source.index_select(0, layout.kda_open.flatten())[..., self.key_dim :]
        return out_THV, state, kept.view(num, self.tile, self.heads, width - self.key_dim)

    def _fused(self, inputs_TD: torch.Tensor, mixed_TC: torch.Tensor, plan: TilePlan, bound: float) -> torch.Tensor:
        """Outputs [T, H, V] of sequences that begin and end here, norms and gate inside the kernels."""
        q, k, v = (x.to(inputs_TD.dtype) for x in self._activate(mixed_TC))
        z = self.f_b_proj(self.f_a_proj(inputs_TD)).view_as(q)
        dt_bias = self.dt_bias.view(self.heads, self.key_dim)
        b = self.b_proj(inputs_TD)
        return kda_chunk(q, k, v, z, b, self.A_log, dt_bias, plan=plan, lower_bound=bound)[0]

    def _convolve(
        self, inputs_TD: torch.Tensor, layout: Layout, before: KdaPast | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [T, q | k | v] after the convolution, and its next window."""
        # One product with the joined weights costs less than three products and joining their results.
        qkv = nn.functional.linear(inputs_TD, torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]))
        filters = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight]).squeeze(1)
        if isinstance(before, KdaRows) and layout.decode:
            return conv_decode(qkv, filters, before.window)
        window = None if before is None else before.window_before(qkv)
        return short_conv(qkv, filters, layout.cu_seqlens, window, layout.conv)

    def _activate(self, mixed_TC: torch.Tensor) -> list[torch.Tensor]:
        """q, k [T, H, K] and v [T, H, V] without their norms, at least float32."""
        keys, shape = self.heads * self.key_dim, (len(mixed_TC), self.heads, -1)
        wide = mixed_TC.to(torch.promote_types(mixed_TC.dtype, torch.float32))
        parts = nn.functional.silu(wide).split([keys, keys, self.heads * self.value_dim], dim=-1)
        return [x.reshape(shape) for x in parts]

    def _rows(self, inputs_TD: torch.Tensor, mixed_TC: torch.Tensor) -> torch.Tensor:
        """Rows [T, H, q | k | v | g | beta], at least float32."""
        q, k, v = self._activate(mixed_TC)
        beta = torch.sigmoid(self.b_proj(inputs_TD).to(v.dtype)).unsqueeze(-1)
        return torch.cat([l2norm(q) * self.key_dim**-0.5, l2norm(k), v, self.log_decay(inputs_TD), beta], dim=-1)

    def log_decay(self, inputs_TD: torch.Tensor) -> torch.Tensor:
        """Log decay [T, H, K] of each token, at least float32, at most 0."""
        wide = torch.promote_types(inputs_TD.dtype, torch.float32)
        z = self.f_b_proj(self.f_a_proj(inputs_TD)).to(wide).view(len(inputs_TD), self.heads, self.key_dim)
        A_log, dt_bias = self.A_log.to(wide), self.dt_bias.to(wide).view(self.heads, self.key_dim)
        if self.bound is None:
            return kda_softplus_gate(z, A_log, dt_bias)
        return kda_gate(z, A_log, dt_bias, self.bound)
