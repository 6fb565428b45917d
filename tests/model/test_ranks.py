"""What several processes compute together is what one computes alone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from k3rl.config import ModelConfig, load_model_config
from k3rl.errors import ConfigError
from k3rl.model.batch import TokenBatch
from k3rl.model.cache import Past
from k3rl.model.context import ContextShare, context_borders
from k3rl.model.moe import Balancer, LoadQuantileBalancer, QuantileBalancer, SparseMoE
from k3rl.model.parallel import Axis, gather_state, placements, shard_experts, shard_tensors, sum_gradients
from k3rl.model.transformer import K3Model

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


FAMILIES = {
    "k3": {},
    "kimi_linear": {
        "kda_gate_bound": None,
        "kda_output_gate_rank": 8,
        "q_lora_rank": None,
        "latent_dim": None,
        "attn_res_block": None,
        "mla_output_gate": False,
        "activation": "swiglu",
    },
}
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5}
"""And by how much logprobs and, relative to its norm, a gradient may differ."""


@dataclass(frozen=True)
class Case:
    """A pack, and how model and tokens are spread for it. With tensors and others at once, tensors have two ranks."""

    lengths: Callable[[int], tuple[int, ...]]  # of the number of ranks
    experts: bool = False
    tensors: bool = False
    context: bool = False
    tile: int = 16
    replay: bool = False


def _several(_: int) -> tuple[int, ...]:
    return (37, 5, 1, 64, 20, 9)


def _long(_: int) -> tuple[int, ...]:
    return (7, 0, 200, 21, 0)  # the third is on every rank


CASES = {
    "experts": Case(_several, experts=True),
    "tensors": Case(_several, tensors=True),
    "context": Case(_several, context=True),
    "context of long tiles, replayed": Case(_long, context=True, tile=64, replay=True),
    "context with one token on the last rank": Case(lambda ranks: (16 * (ranks - 1) + 1,), context=True),
    "experts and context": Case(_several, experts=True, context=True),
    "all": Case(lambda _: (7, 70, 21), experts=True, tensors=True, context=True),
}


def _make(family: str, dtype: torch.dtype, case: Case) -> K3Model:
    config = dataclasses.replace(load_model_config(TINY), num_heads=4, state_tile=case.tile, **FAMILIES[family])
    model = K3Model(config, seed=3)
    generator = torch.Generator().manual_seed(4)
    for name, tensor in model.state_dict().items():
        # Zero at the start, which would make gradients zero on any number of ranks.
        if name.endswith(("res.proj.weight", "e_score_correction_bias")):
            tensor.normal_(0.0, 0.1, generator=generator)
    return model.to(dtype)


def _pack(case: Case, ranks: int, config: ModelConfig) -> tuple[TokenBatch, torch.Tensor, torch.Tensor]:
    """A batch, its targets, and weights of a loss that treats no token alike."""
    lengths, generator = case.lengths(ranks), torch.Generator().manual_seed(7)
    texts = [torch.randint(0, config.vocab_size, (n,), generator=generator) for n in lengths]
    routes = None
    if case.replay:
        shape = (sum(lengths), config.num_layers - config.num_dense_layers, config.num_experts)
        chosen = torch.rand(shape, generator=generator).argsort(-1)[..., : config.experts_per_token]
        afresh = torch.rand(shape[0], 1, 1, generator=generator) < 0.3
        routes = list(torch.where(afresh, -1, chosen).split(lengths))
    batch = TokenBatch.pack(texts, routes)
    return batch, torch.cat([x.roll(1) for x in texts]), torch.randn(sum(lengths), generator=generator)


def _logprobs(model: K3Model, batch: TokenBatch, past: Past | None, targets: torch.Tensor) -> torch.Tensor:
    return model.token_logprobs(model(batch, past).hidden, targets, 1.0).logprob


def _gradients(model: K3Model) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _groups(case: Case, ranks: int) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Of tokens and of tensors."""
    world = dist.group.WORLD
    if not case.tensors or not (case.experts or case.context):
        return (None, world) if case.tensors else (world, None)
    mesh = torch.arange(ranks).view(-1, 2)
    return _own_group(mesh.t().tolist()), _own_group(mesh.tolist())


def _own_group(groups: list[list[int]]) -> dist.ProcessGroup:
    """Make all groups, as every rank must; the one that this rank is in."""
    mine = None
    for ranks in groups:
        group = dist.new_group(ranks)
        mine = group if dist.get_rank() in ranks else mine
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def _spread(family: str, dtype: torch.dtype, case: Case, ranks: int) -> dict[str, Any]:
    """What this rank finds: logprobs, where they are in the pack, and gradients, with the share that it has of each."""
    model = _make(family, dtype, case)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens, tensor = _groups(case, ranks)
    cut: dict[Axis, dist.ProcessGroup] = {}
    if case.tensors and tensor is not None:
        cut["tensor"] = tensor
        shard_tensors(model, tensor)
    if case.experts and tokens is not None:
        cut["expert"] = tokens
        shard_experts(model, tokens)
    gathered = gather_state(model, cut)
    assert gathered.keys() == before.keys()
    assert all(torch.equal(gathered[name], x) for name, x in before.items())
    batch, targets, weights = _pack(case, ranks, model.config)
    rows, past = torch.arange(len(targets)), None
    if case.context and tokens is not None:
        past = ContextShare.cut(batch, model.config, tokens)
        batch, rows = past.batch, rows[past.rows]
    elif tokens is not None:
        mine = range(dist.get_rank(tokens), batch.num_sequences, dist.get_world_size(tokens))
        starts = batch.cu_seqlens.tolist()
        rows = torch.cat([rows[starts[i] : starts[i + 1]] for i in mine])
        batch = TokenBatch.pack([batch.ids[starts[i] : starts[i + 1]] for i in mine])
    logprobs = _logprobs(model, batch, past, targets[rows])
    (logprobs * weights[rows]).sum().backward()
    sum_gradients(model, tokens=tokens, tensor=tensor)
    shares = {axis: (dist.get_rank(g), dist.get_world_size(g)) for axis, g in cut.items()}
    return {"logprobs": logprobs.detach(), "rows": rows, "grads": _gradients(model), "shares": shares}


def _run(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        group = dist.group.WORLD
        assert group is not None
        found: dict[Any, Any] = {kind: _biases(kind, rank, ranks, group) for kind in KINDS}
        for family, dtype, (name, case) in itertools.product(FAMILIES, DTYPES, CASES.items()):
            if dtype == torch.float64 or ranks == 2 or name in ("experts", "all"):
                found[family, dtype, name] = _spread(family, dtype, case, ranks)
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


@functools.cache
def _alone(family: str, dtype: torch.dtype, name: str, ranks: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logprobs and gradients of one process on the pack of so many ranks."""
    model = _make(family, dtype, CASES[name])
    batch, targets, weights = _pack(CASES[name], ranks, model.config)
    logprobs = _logprobs(model, batch, None, targets)
    (logprobs * weights).sum().backward()
    return logprobs.detach(), _gradients(model)


def _share(grads: dict[str, torch.Tensor], family: str, shares: dict[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    """The part of each gradient that a rank holds."""
    plan = placements(_make(family, torch.float32, CASES["all"]))
    found = dict(grads)
    for name, (axis, (index, ranks)) in itertools.product(grads, shares.items()):
        dim = getattr(plan[name], axis)
        if dim is not None:
            found[name] = found[name].chunk(ranks, dim)[index]
    return found


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float64) for name in CASES), ("experts", torch.float32)])
@pytest.mark.parametrize("family", FAMILIES)
def test_several_ranks_give_the_logprobs_and_every_gradient_of_one(
    family: str, name: str, dtype: torch.dtype, found: list[dict[Any, Any]]
) -> None:
    logprobs, grads = _alone(family, dtype, name, len(found))
    assert all(grad.any() for grad in grads.values())  # else a gradient that is forgotten would be right
    seen = torch.cat([rank[family, dtype, name]["rows"] for rank in found]).unique()
    assert torch.equal(seen, torch.arange(len(logprobs)))
    for rank in found:
        result = rank[family, dtype, name]
        assert (result["logprobs"] - logprobs[result["rows"]]).abs().max() < DTYPES[dtype]
        wanted = _share(grads, family, result["shares"])
        assert result["grads"].keys() == wanted.keys()
        for parameter, grad in result["grads"].items():
            assert grad.shape == wanted[parameter].shape, parameter
            assert (grad - wanted[parameter]).norm() <= DTYPES[dtype] * grads[parameter].norm(), parameter


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float32_several_ranks_are_as_near_to_float64_as_one_is(family: str, found: list[dict[Any, Any]]) -> None:
    names = [name for name in CASES if (family, torch.float32, name) in found[0]]
    assert len(names) >= 2
    for name, rank in itertools.product(names, found):
        exact, one = (_alone(family, dtype, name, len(found)) for dtype in DTYPES)
        result = rank[family, torch.float32, name]
        truth = _share(exact[1], family, result["shares"])
        alone = _share(one[1], family, result["shares"])
        assert _distance(result["grads"], truth) <= 1.5 * _distance(alone, truth), name
        got, wanted = (x.double() - exact[0][result["rows"]] for x in (result["logprobs"], one[0][result["rows"]]))
        assert got.norm() <= 1.5 * wanted.norm() + 1e-6, name


def _distance(grads: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((grads[name] - wanted).square().sum()) for name, wanted in truth.items()))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_a_placement_beside_its_layer(family: str) -> None:
    config = dataclasses.replace(load_model_config(TINY), value_head=True, **FAMILIES[family])
    model = K3Model(config, device="meta")
    found = placements(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, placement in found.items():
        shape = model.get_parameter(name).shape
        assert all(dim is None or dim < len(shape) for dim in (placement.tensor, placement.expert)), name
    # A layer that learns of a new parameter and says nothing of it.
    model.layers[1].extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(LookupError, match=r"layers\.1\.extra"):
        placements(model)


def test_what_cannot_be_spread_evenly_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        group = dist.group.WORLD
        assert group is not None
        model = _make("k3", torch.float32, CASES["experts"])
        monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
        with pytest.raises(ConfigError, match=r"num_experts: 8 .* over 3 ranks"):
            shard_experts(model, group)
        with pytest.raises(ConfigError, match=r"num_heads: 4 .* over 3 ranks"):
            shard_tensors(model, group)
        with pytest.raises(ValueError, match=r"32 tokens in 1 sequences can be cut for 2 ranks, not for 3"):
            ContextShare.cut(TokenBatch.pack([torch.zeros(32, dtype=torch.int64)]), model.config, group)
    finally:
        dist.destroy_process_group()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 90), min_size=1, max_size=8), st.integers(1, 6), st.sampled_from([16, 64]))
def test_ranks_are_cut_between_tiles_and_each_has_a_token(lengths: list[int], ranks: int, tile: int) -> None:
    bounds = [0, *itertools.accumulate(lengths)]
    allowed = {at for at in range(bounds[-1]) if any(a <= at < b and (at - a) % tile == 0 for a, b in pairwise(bounds))}
    if len(allowed) < ranks:
        with pytest.raises(ValueError, match="can be cut for"):
            context_borders(bounds, ranks, tile)
        return
    borders = context_borders(bounds, ranks, tile)
    assert len(borders) == ranks + 1
    assert borders[0] == 0
    assert borders[-1] == bounds[-1]
    assert all(a < b for a, b in pairwise(borders))
    assert set(borders[:-1]) <= allowed
