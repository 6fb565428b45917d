"""What a sequence leaves behind for its continuation, and where the packed rows of a forward go.

Letters: N sequences, T new tokens, P padded rows, H heads, K key width, V value width, W taps, C channels, Q padded
queries, L keys, R latent width, A pe width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, Self

import torch

from k3rl.kernels.kda import TilePlan, conv_plan
from k3rl.kernels.kda.reference import TILE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k3rl.config import ModelConfig


class Past(Protocol):
    """What N sequences go on from: all that the model itself asks of a cache."""

    @property
    def num_sequences(self) -> int: ...

    def begin(self, cu_seqlens: torch.Tensor) -> Memory:
        """Start a forward of at least one token: ``cu_seqlens`` [N + 1] as in TokenBatch."""
        ...


class Cache(Past, Protocol):
    """State of N sequences; any may stop, fork or continue at any token.

    The model touches a cache through :meth:`begin` alone, so that storage is the cache's own affair. A functional cache
    hands out new values, an in-place one may hand out itself; callers go on with what :meth:`Memory.finish` returns.
    """

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens that the cache covers, [N] int64."""
        ...

    def select(self, rows: torch.Tensor) -> Self:
        """The sequences ``rows`` [M] int64, in that order; a repeated row is a fork, one left out is forgotten."""
        ...

    def extend(self, num: int) -> Self:
        """The same sequences, and behind them ``num`` more that have not begun."""
        ...


class Memory(Protocol):
    """What the layers of one forward read and write. ``slot`` counts the layers of its kind."""

    layout: Layout

    def read_kda(self, slot: int) -> KdaPast | None:
        """What a KDA layer goes on from, KdaRows in a cache; None when nothing comes before it or goes on from it."""
        ...

    def write_kda(self, slot: int, rows: KdaRows) -> None:
        """Keep the state of a KDA layer after this forward; called when :meth:`read_kda` gave KdaRows."""
        ...

    def append_latents(self, slot: int, new_TX: torch.Tensor) -> torch.Tensor:
        """Keep an MLA layer's new latents [T, R + A]; return all so far, [N, L, R + A], in order of position."""
        ...

    def finish(self) -> Cache | None:
        """The cache after this forward; None when there is none to go on from."""
        ...


class KdaPast(Protocol):
    """What one KDA layer goes on from; it may depend on what the layer makes of the new tokens."""

    def window_before(self, new_TC: torch.Tensor) -> torch.Tensor:
        """Inputs of the convolution before the new ones, [N, W - 1, C]."""
        ...

    def state_before(
        self, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, bounded: bool
    ) -> torch.Tensor:
        """State [N, H, K, V] before the rows, which are as in :func:`k3rl.kernels.kda.kda_tiles`."""
        ...


@dataclass(frozen=True, slots=True)
class KdaRows:
    """What one KDA layer carries along."""

    state: torch.Tensor  # [N, H, K, V] float32, at the last multiple of state_tile
    open_rows: torch.Tensor  # [N, state_tile, H, 2K + V + 1] k, v, g, beta since then, zero rows at the end
    window: torch.Tensor  # [N, W - 1, C] last inputs of the convolution

    def window_before(self, new_TC: torch.Tensor) -> torch.Tensor:
        """The window that was kept."""
        return self.window

    def state_before(
        self, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, bounded: bool
    ) -> torch.Tensor:
        """The state that was kept."""
        return self.state


@dataclass(frozen=True, slots=True)
class ValueCache:
    """Functional, differentiable cache: a forward makes a new one and gradients flow through all its tensors."""

    config: ModelConfig
    lengths: torch.Tensor  # [N] int64
    kda: tuple[KdaRows, ...]
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
            KdaRows(
                torch.zeros(n, heads, key, value, device=device, dtype=wide),
                torch.zeros(n, c.state_tile, heads, 2 * key + value + 1, device=device, dtype=wide),
                torch.zeros(n, c.conv_kernel - 1, heads * (2 * key + value), device=device, dtype=dtype),
            )
            for _ in range(c.num_layers - len(c.mla_layers))
        )
        latents = tuple(
            torch.zeros(n, 0, c.kv_lora_rank + c.qk_rope_dim, device=device, dtype=dtype) for _ in c.mla_layers
        )
        return ValueCache(config, torch.zeros(n, dtype=torch.int64, device=device), kda, latents)

    def select(self, rows: torch.Tensor) -> ValueCache:
        """The sequences ``rows`` [M] int64, in that order; a repeated row is a fork, one left out is forgotten."""
        lengths = self.lengths[rows]
        longest = int(lengths.max()) if len(rows) else 0
        chosen = [x.index_select(0, rows) for x in self.tensors()]
        split = 3 * len(self.kda)
        trimmed = [x[:, :longest] if i >= split else x for i, x in enumerate(chosen)]
        return replace(self.with_tensors(trimmed), lengths=lengths)

    def extend(self, num: int) -> ValueCache:
        """The same sequences, and behind them ``num`` more that have not begun."""

        def extended(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x.new_zeros(num, *x.shape[1:])])

        return replace(self.with_tensors([extended(x) for x in self.tensors()]), lengths=extended(self.lengths))

    def begin(self, cu_seqlens: torch.Tensor) -> ValueMemory:
        """Start a forward of at least one token: ``cu_seqlens`` [N + 1] as in TokenBatch."""
        layout = Layout.plan(self.config, cu_seqlens, self.lengths)
        return ValueMemory(layout, self, latent_plan(layout, self.latents[0].shape[1] if self.latents else 0))

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
        kda = tuple(KdaRows(*tensors[i : i + 3]) for i in range(0, split, 3))
        return replace(self, kda=kda, latents=tuple(tensors[split:]))

    def detach(self) -> ValueCache:
        """The same values without their history."""
        return self.with_tensors([x.detach() for x in self.tensors()])


@dataclass(slots=True)
class ValueMemory:
    """A forward over a :class:`ValueCache`, or over sequences that begin and end in it (``before`` None)."""

    layout: Layout
    before: ValueCache | None
    latent_rows: torch.Tensor  # [N, L], see latent_plan
    kda: dict[int, KdaRows] = field(default_factory=dict)
    latents: dict[int, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def fresh(config: ModelConfig, cu_seqlens: torch.Tensor) -> ValueMemory:
        """Memory of a forward without a cache."""
        layout = Layout.plan(config, cu_seqlens, None)
        return ValueMemory(layout, None, latent_plan(layout, 0))

    def read_kda(self, slot: int) -> KdaRows | None:
        """State of a KDA layer before this forward."""
        return None if self.before is None else self.before.kda[slot]

    def write_kda(self, slot: int, rows: KdaRows) -> None:
        """Keep the state of a KDA layer after this forward."""
        self.kda[slot] = rows

    def append_latents(self, slot: int, new_TX: torch.Tensor) -> torch.Tensor:
        """Keep an MLA layer's new latents [T, R + A]; return all so far, [N, L, R + A]."""
        width = new_TX.shape[1]
        sources = [new_TX, new_TX.new_zeros(1, width)]
        if self.before is not None:
            sources.append(self.before.latents[slot].reshape(-1, width))
        all_NLX = torch.cat(sources).index_select(0, self.latent_rows.flatten()).view(*self.latent_rows.shape, width)
        if self.before is not None:
            self.latents[slot] = all_NLX
        return all_NLX

    def finish(self) -> ValueCache | None:
        """The cache after this forward."""
        if self.before is None:
            return None
        lengths = self.before.lengths + self.layout.cu_seqlens.diff()
        kda = tuple(self.kda[slot] for slot in range(len(self.before.kda)))
        latents = tuple(self.latents[slot] for slot in range(len(self.before.latents)))
        return ValueCache(self.before.config, lengths, kda, latents)


@dataclass(frozen=True, slots=True)
class Layout:
    """Index plans of one forward, shared by its layers: they follow from lengths alone, whatever holds the cache.

    KDA rows are taken from [T new rows, 1 zero row, N * tile open rows], queries from [T new rows, 1 zero row].
    """

    cu_seqlens: torch.Tensor
    conv: tuple[torch.Tensor, torch.Tensor]
    tiles: TilePlan | None  # of sequences that begin and end here, else None
    kda_in: torch.Tensor  # [N, P] open rows, then new rows, then the zero row
    kda_out: torch.Tensor  # [T] position of each token in [N * P]
    kda_open: torch.Tensor  # [N, tile] rows that stay open
    kda_full: torch.Tensor  # [N] tiles completed by this forward
    query_in: torch.Tensor  # [N, Q]
    query_out: torch.Tensor  # [T] position of each token in [N * Q]
    offsets: torch.Tensor  # [N] tokens before the first new one
    decode: bool  # exactly one new token in each sequence
    any_full: bool  # some sequence completes a tile

    @staticmethod
    def plan(config: ModelConfig, cu_seqlens: torch.Tensor, offsets: torch.Tensor | None) -> Layout:
        """Plan a forward of at least one token; ``offsets`` [N] tokens came before, or None and nothing goes on."""
        tile = config.state_tile
        device, lengths = cu_seqlens.device, cu_seqlens.diff()
        num, starts, total = len(lengths), cu_seqlens[:-1], int(cu_seqlens[-1])
        tiles = TilePlan.make(cu_seqlens, total) if offsets is None else None
        offsets = torch.zeros_like(lengths) if offsets is None else offsets
        held = offsets % tile
        rows_N = held + lengths
        padded, queries = int(rows_N.max()), int(lengths.max())
        decode = queries == 1 and total == num
        if not decode:
            padded = -(-padded // TILE) * TILE
        sequence_N1 = torch.arange(num, device=device).unsqueeze(1)

        def source(at: torch.Tensor) -> torch.Tensor:
            is_open = at < held.unsqueeze(1)
            row = torch.where(
                is_open, total + 1 + sequence_N1 * tile + at, starts.unsqueeze(1) + at - held.unsqueeze(1)
            )
            return torch.where(at < rows_N.unsqueeze(1), row, total)

        full = rows_N // tile
        sequence_T = torch.repeat_interleave(sequence_N1.squeeze(1), lengths)
        local_T = torch.arange(total, device=device) - starts[sequence_T]
        local_Q = torch.arange(queries, device=device)
        return Layout(
            cu_seqlens=cu_seqlens,
            conv=conv_plan(cu_seqlens, config.conv_kernel),
            tiles=tiles,
            kda_in=source(torch.arange(padded, device=device).expand(num, padded)),
            kda_out=sequence_T * padded + held[sequence_T] + local_T,
            kda_open=source(full.unsqueeze(1) * tile + torch.arange(tile, device=device)),
            kda_full=full,
            query_in=torch.where(local_Q < lengths.unsqueeze(1), starts.unsqueeze(1) + local_Q, total),
            query_out=sequence_T * queries + local_T,
            offsets=offsets,
            decode=decode,
            any_full=bool(full.any()),
        )


def latent_plan(layout: Layout, old: int) -> torch.Tensor:
    """Rows [N, L] of [T new, 1 zero row, N * ``old`` kept] that make each sequence's latents in order of position."""
    starts, lengths, total = layout.cu_seqlens[:-1], layout.cu_seqlens.diff(), len(layout.query_out)
    offsets_N1 = layout.offsets.unsqueeze(1)
    ends_N1 = offsets_N1 + lengths.unsqueeze(1)
    key_L = torch.arange(int(ends_N1.max()), device=offsets_N1.device)
    kept = total + 1 + old * torch.arange(len(starts), device=key_L.device).unsqueeze(1) + key_L
    row = torch.where(key_L < offsets_N1, kept, starts.unsqueeze(1) + key_L - offsets_N1)
    return torch.where(key_L < ends_N1, row, total)
