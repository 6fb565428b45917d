"""What several processes compute together is what one computes alone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from k3rl.model.batch import TokenBatch, TokenLogprobs
from k3rl.model.cache import Past
from k3rl.model.config import active_parameters
from k3rl.model.context import ContextShare, context_borders
from k3rl.model.moe import Balancer, LoadQuantileBalancer, QuantileBalancer, SparseMoE
from k3rl.model.parallel import Axis, gather_state, placements, shard_experts, shard_tensors, sum_gradients
from k3rl.model.pipeline import PipelineStage, gather_stages, keep_stage, one_forward_one_backward, stage_borders
from k3rl.model.transformer import K3Model

MODELS = Path(__file__).parents[2] / "configs/model"
TINY = MODELS / "k3_tiny.yaml"
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
    """A pack, and how model and tokens are spread for it.

    With experts or context and one of the others at once, that one has two ranks.
    """

    lengths: Callable[[int], tuple[int, ...]]  # of the number of ranks
    experts: bool = False
    tensors: bool = False
    context: bool = False
    micro: tuple[int, ...] = ()  # sequences in each micro-batch of a pipeline
    tile: int = 16
    block: int = 2
    replay: bool = False
    frozen: bool = False  # the embedding


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
    "pipeline": Case(_several, micro=(1, 3, 2), block=1),
    "pipeline of many, replayed": Case(_several, micro=(1, 2, 1, 1, 1), block=1, replay=True),
    "pipeline of one, on a frozen embedding": Case(_several, micro=(6,), block=1, frozen=True),
    "pipeline, experts and context": Case(lambda _: (7, 70, 21, 40), experts=True, context=True, micro=(2, 1, 1)),
}


def _make(family: str, dtype: torch.dtype, case: Case) -> K3Model:
    sizes = {"num_heads": 4, "state_tile": case.tile, "attn_res_block": case.block}
    model = K3Model(dataclasses.replace(load_model_config(TINY), **sizes | FAMILIES[family]), seed=3)
    model.embed_tokens.requires_grad_(not case.frozen)
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


def _groups(case: Case, ranks: int) -> dict[str, dist.ProcessGroup]:
    """Of tokens, and of tensors or stages."""
    world = dist.group.WORLD
    assert world is not None
    inner = "tensors" if case.tensors else "stages" if case.micro else None
    if inner is None:
        return {"tokens": world}
    if not (case.experts or case.context):
        return {inner: world}
    mesh = torch.arange(ranks).view(-1, 2)
    return {"tokens": _own_group(mesh.t().tolist()), inner: _own_group(mesh.tolist())}


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
    groups = _groups(case, ranks)
    tokens, tensor, stages = (groups.get(name) for name in ("tokens", "tensors", "stages"))
    cut: dict[Axis, dist.ProcessGroup] = {}
    if case.tensors and tensor is not None:
        cut["tensor"] = tensor
        shard_tensors(model, tensor)
    if case.experts and tokens is not None:
        cut["expert"] = tokens
        shard_experts(model, tokens)
    stage = None if stages is None else PipelineStage(model, stages)
    gathered = gather_state(model, cut)
    if stages is not None:
        gathered = gather_stages(gathered, stages)
    assert list(gathered) == list(before)
    assert all(torch.equal(gathered[name], x) for name, x in before.items())
    shares = {axis: (dist.get_rank(g), dist.get_world_size(g)) for axis, g in cut.items()}
    found: dict[str, Any] = {"shares": shares, "names": [name for name, _ in model.named_parameters()]}
    batch, targets, weights = _pack(case, ranks, model.config)
    if stage is not None:
        found |= _run_stage(stage, model, case, batch, targets, weights, tokens)
        sum_gradients(model, tokens=tokens)
        return found | {"grads": _gradients(model)}
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
    return found | {"logprobs": logprobs.detach(), "rows": rows, "grads": _gradients(model)}


def _run_stage(
    stage: PipelineStage,
    model: K3Model,
    case: Case,
    batch: TokenBatch,
    targets: torch.Tensor,
    weights: torch.Tensor,
    tokens: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """The same of a stage, and what it finds beside: experts, biases after a step, micro-batches that it holds."""
    parts: list[TokenBatch | ContextShare] = []
    rows: list[torch.Tensor] = []
    starts = batch.cu_seqlens.tolist()
    for a, b in pairwise([0, *itertools.accumulate(case.micro)]):
        at = slice(starts[a], starts[b])
        routes = None if batch.routes is None else batch.routes[at]
        part = TokenBatch(batch.ids[at], batch.cu_seqlens[a : b + 1] - starts[a], routes)
        rows.append(torch.arange(starts[a], starts[b]))
        if case.context:
            assert tokens is not None
            part = ContextShare.cut(part, model.config, tokens)
            rows[-1] = rows[-1][part.rows]
        parts.append(part)

    def read(i: int, hidden: torch.Tensor) -> TokenLogprobs:
        return model.token_logprobs(hidden, targets[rows[i]], 1.0)

    def loss(i: int, hidden: torch.Tensor) -> torch.Tensor:
        return (read(i, hidden).logprob * weights[rows[i]]).sum()

    logprobs = [None if out.result is None else out.result.logprob for out in stage.forward(parts, read)]
    balancer = QuantileBalancer(model.moe_layers)
    with balancer.observe(), _count_live(model) as live:
        outputs = stage.forward_backward(parts, loss)
    for i, (out, logprob) in enumerate(zip(outputs, logprobs, strict=True)):
        assert (out.result is not None) == (logprob is not None) == stage.is_last
        if out.result is not None and logprob is not None:
            wanted = (logprob * weights[rows[i]]).sum()
            torch.testing.assert_close(out.result, wanted, rtol=DTYPES[logprob.dtype], atol=DTYPES[logprob.dtype])
    balancer.step(tokens)
    own = torch.cat(rows)
    routes = [out.routes for out in outputs if out.routes is not None]
    return {
        "logprobs": torch.cat([next(model.parameters()).new_zeros(0), *(x for x in logprobs if x is not None)]),
        "rows": own if stage.is_last else own[:0],
        "routes": _by_layer(model, torch.cat(routes)) if routes else {},
        "routed": own,
        "biases": _named_biases(model),
        "live": live,
    }


@contextmanager
def _count_live(model: K3Model) -> Iterator[dict[str, int]]:
    """Of how many micro-batches a tensor is kept for the backward: of the most at once, and of those at the end."""
    held: Counter[int] = Counter()
    found = {"most": 0}
    begin, part = model.begin, itertools.count(1)
    now = 0

    class Held:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.part = tensor.detach(), now  # with its graph it would hold itself
            held[now] += 1
            found["most"] = max(found["most"], sum(num > 0 for num in held.values()))

        def __del__(self) -> None:
            held[self.part] -= 1

    def counted(batch: TokenBatch, past: Past | None) -> Any:
        nonlocal now
        now = next(part)
        return begin(batch, past)

    model.begin = counted
    with torch.autograd.graph.saved_tensors_hooks(Held, lambda kept: kept.tensor):
        yield found
    model.begin = begin
    found["left"] = sum(num > 0 for num in held.values())


def _by_layer(model: K3Model, routes: torch.Tensor) -> dict[str, torch.Tensor]:
    names = [name for name, module in model.named_modules() if isinstance(module, SparseMoE)]
    return dict(zip(names, routes.unbind(1), strict=True))


def _named_biases(model: K3Model) -> dict[str, torch.Tensor]:
    return {n: x.clone() for n, x in model.state_dict().items() if n.endswith("e_score_correction_bias")}


def _refusals(group: dist.ProcessGroup) -> list[str]:
    """What a stage says of micro-batches that no pipeline can run."""
    stage = PipelineStage(_make("kimi_linear", torch.float32, CASES["pipeline"]), group)
    lengths = [[3, dist.get_rank(group) + 1], [3] * (dist.get_rank(group) + 1), [3, 0]]
    said: list[str] = []
    for numbers in lengths:
        parts = [TokenBatch.pack([torch.zeros(n, dtype=torch.int64)]) for n in numbers]
        with pytest.raises(ValueError, match="micro-batch") as error:
            stage.forward(parts, lambda _, hidden: hidden)
        said.append(str(error.value))
    return said


def _run(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        group = dist.group.WORLD
        assert group is not None
        found: dict[Any, Any] = {kind: _biases(kind, rank, ranks, group) for kind in KINDS}
        for family, dtype, (name, case) in itertools.product(FAMILIES, DTYPES, CASES.items()):
            if dtype == torch.float64 or name in ("experts", "all", "pipeline") or (ranks == 2 and not case.micro):
                found[family, dtype, name] = _spread(family, dtype, case, ranks)
        found["refusals"] = _refusals(group)
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


def _share(grads: dict[str, torch.Tensor], family: str, result: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Those gradients that a rank holds, and the part of each."""
    plan = placements(_make(family, torch.float32, CASES["all"]))
    found = {name: grads[name] for name in result["names"] if name in grads}
    for name, (axis, (index, ranks)) in itertools.product(found, result["shares"].items()):
        dim = getattr(plan[name], axis)
        if dim is not None:
            found[name] = found[name].chunk(ranks, dim)[index]
    return found


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float64) for name in CASES), *((name, torch.float32) for name in ("experts", "pipeline"))],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_several_ranks_give_the_logprobs_and_every_gradient_of_one(
    family: str, name: str, dtype: torch.dtype, found: list[dict[Any, Any]]
) -> None:
    logprobs, grads = _alone(family, dtype, name, len(found))
    assert all(grad.any() for grad in grads.values())  # else a gradient that is forgotten would be right
    seen = torch.cat([rank[family, dtype, name]["rows"] for rank in found]).unique()
    assert torch.equal(seen, torch.arange(len(logprobs)))
    assert grads.keys() <= {parameter for rank in found for parameter in rank[family, dtype, name]["names"]}
    for rank in found:
        result = rank[family, dtype, name]
        torch.testing.assert_close(result["logprobs"], logprobs[result["rows"]], rtol=0, atol=DTYPES[dtype])
        wanted = _share(grads, family, result)
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
        truth, alone = (_share(grads, family, result) for grads in (exact[1], one[1]))
        assert _distance(result["grads"], truth) <= 1.5 * _distance(alone, truth), name
        got, wanted = (x.double() - exact[0][result["rows"]] for x in (result["logprobs"], one[0][result["rows"]]))
        assert got.norm() <= 1.5 * wanted.norm() + 1e-6, name


def _distance(grads: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((grads[name] - wanted).square().sum()) for name, wanted in truth.items()))


PIPELINES = [name for name, case in CASES.items() if case.micro]


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_route_and_balance_as_one_process_does(family: str, name: str, found: list[dict[Any, Any]]) -> None:
    model = _make(family, torch.float64, CASES[name])
    batch, _, _ = _pack(CASES[name], len(found), model.config)
    balancer = QuantileBalancer(model.moe_layers)
    with balancer.observe():
        routes = _by_layer(model, model(batch).routes)
    balancer.step()
    biases, results = _named_biases(model), [rank[family, torch.float64, name] for rank in found]
    assert {layer for result in results for layer in result["routes"]} == routes.keys()
    for result in results:
        assert result["biases"].keys() == {f"{layer}.gate.e_score_correction_bias" for layer in result["routes"]}
        assert all(torch.equal(x, biases[n]) for n, x in result["biases"].items())
        assert all(torch.equal(x, routes[n][result["routed"]]) for n, x in result["routes"].items())


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_holds_no_more_micro_batches_than_there_are_stages_from_it_on(
    family: str, name: str, found: list[dict[Any, Any]]
) -> None:
    case = CASES[name]
    stages = 2 if case.context else len(found)
    for rank, results in enumerate(found):
        most = min(stages - rank % stages, len(case.micro))
        assert results[family, torch.float64, name]["live"] == {"most": most, "left": 0}


def test_stages_refuse_micro_batches_that_differ_or_are_empty(found: list[dict[Any, Any]]) -> None:
    for rank in found:
        lengths, numbers, empty = rank["refusals"]
        assert "different lengths: [[3, 1], [3, 2]" in lengths
        assert "different lengths: [[3], [3, 3]" in numbers
        assert "no token: [3, 0]" in empty


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([None, 1, 2, 3]), st.data())
def test_stages_begin_where_blocks_do_and_the_dearest_is_as_cheap_as_it_may_be(
    num_layers: int, stages: int, block: int | None, data: st.DataObject
) -> None:
    mla = data.draw(st.sets(st.integers(0, num_layers - 1)))
    sizes = {"num_layers": num_layers, "mla_layers": tuple(sorted(mla)), "attn_res_block": block}
    config = dataclasses.replace(load_model_config(TINY), **sizes)
    starts = range(0, num_layers, block or 1)
    if len(starts) < stages:
        key = "num_layers" if block is None else "attn_res_block"
        with pytest.raises(ConfigError, match=rf"model\.{key}: {len(starts)} .* {stages} stages"):
            stage_borders(config, stages)
        return
    *costs, after = active_parameters(config)

    def dearest(borders: list[int]) -> int:
        return max(sum(costs[a:b]) + after * (b == num_layers) for a, b in pairwise(borders))

    every = [[0, *inner, num_layers] for inner in itertools.combinations(starts[1:], stages - 1)]
    borders = stage_borders(config, stages)
    assert borders in every
    assert dearest(borders) == min(map(dearest, every))


def test_kimi_k3_in_eight_stages_has_a_block_on_each() -> None:
    assert stage_borders(load_model_config(MODELS / "k3.yaml"), 8) == [0, 12, 24, 36, 48, 60, 72, 84, 93]


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_share_out_a_model_by_the_parameters_that_a_token_reads(family: str) -> None:
    config = dataclasses.replace(load_model_config(TINY), value_head=True, **FAMILIES[family])
    whole, borders = K3Model(config, device="meta"), stage_borders(config, 3)
    *costs, after = active_parameters(config)
    names: list[str] = []
    for stage, (a, b) in enumerate(pairwise(borders)):
        model = K3Model(config, seed=3)
        keep_stage(model, stage, 3)
        names += model.state_dict()
        idle = config.num_experts - config.experts_per_token
        unread = sum(idle * x[0].numel() for layer in model.moe_layers for x in layer.experts.weights())
        unread += config.vocab_size * config.hidden_size * (stage == 0)
        assert sum(x.numel() for x in model.parameters()) - unread == sum(costs[a:b]) + after * (stage == 2)
        with pytest.raises(RuntimeError, match="run the model through its PipelineStage"):
            model(TokenBatch.pack([torch.tensor([1, 2, 3])]))
    assert names == list(whole.state_dict())


@pytest.mark.parametrize(("stages", "parts"), [*itertools.product(range(1, 6), range(1, 8))])
def test_stages_never_all_wait_even_if_a_message_needs_both_its_ends(stages: int, parts: int) -> None:
    """A batch of messages ends when all have gone, and a message goes while the batches of both ranks hold it."""
    waiting: list[list[set[tuple[int, int, bool, int]]]] = []
    for stage in range(stages):
        batches, sent = [], set()
        steps = one_forward_one_backward(stage, stages, parts)
        assert sorted(steps) == [(forward, i) for forward in (False, True) for i in range(parts)]
        for forward, i in steps:
            before, after = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
            batches.append(sent | ({(before, stage, forward, i)} if before in range(stages) else set()))
            sent = {(stage, after, forward, i)} if after in range(stages) else set()
        waiting.append([*batches, sent])
    gone: set[tuple[int, int, bool, int]] = set()
    while any(waiting):
        now = [batches[0] if batches else set() for batches in waiting]
        gone |= {message for batch in now for message in batch if message in now[message[0]] & now[message[1]]}
        ended = [batches.pop(0) for batches in waiting if batches and batches[0] <= gone]
        assert ended, now


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
