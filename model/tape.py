"""What a walk over a tree of tokens keeps, so that nodes are run one by one and still differentiated together.

Each KDA layer keeps its rows at the end of every node that another one goes on from, each MLA layer the latents of all
tokens, once. The gradients that come back to them are summed where their values lie: memory grows with the tokens by
two latents each, and not with the length of a sequence.

Letters: R rows (tokens of the tree), N nodes of one forward, T their tokens, C tokens before them, X latent width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from k3rl.model.cache import KdaRows, Layout, ValueCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3rl.config import ModelConfig


class Tape:
    """One walk. Nodes are numbered by the caller, who runs parents before children, and backward children first."""

    def __init__(self, config: ModelConfig, num_rows: int, device: torch.device, dtype: torch.dtype) -> None:
        self._config, self._device, self._dtype = config, device, dtype
        width, wide = config.kv_lora_rank + config.qk_rope_dim, torch.promote_types(dtype, torch.float32)
        shape = (len(config.mla_layers), num_rows, width)
        self._latents = torch.zeros(shape, device=device, dtype=dtype)
        self._latent_grads = torch.zeros(shape, device=device, dtype=wide)
        self._ends: dict[int, list[torch.Tensor]] = {}
        self._end_grads: dict[int, list[torch.Tensor]] = {}

    def past(self, parents: Sequence[int | None], contexts: Sequence[torch.Tensor]) -> TapePast:
        """What N nodes go on from; for one forward.

        Args:
            parents: nodes that were kept; None: the sequence begins.
            contexts: the rows before each node in its sequence, [C] int64 each.
        """
        empty = list(ValueCache.empty(self._config, 1, self._device, self._dtype).tensors())
        blank = [x[0] for x in empty[: 3 * (self._config.num_layers - len(self._config.mla_layers))]]
        ends = [blank if parent is None else self._ends[parent] for parent in parents]
        rows = torch.cat(list(contexts)).to(self._device)
        leaves = [torch.stack(parts) for parts in zip(*ends, strict=True)]
        leaves += list(self._latents.index_select(1, rows).unbind())
        if torch.is_grad_enabled():
            leaves = [leaf.requires_grad_() for leaf in leaves]
        return TapePast(self._config, list(parents), list(contexts), leaves)

    def keep(self, past: TapePast, nodes: Sequence[int | None], rows: torch.Tensor) -> None:
        """Keep what others go on from, after the forward of ``past``.

        Args:
            past: of the forward.
            nodes: under which number the end of each node is kept; None: nothing goes on from it.
            rows: [T] of the forward's tokens.
        """
        ends, latents = past.results()
        for n, node in enumerate(nodes):
            if node is not None:
                self._ends[node] = [x[n].detach().clone() for x in ends]
        if len(latents):
            self._latents.index_copy_(1, rows.to(self._device), torch.stack(latents).detach())

    def outputs(
        self, past: TapePast, nodes: Sequence[int | None], rows: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What the forward of ``past`` gave to others, and its gradients, which have all come; arguments as in keep."""
        ends, latents = past.results()
        grads: list[list[torch.Tensor]] = []
        for n, node in enumerate(nodes):
            own = None if node is None else self._end_grads.pop(node, None)
            grads.append([torch.zeros_like(x[n]) for x in ends] if own is None else own)
            if node is not None:
                self._ends.pop(node, None)
        stacked = [torch.stack(parts) for parts in zip(*grads, strict=True)]
        found = self._latent_grads.index_select(1, rows.to(self._device)).to(self._dtype)
        return [*ends, *latents], [*stacked, *found.unbind()]

    def pull(self, past: TapePast) -> None:
        """Add the gradients that a backward left at ``past`` to those of the nodes that it went on from."""
        split = len(past.leaves) - len(self._latents)
        for n, parent in enumerate(past.parents):
            if parent is None:
                continue
            own = [torch.zeros_like(x[n]) if x.grad is None else x.grad[n] for x in past.leaves[:split]]
            before = self._end_grads.get(parent)
            self._end_grads[parent] = own if before is None else [a + b for a, b in zip(before, own, strict=True)]
        for layer, leaf in enumerate(past.leaves[split:]):
            if leaf.grad is None:
                continue
            # One sequence after the other: rows that two of them have would be added in no fixed order.
            parts = leaf.grad.split([len(rows) for rows in past.contexts])
            for rows, grad in zip(past.contexts, parts, strict=True):
                at = rows.to(self._device)
                self._latent_grads[layer].index_copy_(0, at, self._latent_grads[layer].index_select(0, at) + grad)


@dataclass(slots=True)
class TapePast:
    """Where N nodes go on, for one forward: ``model(batch, past)``."""

    config: ModelConfig
    parents: list[int | None]
    contexts: list[torch.Tensor]  # [C] each
    leaves: list[torch.Tensor]
    """State, open rows and window [N, ...] of each KDA layer, then the latents [sum of C, X] of each MLA layer."""
    memory: TapeMemory | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.parents)

    def begin(self, cu_seqlens: torch.Tensor) -> TapeMemory:
        """Start the forward."""
        sizes = torch.tensor([len(rows) for rows in self.contexts], device=cu_seqlens.device)
        layout = Layout.plan(self.config, cu_seqlens, sizes)
        split = len(self.leaves) - len(self.config.mla_layers)
        self.memory = TapeMemory(layout, self.leaves[:split], self.leaves[split:], _latent_rows(layout, sizes))
        return self.memory

    def results(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Of the forward: state, open rows and window of each KDA layer, and the new latents of each MLA layer."""
        assert self.memory is not None, "nothing was run"
        kda = [x for _, rows in sorted(self.memory.kda.items()) for x in (rows.state, rows.open_rows, rows.window)]
        return kda, [new for _, new in sorted(self.memory.latents.items())]


@dataclass(slots=True)
class TapeMemory:
    """A forward over a :class:`TapePast`."""

    layout: Layout
    ends: list[torch.Tensor]
    contexts: list[torch.Tensor]
    latent_rows: torch.Tensor  # [N, L] of [T new, 1 zero row, all contexts]
    kda: dict[int, KdaRows] = field(default_factory=dict)
    latents: dict[int, torch.Tensor] = field(default_factory=dict)

    def read_kda(self, slot: int) -> KdaRows:
        """What a KDA layer goes on from."""
        return KdaRows(*self.ends[3 * slot : 3 * slot + 3])

    def write_kda(self, slot: int, rows: KdaRows) -> None:
        """Keep it for those that go on from here."""
        self.kda[slot] = rows

    def append_latents(self, slot: int, new_TX: torch.Tensor) -> torch.Tensor:
        """Latents of each sequence [N, L, X]."""
        self.latents[slot] = new_TX
        source = torch.cat([new_TX, new_TX.new_zeros(1, new_TX.shape[1]), self.contexts[slot]])
        return source.index_select(0, self.latent_rows.flatten()).view(*self.latent_rows.shape, new_TX.shape[1])

    def finish(self) -> None:
        """No cache: the tape keeps what there is to keep."""


def _latent_rows(layout: Layout, sizes_N: torch.Tensor) -> torch.Tensor:
    """Rows [N, L] of [T new, 1 zero row, contexts of ``sizes_N`` one after the other], in order of position."""
    starts, lengths, total = layout.cu_seqlens[:-1], layout.cu_seqlens.diff(), len(layout.query_out)
    sizes_N1, ends_N1 = sizes_N.unsqueeze(1), (sizes_N + lengths).unsqueeze(1)
    key_L = torch.arange(int(ends_N1.max()), device=sizes_N.device)
    kept = total + 1 + (sizes_N.cumsum(0) - sizes_N).unsqueeze(1) + key_L
    row = torch.where(key_L < sizes_N1, kept, starts.unsqueeze(1) + key_L - sizes_N1)
    return torch.where(key_L < ends_N1, row, total)
