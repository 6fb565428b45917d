"""Sequences cut over processes.

Letters: T tokens, N sequences, R ranks, H heads, K key width, V value width, C channels, L keys.

Each rank has all weights and runs consecutive tokens of a pack; what a token needs of those before it comes from the
ranks that have them:

- KDA's convolution: the last inputs of the rank before, its halo.
- KDA's state: what each earlier rank's span does to any state (:func:`k3rl.kernels.kda.kda_span`), so that no rank
  waits for the state of another (K3 report §5.1.2).
- MLA: the latents of the sequence's earlier tokens, not the keys and values that they expand to.

Ranks are cut where a sequence ends or at a multiple of ``state_tile`` tokens of it, so that tiles are those of one
process. Gradients are to be summed over the ranks, as in data parallelism.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from k3rl.kernels.kda import join_spans, kda_span
from k3rl.model.batch import TokenBatch
from k3rl.model.cache import Layout, latent_plan
from k3rl.model.parallel import exchange_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3rl.config import ModelConfig
    from k3rl.model.cache import KdaRows


def context_borders(bounds: Sequence[int], ranks: int, tile: int) -> list[int]:
    """First token of each rank, and T: cuts as close to equal shares as they may be.

    Args:
        bounds: [N + 1] first token of each sequence, and T.
        ranks: R.
        tile: a sequence is cut at its multiples alone.

    Raises:
        ValueError: there are too few places to cut for each rank to have a token.
    """
    total = bounds[-1]
    places = sorted({at for a, b in pairwise(bounds) for at in range(a, b, tile)})
    if len(places) < ranks:
        raise ValueError(
            f"{total} tokens in {len(bounds) - 1} sequences can be cut for {len(places)} ranks, not for {ranks}: "
            f"where a sequence ends and every {tile} tokens of it"
        )
    borders, first = [0], 1
    for rank in range(1, ranks):
        goal, last = total * rank / ranks, len(places) - (ranks - 1 - rank)  # of those left, one for each later rank
        i = min(max(bisect_left(places, goal), first), last - 1)
        if i > first and goal - places[i - 1] <= places[i] - goal:
            i -= 1
        borders.append(places[i])
        first = i + 1
    return [*borders, total]


@dataclass(frozen=True, slots=True)
class ContextShare:
    """This rank's part of a pack, and the past that a forward over it goes on from: ``model(share.batch, share)``.

    Every rank must run as many forwards and backwards as the others; a loss that leaves this rank's tokens out takes
    them times zero.
    """

    config: ModelConfig
    group: dist.ProcessGroup
    batch: TokenBatch
    rows: slice
    """Where the part's tokens are in the pack."""
    borders: tuple[int, ...]  # [R + 1]
    origins: tuple[int, ...]  # [R] where the sequence starts that the rank's first token belongs to

    @staticmethod
    def cut(batch: TokenBatch, config: ModelConfig, group: dist.ProcessGroup) -> ContextShare:
        """Cut a ``batch`` that all ranks of ``group`` have alike. ValueError: it is too short for so many ranks."""
        if config.conv_kernel - 1 > config.state_tile:
            raise ValueError(f"a convolution of {config.conv_kernel} taps sees more than one rank back")
        bounds = batch.cu_seqlens.tolist()
        borders = context_borders(bounds, dist.get_world_size(group), config.state_tile)
        origins = tuple(bounds[bisect_right(bounds, at) - 1] for at in borders[:-1])
        rank = dist.get_rank(group)
        start, end = borders[rank : rank + 2]
        inside = sorted({at - start for at in bounds if start < at < end})
        mine = TokenBatch(
            ids=batch.ids[start:end],
            cu_seqlens=torch.tensor([0, *inside, end - start], device=batch.cu_seqlens.device),
            routes=None if batch.routes is None else batch.routes[start:end],
        )
        return ContextShare(config, group, mine, slice(start, end), tuple(borders), origins)

    @property
    def num_sequences(self) -> int:
        return self.batch.num_sequences

    @property
    def offset(self) -> int:
        """Tokens of the first sequence here that are on earlier ranks."""
        return self.rows.start - self.origins[dist.get_rank(self.group)]

    def begin(self, cu_seqlens: torch.Tensor) -> ContextMemory:
        """Start a forward of :attr:`batch`."""
        offsets = torch.zeros_like(cu_seqlens[1:])
        offsets[0] = self.offset
        layout = Layout.plan(self.config, cu_seqlens, offsets)
        return ContextMemory(layout, self, latent_plan(layout, 0))

    def tail(self, rank: int, other: int) -> int:
        """Tokens at the end of ``rank``'s part of the sequence that a later rank ``other`` goes on with."""
        continues = self.origins[other] < self.borders[other]
        return max(0, self.borders[rank + 1] - max(self.borders[rank], self.origins[other])) if continues else 0

    @property
    def open_end(self) -> int:
        """Tokens of the last sequence here if the next rank goes on with it, else 0."""
        rank = dist.get_rank(self.group)
        return self.tail(rank, rank + 1) if rank + 1 < len(self.origins) else 0

    def send(self, rows_TX: torch.Tensor, most: int | None = None) -> torch.Tensor:
        """Give later ranks the last rows of the sequence that they go on with, ``most`` or all; get the same."""
        rank, ranks = dist.get_rank(self.group), len(self.origins)

        def count(giver: int, taker: int) -> int:
            num = self.tail(giver, taker) if giver < taker else 0
            return num if most is None else min(most, num)

        sent = [count(rank, other) for other in range(ranks)]
        parts = [rows_TX[len(rows_TX) - num :] for num in sent]
        return exchange_rows(torch.cat(parts), sent, [count(other, rank) for other in range(ranks)], self.group)


@dataclass(slots=True)
class ContextMemory:
    """A forward over a :class:`ContextShare`; nothing goes on from it."""

    layout: Layout
    share: ContextShare
    latent_rows: torch.Tensor  # [N, L], see latent_plan

    def read_kda(self, slot: int) -> ContextRows:
        """What a KDA layer gets from the ranks before this one."""
        return ContextRows(self.share)

    def write_kda(self, slot: int, rows: KdaRows) -> None:
        """The other ranks have what they need already."""

    def append_latents(self, slot: int, new_TX: torch.Tensor) -> torch.Tensor:
        """Latents of each sequence here [N, L, R + A], the earlier ones from the ranks that have them."""
        earlier = self.share.send(new_TX)
        source = torch.cat([new_TX, new_TX.new_zeros(1, new_TX.shape[1]), earlier])
        return source.index_select(0, self.latent_rows.flatten()).view(*self.latent_rows.shape, new_TX.shape[1])

    def finish(self) -> None:
        """No cache."""


@dataclass(frozen=True, slots=True)
class ContextRows:
    """What one KDA layer goes on from: zero, but for a first sequence that begins on another rank."""

    share: ContextShare

    def window_before(self, new_TC: torch.Tensor) -> torch.Tensor:
        """Window [N, W - 1, C]: the halo of the rank before."""
        width, channels = self.share.config.conv_kernel - 1, new_TC.shape[1]
        got = self.share.send(new_TC, width)
        halo = got[max(0, len(got) - width) :]  # every earlier rank of the sequence sent its own
        return self._first(halo.reshape(int(self.share.offset > 0), width, channels))

    def state_before(
        self, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, bounded: bool
    ) -> torch.Tensor:
        """State [N, H, K, V]: what the earlier ranks' spans of the sequence leave."""
        num = self.share.open_end
        k, v, g, beta = (x[-1:, :num] if num else x[:0] for x in (k, v, g, beta))
        span = kda_span(k, v, g, beta, bounded)
        got = self.share.send(span.flatten(1), 1)
        return self._first(join_spans(got.view(len(got), *span.shape[1:]).split(1)))

    def _first(self, got: torch.Tensor) -> torch.Tensor:
        # Joined even where nothing came: the backward of the exchange is a call that every rank must make.
        return torch.cat([got, got.new_zeros(self.share.num_sequences - len(got), *got.shape[1:])])
