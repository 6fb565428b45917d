"""The cache protocol: whatever keeps a sequence's past, in whatever shape, gives the hidden states of the whole."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from k3rl.config import ModelConfig, load_model_config
from k3rl.model.cache import KdaRows, Layout, ValueCache
from k3rl.model.transformer import K3Model
from k3rl.testing.conformance import check_cache

TINY = load_model_config(Path(__file__).parents[2] / "configs/model/k3_tiny.yaml")
UNEQUAL = dataclasses.replace(TINY, kda_key_dim=16, kda_value_dim=32, initializer_range=0.15)
LINEAR = dataclasses.replace(
    UNEQUAL,
    kda_gate_bound=None,
    kda_output_gate_rank=32,
    q_lora_rank=None,
    mla_output_gate=False,
    routed_scale=2.446,
    latent_dim=None,
    attn_res_block=None,
    activation="swiglu",
)
PAGE = 4


@pytest.mark.parametrize("family", [UNEQUAL, LINEAR], ids=["k3", "linear"])
@pytest.mark.parametrize("tile", [16, 64])
def test_a_value_cache_conforms(tile: int, family: ModelConfig) -> None:
    config = dataclasses.replace(family, state_tile=tile)
    check_cache(K3Model(config, seed=3), lambda n: ValueCache.empty(config, n), tolerance=5e-5)


@pytest.mark.parametrize("tile", [16, 64])
def test_an_in_place_cache_of_slots_and_pages_conforms(tile: int) -> None:
    config = dataclasses.replace(UNEQUAL, state_tile=tile)
    check_cache(K3Model(config, seed=3), lambda n: PagedCache(config, _Pool(config)).extend(n), tolerance=5e-5)


def test_the_conformance_check_notices_a_window_that_a_fork_forgot() -> None:
    class Forgetful(PagedCache):
        def _new_slot(self, source: int | None) -> int:
            slot = super()._new_slot(source)
            for _, _, window in self.pool.kda:
                window[slot] = 0
            return slot

        def select(self, rows: torch.Tensor) -> PagedCache:
            return Forgetful(**vars(super().select(rows)))

    with pytest.raises(AssertionError, match="fork of sequence"):
        check_cache(K3Model(UNEQUAL, seed=3), lambda n: Forgetful(UNEQUAL, _Pool(UNEQUAL)).extend(n), tolerance=5e-5)


@dataclass
class _Pool:
    """Storage that all caches of one pool share: slots for KDA, pages of four tokens for latents."""

    config: ModelConfig
    kda: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    pages: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    used_slots: int = 0
    used_pages: int = 0

    def __post_init__(self) -> None:
        one = ValueCache.empty(self.config, 64)
        # Poisoned, so that whatever is read before it was written shows.
        self.kda = [tuple(torch.full_like(x, torch.nan) for x in (k.state, k.open_rows, k.window)) for k in one.kda]
        width = self.config.kv_lora_rank + self.config.qk_rope_dim
        self.pages = torch.full((len(self.config.mla_layers), 256, PAGE, width), torch.nan)


@dataclass
class PagedCache:
    """Keeps its sequences in place, as an engine on a GPU would. Only good enough to test the protocol."""

    config: ModelConfig
    pool: _Pool
    slots: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    covered: list[int] = field(default_factory=list)

    @property
    def num_sequences(self) -> int:
        return len(self.slots)

    @property
    def lengths(self) -> torch.Tensor:
        return torch.tensor(self.covered, dtype=torch.int64)

    def _new_slot(self, source: int | None) -> int:
        slot, self.pool.used_slots = self.pool.used_slots, self.pool.used_slots + 1
        for tensors in self.pool.kda:
            for x in tensors:
                x[slot] = 0 if source is None else x[source]
        return slot

    def _new_page(self, source: int | None) -> int:
        page, self.pool.used_pages = self.pool.used_pages, self.pool.used_pages + 1
        if source is not None:
            self.pool.pages[:, page] = self.pool.pages[:, source]
        return page

    def select(self, rows: torch.Tensor) -> PagedCache:
        chosen = rows.tolist()
        return PagedCache(
            self.config,
            self.pool,
            [self._new_slot(self.slots[n]) for n in chosen],
            [[self._new_page(page) for page in self.tables[n]] for n in chosen],
            [self.covered[n] for n in chosen],
        )

    def extend(self, num: int) -> PagedCache:
        self.slots += [self._new_slot(None) for _ in range(num)]
        self.tables += [[] for _ in range(num)]
        self.covered += [0] * num
        return self

    def begin(self, cu_seqlens: torch.Tensor) -> _PagedMemory:
        after = (self.lengths + cu_seqlens.diff()).tolist()
        for table, length in zip(self.tables, after, strict=True):
            table += [self._new_page(None) for _ in range(-(-length // PAGE) - len(table))]
        return _PagedMemory(Layout.plan(self.config, cu_seqlens, self.lengths), self, after)


@dataclass
class _PagedMemory:
    layout: Layout
    cache: PagedCache
    after: list[int]

    def read_kda(self, slot: int) -> KdaRows:
        return KdaRows(*(x[self.cache.slots] for x in self.cache.pool.kda[slot]))

    def write_kda(self, slot: int, rows: KdaRows) -> None:
        for x, new in zip(self.cache.pool.kda[slot], (rows.state, rows.open_rows, rows.window), strict=True):
            x[self.cache.slots] = new

    def append_latents(self, slot: int, new_TX: torch.Tensor) -> torch.Tensor:
        pages = self.cache.pool.pages[slot]
        bounds = self.layout.cu_seqlens.tolist()
        gathered = torch.zeros(len(self.after), max(self.after), new_TX.shape[1])
        for n, (table, before, after) in enumerate(zip(self.cache.tables, self.cache.covered, self.after, strict=True)):
            for position in range(before, after):
                pages[table[position // PAGE], position % PAGE] = new_TX[bounds[n] + position - before]
            gathered[n, :after] = pages[table].reshape(-1, new_TX.shape[1])[:after]
        return gathered

    def finish(self) -> PagedCache:
        self.cache.covered = self.after
        return self.cache
