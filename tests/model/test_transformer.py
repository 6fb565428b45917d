"""The one forward: packed, cut, resumed, forked, replayed."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch

from k3rl.config import ModelConfig, load_model_config
from k3rl.kernels.kda import kda_gate
from k3rl.model.batch import TokenBatch
from k3rl.model.cache import ValueCache
from k3rl.model.config import cache_bytes, count_parameters
from k3rl.model.kda import KdaMixer
from k3rl.model.moe import Balancer, LoadQuantileBalancer, QuantileBalancer
from k3rl.model.transformer import K3Model

MODELS = Path(__file__).parents[2] / "configs" / "model"
TINY = load_model_config(MODELS / "k3_tiny.yaml")
UNEQUAL = dataclasses.replace(TINY, kda_key_dim=16, kda_value_dim=32, initializer_range=0.15, value_head=True)


LINEAR = dataclasses.replace(
    UNEQUAL,
    kda_gate_bound=None,
    kda_output_gate_rank=8,
    q_lora_rank=None,
    mla_output_gate=False,
    latent_dim=None,
    attn_res_block=None,
    activation="swiglu",
)


def _model(config: ModelConfig = UNEQUAL) -> K3Model:
    return K3Model(config, seed=3)


def _ids(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 256, (n,), generator=generator) for n in lengths]


def _gradients(model: K3Model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (got[name] - value).norm() <= 1e-8 * value.norm() + 1e-10, name


def test_b40_packed_equals_separate_forward_and_backward() -> None:
    model, ids = _model().double(), _ids(37, 51, 40)
    whole = model(TokenBatch.pack(ids)).hidden
    apart = torch.cat([model(TokenBatch.pack([i])).hidden for i in ids])
    torch.testing.assert_close(whole, apart)
    weights = torch.linspace(-1, 1, whole.numel(), dtype=torch.float64).view_as(whole)
    _assert_close(_gradients(model, (whole * weights).sum()), _gradients(model, (apart * weights).sum()))


@pytest.mark.parametrize("cut", [1, 36, 37, 38, 64, 87, 88, 89, 127])
def test_b40_packed_and_cut_for_two_shards_equals_separate_forward_and_backward(cut: int) -> None:
    """The second shard goes on from the state of the one sequence that is cut, and starts the others afresh."""
    model, ids = _model().double(), _ids(37, 51, 40)
    apart = torch.cat([model(TokenBatch.pack([i])).hidden for i in ids])
    ends = list(itertools.accumulate(len(i) for i in ids))
    num_begun = sum(end - len(i) < cut for i, end in zip(ids, ends, strict=True))
    room = cut - (ends[num_begun - 1] - len(ids[num_begun - 1]))
    begun, last = ids[: num_begun - 1], ids[num_begun - 1]
    first = model(TokenBatch.pack([*begun, last[:room]]), ValueCache.empty(UNEQUAL, num_begun, dtype=torch.float64))
    carried = first.cache.select(torch.tensor([num_begun - 1])).extend(len(ids) - num_begun)
    second = model(TokenBatch.pack([last[room:], *ids[num_begun:]]), carried)
    assert (len(first.hidden), len(second.hidden)) == (cut, 128 - cut)
    cut_up = torch.cat([first.hidden, second.hidden])
    torch.testing.assert_close(cut_up, apart)
    weights = torch.linspace(-1, 1, apart.numel(), dtype=torch.float64).view_as(apart)
    _assert_close(_gradients(model, (cut_up * weights).sum()), _gradients(model, (apart * weights).sum()))


def test_b50_prefill_then_decode_equals_prefill() -> None:
    model = _model()
    with torch.no_grad():
        for length in (1, 15, 64, 65):
            (ids,) = _ids(length + 8)
            whole = model(TokenBatch.pack([ids])).hidden
            cache = model(TokenBatch.pack([ids[:length]]), ValueCache.empty(UNEQUAL, 1)).cache
            for t in range(length, length + 8):
                out = model(TokenBatch.pack([ids[t : t + 1]]), cache)
                cache = out.cache
                torch.testing.assert_close(out.hidden[0], whole[t], rtol=0, atol=5e-5)


@pytest.mark.parametrize("cuts", [(1,), (15,), (16,), (17, 33)])
def test_gradients_through_leaves_of_the_cache_equal_the_unsplit_gradients(cuts: tuple[int, ...]) -> None:
    model, ids = _model().double(), _ids(37, 51, 40)

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        return (hidden.square() * torch.linspace(0.5, 2, UNEQUAL.hidden_size, dtype=torch.float64)).sum()

    whole = model(TokenBatch.pack(ids)).hidden
    want = _gradients(model, (whole**3).sum() + loss(whole))
    bounds = (0, *cuts, 51)
    batches = [TokenBatch.pack([i[a:b] for i in ids]) for a, b in itertools.pairwise(bounds)]
    caches = [ValueCache.empty(UNEQUAL, 3, dtype=torch.float64)]
    with torch.no_grad():
        for batch in batches[:-1]:
            caches.append(model(batch, caches[-1]).cache)
    model.zero_grad()
    arriving: list[torch.Tensor] | None = None
    for batch, cache in zip(reversed(batches), reversed(caches), strict=True):
        leaves = [x.detach().requires_grad_() for x in cache.tensors()]
        out = model(batch, cache.with_tensors(leaves))
        total = (out.hidden**3).sum() + loss(out.hidden)
        if arriving is not None:
            total = total + sum((x * g).sum() for x, g in zip(out.cache.tensors(), arriving, strict=True))
        total.backward()
        arriving = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    got = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    _assert_close(got, want)


def test_later_tokens_do_not_change_earlier_hidden_states() -> None:
    model, (ids,) = _model(), _ids(90)
    with torch.no_grad():
        whole = model(TokenBatch.pack([ids])).hidden
        for length in (1, 17, 40):
            got = model(TokenBatch.pack([ids[:length]])).hidden
            torch.testing.assert_close(got, whole[:length], rtol=0, atol=1e-5)


def test_replayed_routes_reproduce_the_forward_and_train_the_router() -> None:
    model, ids = _model(), _ids(20, 30)
    out = model(TokenBatch.pack(ids))
    again = model(TokenBatch.pack(ids, list(out.routes.split([20, 30]))))
    assert torch.equal(out.hidden, again.hidden)
    other = (out.routes + 1) % UNEQUAL.num_experts
    other[::2] = -1
    mixed = model(TokenBatch.pack(ids, list(other.split([20, 30]))))
    assert torch.equal(mixed.routes[1::2], other[1::2])
    assert torch.equal(mixed.routes[::2, 0], out.routes[::2, 0])
    grads = _gradients(model, mixed.hidden.pow(3).sum())
    assert all(grads[f"layers.{i}.block_sparse_moe.gate.weight"].abs().sum() > 0 for i in range(1, UNEQUAL.num_layers))
    assert out.stats["moe_load"].sum(-1).tolist() == [100] * len(model.moe_layers)


def test_a_fresh_model_forgets_slowly_and_averages_its_blocks() -> None:
    """K3 report §2.5: A_log 0, steps drawn log-uniformly from 0.001 to 0.1, pseudo-queries 0."""
    mixer = K3Model(dataclasses.replace(TINY, num_heads=64), seed=4).layers[0].self_attn
    assert isinstance(mixer, KdaMixer)
    assert not mixer.A_log.any()
    shape = (mixer.heads, mixer.key_dim)
    bias = mixer.dt_bias.detach().view(shape)
    retention = kda_gate(torch.zeros(1, *shape), mixer.A_log.detach(), bias, -5.0).exp()
    assert 0.62 <= float(retention.min()) < 0.65
    assert 0.993 < float(retention.max()) <= 0.9951
    steps = torch.nn.functional.softplus(bias)
    assert 1e-3 * 0.999 <= float(steps.min()) < float(steps.max()) <= 1e-1 * 1.001
    assert float(steps.log().median()) == pytest.approx(math.log(1e-2), abs=0.15)
    queries = [p for name, p in _model().named_parameters() if "res.proj" in name]
    assert len(queries) == 2 * UNEQUAL.num_layers
    assert not any(p.any() for p in queries)


def test_equal_seeds_give_equal_weights_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    a, b, c = K3Model(TINY, seed=1), K3Model(TINY, seed=1), K3Model(TINY, seed=2)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(x, b.state_dict()[n]) for n, x in a.state_dict().items())
    assert not torch.equal(a.embed_tokens.weight, c.embed_tokens.weight)
    assert torch.equal(a.lm_head.weight, a.embed_tokens.weight)


@pytest.mark.parametrize("kind", [QuantileBalancer, LoadQuantileBalancer])
def test_a_balancer_counts_only_inside_observe_and_moves_the_biases_on_step(kind: type[Balancer]) -> None:
    model = _model()
    balancer = kind(model.moe_layers)
    batch = TokenBatch.pack(_ids(100))
    model(batch)
    assert balancer.counts[0] is None
    with balancer.observe():
        model(batch)
    balancer.step()
    assert all(layer.gate.e_score_correction_bias.abs().sum() > 0 for layer in model.moe_layers)
    assert all(abs(float(layer.gate.e_score_correction_bias.mean())) < 1e-6 for layer in model.moe_layers)
    moved = [layer.gate.e_score_correction_bias.clone() for layer in model.moe_layers]
    balancer.step()  # nothing was counted since
    assert all(
        torch.equal(layer.gate.e_score_correction_bias, m) for layer, m in zip(model.moe_layers, moved, strict=True)
    )


def test_monitors_are_counted_in_training_and_cost_nothing_elsewhere() -> None:
    model, batch = _model(), TokenBatch.pack(_ids(30, 12))
    stats = model(batch).stats
    assert stats["moe_load"].sum(-1).tolist() == [84] * len(model.moe_layers)
    assert int(stats["tokens"]) == 42
    highest = 42 * math.log(UNEQUAL.num_experts)
    assert all(0 < entropy < highest for entropy in stats["moe_routing_entropy"].tolist())
    assert model.eval()(batch).stats == {}


def test_no_new_tokens_leave_the_cache_and_values_start_at_zero() -> None:
    model = _model()
    cache = ValueCache.empty(UNEQUAL, 2)
    out = model(TokenBatch.pack(_ids(0, 0)), cache)
    assert out.hidden.shape == (0, 64)
    assert out.cache is cache
    assert model.values(model(TokenBatch.pack(_ids(4))).hidden).tolist() == [0.0] * 4


def test_parameters_and_cache_bytes_are_counted_right() -> None:
    for config in (TINY, UNEQUAL, LINEAR):
        assert count_parameters(config)[0] == sum(p.numel() for p in K3Model(config).parameters())
        cache = K3Model(config)(TokenBatch.pack(_ids(40)), ValueCache.empty(config, 1)).cache
        assert cache_bytes(config, 40, element_bytes=4) == sum(4 * x.numel() for x in cache.tensors())
    about = {"k3_nano": 0.58e9, "k3_mini": 1.2e9, "k3_small": 2.6e9}
    for name, total in about.items():
        assert abs(count_parameters(load_model_config(MODELS / f"{name}.yaml"))[0] / total - 1) < 0.03
