"""What several processes compute together is what one computes alone."""

from __future__ import annotations

import dataclasses
import itertools
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from k3rl.config import ModelConfig, load_model_config
from k3rl.errors import ConfigError
from k3rl.model.batch import TokenBatch
from k3rl.model.moe import Balancer, LoadQuantileBalancer, QuantileBalancer, SparseMoE
from k3rl.model.parallel import gather_experts, shard_experts
from k3rl.model.transformer import K3Model

TINY = Path(__file__).parents[2] / "configs/model/k3_tiny.yaml"
DTYPES = (torch.float64, torch.float32)
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


FAMILIES = {
    "k3": {},
    "kimi_linear": {
        "kda_gate_bound": None,
        "kda_output_gate_rank": 8,
        "latent_dim": None,
        "attn_res_block": None,
        "mla_output_gate": False,
        "activation": "swiglu",
    },
}
LENGTHS = (37, 5, 1, 64, 20, 9)


def _gradients(model: K3Model, sequences: list[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of some of the sequences, and the gradients of a loss over them that treats no token alike."""
    generator = torch.Generator().manual_seed(7)
    texts = [torch.randint(0, model.config.vocab_size, (n,), generator=generator) for n in LENGTHS]
    weights = [torch.randn(n, generator=generator) for n in LENGTHS]
    batch = TokenBatch.pack([texts[i] for i in sequences])
    targets = torch.cat([texts[i].roll(1) for i in sequences])
    logprobs = model.token_logprobs(model(batch).hidden, targets, 1.0).logprob
    (logprobs * torch.cat([weights[i] for i in sequences])).sum().backward()
    return logprobs.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _make(family: str, dtype: torch.dtype) -> K3Model:
    return K3Model(dataclasses.replace(load_model_config(TINY), **FAMILIES[family]), seed=3).to(dtype)


def _spread(family: str, dtype: torch.dtype, rank: int, ranks: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """What this rank finds with its sequences and its experts; gradients of the rest are summed, as a learner does."""
    model = _make(family, dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shard_experts(model, group)
    gathered = gather_experts(model, group)
    assert gathered.keys() == before.keys()
    assert all(torch.equal(gathered[name], tensor) for name, tensor in before.items())
    logprobs, grads = _gradients(model, list(range(rank, len(LENGTHS), ranks)))
    for name, grad in grads.items():
        if name.split(".")[-2] != "experts":
            dist.all_reduce(grad, group=group)
    return {"logprobs": logprobs, "grads": grads}


def _run(rank: int, ranks: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        group = dist.group.WORLD
        assert group is not None
        found: dict[Any, Any] = {kind: _biases(kind, rank, ranks, group) for kind in KINDS}
        for family, dtype in itertools.product(FAMILIES, DTYPES):
            found[family, dtype] = _spread(family, dtype, rank, ranks, group)
        torch.save(found, folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each of some ranks found."""
    ranks, folder = request.param, tmp_path_factory.mktemp("ranks")
    context = mp.start_processes(_run, (ranks, folder), nprocs=ranks, join=False, start_method="spawn")
    assert context is not None
    deadline = time.monotonic() + 120
    while not context.join(timeout=1):  # true once all have ended; raises what one of them raised
        assert time.monotonic() < deadline, "the ranks did not end"
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize("kind", KINDS)
def test_biases_are_the_same_bit_for_bit_on_any_number_of_ranks_and_micro_batches(
    kind: str, found: list[dict[Any, Any]]
) -> None:
    alone = _biases(kind, 0, 1, None)
    assert alone.abs().max() > 0
    assert all(torch.equal(rank[kind], alone) for rank in found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_on_several_ranks_give_the_logprobs_and_gradients_of_one(
    family: str, dtype: torch.dtype, found: list[dict[Any, Any]]
) -> None:
    ranks, tolerance = len(found), 1e-12 if dtype == torch.float64 else 1e-5
    logprobs, grads = _gradients(_make(family, dtype), list(range(len(LENGTHS))))
    whole = logprobs.split(LENGTHS)
    for rank, results in enumerate(found):
        mine = torch.cat([whole[i] for i in range(rank, len(LENGTHS), ranks)])
        assert (results[family, dtype]["logprobs"] - mine).abs().max() < tolerance
        assert results[family, dtype]["grads"].keys() == grads.keys()
        for name, grad in results[family, dtype]["grads"].items():
            wanted = grads[name]
            if name.split(".")[-2] == "experts":
                wanted = wanted.chunk(ranks)[rank]
                assert len(grad) == len(grads[name]) // ranks
            assert (grad - wanted).norm() <= tolerance * grads[name].norm(), name


def test_experts_that_cannot_be_spread_evenly_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        group = dist.group.WORLD
        assert group is not None
        monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
        with pytest.raises(ConfigError, match=r"num_experts: 8 .* over 3 ranks"):
            shard_experts(_make("k3", torch.float32), group)
    finally:
        dist.destroy_process_group()
