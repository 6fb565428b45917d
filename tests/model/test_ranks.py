"""What several processes compute together is what one computes alone."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from k3rl.config import ModelConfig, load_model_config
from k3rl.model.moe import Balancer, LoadQuantileBalancer, QuantileBalancer, SparseMoE

TINY = Path(__file__).parents[2] / "configs/model/k3_tiny.yaml"
NUM_TOKENS, NUM_LAYERS, STEPS = 500, 3, 3
KINDS: dict[str, type[Balancer]] = {"quantile": QuantileBalancer, "load_quantile": LoadQuantileBalancer}


def _scores(config: ModelConfig, step: int) -> list[torch.Tensor]:
    """Skewed scores of all tokens of a step, for each layer."""
    generator = torch.Generator().manual_seed(step)
    skew = torch.linspace(-1, 1, config.num_experts)
    shape = (NUM_TOKENS, config.num_experts)
    return [torch.sigmoid(torch.randn(shape, generator=generator) + skew) for _ in range(NUM_LAYERS)]


def _biases(kind: str, rank: int, ranks: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Biases [layer, E] after some steps of which this rank saw its share, in micro-batches of its own choice."""
    config = load_model_config(TINY)
    layers = [SparseMoE(config) for _ in range(NUM_LAYERS)]
    balancer = KINDS[kind](layers)
    cutter = torch.Generator().manual_seed(100 + rank)
    for step in range(STEPS):
        # Uneven shares, and in the last step the last rank has none.
        owner = torch.randint(0, ranks * 2, (NUM_TOKENS,), generator=torch.Generator().manual_seed(step)) % ranks
        owner = owner % (ranks - 1) if ranks > 1 and step == STEPS - 1 else owner
        mine = (owner == rank).nonzero().flatten()
        with balancer.observe():
            for layer, scores in zip(layers, _scores(config, step), strict=True):
                cuts = torch.randint(0, len(mine) + 1, (4,), generator=cutter).sort().values.tolist()
                for part in torch.tensor_split(scores[mine], cuts):
                    assert layer.observer is not None
                    if len(part):
                        layer.observer(part)
        balancer.step(group)
    return torch.stack([layer.gate.e_score_correction_bias for layer in layers])


def _run(rank: int, ranks: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        found = {kind: _biases(kind, rank, ranks, dist.group.WORLD) for kind in KINDS}
        torch.save(found, folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4])
def test_biases_are_the_same_bit_for_bit_on_any_number_of_ranks_and_micro_batches(ranks: int, tmp_path: Path) -> None:
    context = mp.start_processes(_run, (ranks, tmp_path), nprocs=ranks, join=False, start_method="spawn")
    assert context is not None
    deadline = time.monotonic() + 120
    while not context.join(timeout=1):  # true once all have ended; raises what one of them raised
        assert time.monotonic() < deadline, "the ranks did not end"
    for kind in KINDS:
        alone = _biases(kind, 0, 1, None)
        assert alone.abs().max() > 0
        for rank in range(ranks):
            assert torch.equal(torch.load(tmp_path / f"{rank}.pt")[kind], alone)
