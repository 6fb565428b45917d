"""What a sequence leaves behind for its continuation, and where the packed rows of a forward go.

Letters: N sequences, T new tokens, P padded rows, H heads, K key width, V value width, W taps, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import torch

from k3rl.kernels.kda import conv_plan
from k3rl.kernels.kda.reference import TILE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k3rl.config import ModelConfig


class Cache(Protocol):
    """State of N sequences; any may stop, fork or continue at any token."""

    @property
    def num_sequences(self) -> int: ...

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens that the cache covers, [N] int64."""
        ...

    def select(self, rows: torch.Tensor) -> Self:
        """The sequences ``rows`` [M] int64, in that order; a repeated row is a fork."""
        ...


@dataclass(frozen=True, slots=True)
class KdaCache:
    """One KDA layer."""

    state: torch.Tensor  # [N, H, K, V] float32, at the last multiple of state_tile
    open_rows: torch.Tensor  # [N, state_tile, H, 2K + V + 1] k, v, g, beta since then, zero rows at the end
    window: torch.Tensor  # [N, W - 1, C] last inputs of the convolution


@dataclass(frozen=True, slots=True)
class ValueCache:
    """Functional, differentiable cache: a forward returns a new one and gradients flow through all its tensors."""

    lengths: torch.Tensor  # [N] int64
    kda: tuple[KdaCache, ...]
    latents: tuple[torch.Tensor, ...]  # per MLA layer [N, Lmax, R + A]

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @staticmethod
    def empty(
        config: ModelConfig,
        num_sequences: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> ValueCache:
        """Caches of sequences that have not begun; ``dtype`` is the model's, states and open rows are float32."""
        c, n = config, num_sequences
        wide = torch.promote_types(dtype, torch.float32)
        heads, key, value = c.num_heads, c.kda_key_dim, c.kda_value_dim
        kda = tuple(
            KdaCache(
                torch.zeros(n, heads, key, value, device=device, dtype=wide),
                torch.zeros(n, c.state_tile, heads, 2 * key + value + 1, device=device, dtype=wide),
                torch.zeros(n, c.conv_kernel - 1, heads * (2 * key + value), device=device, dtype=dtype),
            )
            for _ in range(c.num_layers - len(c.mla_layers))
        )
        latents = tuple(
            torch.zeros(n, 0, c.kv_lora_rank + c.qk_rope_dim, device=device, dtype=dtype) for _ in c.mla_layers
        )
        return ValueCache(torch.zeros(n, dtype=torch.int64, device=device), kda, latents)

    @staticmethod
    def concat(caches: Sequence[ValueCache]) -> ValueCache:
        """All sequences of several caches, in order."""
        longest = max(x.shape[1] for c in caches for x in c.latents) if caches[0].latents else 0

        def padded(latent: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(latent, (0, 0, 0, longest - latent.shape[1]))

        columns = zip(*(c.tensors() for c in caches), strict=True)
        split = 3 * len(caches[0].kda)
        joined = [torch.cat([padded(x) if i >= split else x for x in column]) for i, column in enumerate(columns)]
        return ValueCache(torch.cat([c.lengths for c in caches]), caches[0].kda, caches[0].latents).with_tensors(joined)

    def select(self, rows: torch.Tensor) -> ValueCache:
        """The sequences ``rows`` [M] int64, in that order; a repeated row is a fork."""
        lengths = self.lengths[rows]
        longest = int(lengths.max()) if len(rows) else 0
        chosen = [x.index_select(0, rows) for x in self.tensors()]
        split = 3 * len(self.kda)
        trimmed = [x[:, :longest] if i >= split else x for i, x in enumerate(chosen)]
        return ValueCache(lengths, self.kda, self.latents).with_tensors(trimmed)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All floating tensors: state, open rows and window of each KDA layer, then the latents."""
        for layer in self.kda:
            yield from (layer.state, layer.open_rows, layer.window)
        yield from self.latents

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> ValueCache:
        """The same sequences with other tensors, in the order of :meth:`tensors`."""
        split = 3 * len(self.kda)
        if len(tensors) != split + len(self.latents):
            raise ValueError(f"expected {split + len(self.latents)} tensors, got {len(tensors)}")
        kda = tuple(KdaCache(*tensors[i : i + 3]) for i in range(0, split, 3))
        return ValueCache(self.lengths, kda, tuple(tensors[split:]))

    def detach(self) -> ValueCache:
        """The same values without their history."""
        return self.with_tensors([x.detach() for x in self.tensors()])


@dataclass(frozen=True, slots=True)
class Layout:
    """Index plans of one forward, shared by its layers.

    KDA rows come from [N * tile open rows, T new rows, 1 zero row]; MLA rows from [N * Lmax old, T new, 1 zero row].
    """

    cu_seqlens: torch.Tensor
    conv: tuple[torch.Tensor, torch.Tensor]
    kda_in: torch.Tensor  # [N, P] open rows, then new rows, then the zero row
    kda_out: torch.Tensor  # [T] position of each token in [N * P]
    kda_open: torch.Tensor  # [N, tile] rows that stay open
    kda_full: torch.Tensor  # [N] tiles completed by this forward
    query_in: torch.Tensor  # [N, Q] new rows of [T, 1 zero row]
    query_out: torch.Tensor  # [T] position of each token in [N * Q]
    latent_in: torch.Tensor  # [N, L]
    offsets: torch.Tensor  # [N] tokens before the first new one
    decode: bool  # exactly one new token in each sequence
    any_full: bool  # some sequence completes a tile

    @staticmethod
    def plan(cu_seqlens: torch.Tensor, cache: ValueCache | None, tile: int, taps: int) -> Layout:
        """Plan a forward of at least one token."""
        device, lengths = cu_seqlens.device, cu_seqlens.diff()
        num, starts = len(lengths), cu_seqlens[:-1]
        offsets = torch.zeros_like(lengths) if cache is None else cache.lengths
        total = int(cu_seqlens[-1])
        base = 0 if cache is None else num * tile
        held = offsets % tile
        rows_N = held + lengths
        padded = int(rows_N.max())
        queries = int(lengths.max())
        decode = queries == 1 and total == num
        if not decode:
            padded = -(-padded // TILE) * TILE
        sequence_N1 = torch.arange(num, device=device).unsqueeze(1)

        def source(at: torch.Tensor) -> torch.Tensor:
            new = base + starts.unsqueeze(1) + at - held.unsqueeze(1)
            row = torch.where(at < held.unsqueeze(1), sequence_N1 * tile + at, new)
            return torch.where(at < rows_N.unsqueeze(1), row, base + total)

        full = rows_N // tile
        sequence_T = torch.repeat_interleave(sequence_N1.squeeze(1), lengths)
        local_T = torch.arange(total, device=device) - starts[sequence_T]
        local_Q = torch.arange(queries, device=device)
        query_in = torch.where(local_Q < lengths.unsqueeze(1), starts.unsqueeze(1) + local_Q, total)
        old = cache.latents[0].shape[1] if cache is not None and cache.latents else 0
        key_L = torch.arange(int((offsets + lengths).max()), device=device)
        new_key = num * old + starts.unsqueeze(1) + key_L - offsets.unsqueeze(1)
        key = torch.where(key_L < offsets.unsqueeze(1), sequence_N1 * old + key_L, new_key)
        return Layout(
            cu_seqlens=cu_seqlens,
            conv=conv_plan(cu_seqlens, taps),
            kda_in=source(torch.arange(padded, device=device).expand(num, padded)),
            kda_out=sequence_T * padded + held[sequence_T] + local_T,
            kda_open=source(full.unsqueeze(1) * tile + torch.arange(tile, device=device)),
            kda_full=full,
            query_in=query_in,
            query_out=sequence_T * queries + local_T,
            latent_in=torch.where(key_L < (offsets + lengths).unsqueeze(1), key, num * old + total),
            offsets=offsets,
            decode=decode,
            any_full=bool(full.any()),
        )
