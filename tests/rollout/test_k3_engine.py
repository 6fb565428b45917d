"""The K3 engine: batching, handles and weight sync change nothing about what is sampled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from k3rl.config import load_model_config
from k3rl.errors import EngineError, WeightSyncError
from k3rl.learner.forward import compute_vectors
from k3rl.learner.token_tree import whole_samples
from k3rl.model.batch import TokenBatch
from k3rl.model.transformer import K3Model
from k3rl.objective import build_batch
from k3rl.rollout.engine import Completion, Request
from k3rl.rollout.k3_engine import K3Engine
from k3rl.trajectory import NO_ROUTE, Outcome, PolicyVersion, Segment, Task, Trajectory, TrajectoryKey
from k3rl.weights.base import weights_digest

CONFIG = load_model_config(Path(__file__).parents[2] / "configs/model/k3_tiny.yaml")
Weights = dict[str, torch.Tensor]


def _weights(seed: int = 0) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in K3Model(CONFIG, seed).state_dict().items()}


def _version(tensors: Weights, step: int = 0) -> PolicyVersion:
    return PolicyVersion(incarnation=0, step=step, digest=weights_digest(tensors))


def _engine(seed: int = 0) -> K3Engine:
    tensors = _weights(seed)
    return K3Engine(CONFIG, _version(tensors), tensors)


def _request(length: int, seed: int, **changes: object) -> Request:
    ids = np.random.default_rng(length).integers(0, CONFIG.vocab_size, length).tolist()
    request = Request(token_ids=ids, max_tokens=8, temperature=1.0, stop_ids=frozenset(), seed=seed)
    return replace(request, **changes)  # type: ignore[arg-type]


def _finish(engine: K3Engine, numbers: list[int]) -> list[Completion]:
    found: dict[int, Completion] = {}
    for _ in range(200):
        found.update({c.request: c for c in engine.step()})
        if all(n in found for n in numbers):
            return [found[n] for n in numbers]
    raise AssertionError("requests do not end")


def _sample(engine: K3Engine, *requests: Request) -> list[Completion]:
    return _finish(engine, [engine.submit(r) for r in requests])


def _routes(*turns: Completion) -> np.ndarray:
    """Routes along a context, of the turns that read it one after the other."""
    parts = [c.routes for c in turns if c.routes is not None]
    assert [c.routes_start for c in turns] == np.cumsum([0, *map(len, parts)]).tolist()[:-1]
    return np.concatenate(parts)


def _same(first: Completion, second: Completion, tolerance: float = 1e-5) -> None:
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert np.abs(first.logprobs - second.logprobs).max() <= tolerance


REQUESTS = [_request(length, seed=100 + length, max_tokens=4 + length % 7) for length in (1, 2, 15, 16, 17, 30, 40)]


def test_a_row_samples_the_same_alone_and_in_a_batch_of_any_order() -> None:
    alone = [_sample(_engine(), r)[0] for r in REQUESTS]
    engine = _engine()
    for request, expected, found in zip(REQUESTS, alone, _sample(engine, *REQUESTS), strict=True):
        assert len(found.token_ids) == request.max_tokens
        _same(found, expected)
    for expected, found in zip(reversed(alone), _sample(engine, *reversed(REQUESTS)), strict=True):
        _same(found, expected)


def test_a_row_samples_the_same_when_others_arrive_and_leave_in_between() -> None:
    alone = [_sample(_engine(), r)[0] for r in REQUESTS]
    engine = _engine()
    numbers, found = [], {}
    for request in REQUESTS:
        numbers.append(engine.submit(request))
        for _ in range(2):
            for completion in engine.step():
                found[completion.request] = completion
                engine.release(completion.handle)
    while len(found) < len(numbers):
        found.update({c.request: c for c in engine.step()})
    for number, expected in zip(numbers, alone, strict=True):
        _same(found[number], expected)


def test_b26_a_row_has_no_id_logprob_or_version_past_its_stop_token_wherever_that_is() -> None:
    (free,) = _sample(_engine(), REQUESTS[-1])
    assert free.stop_reason == "length"
    ids, engine = free.token_ids.tolist(), _engine()
    # one request for each place, all in one batch, so that rows stop while others go on
    stops = [replace(REQUESTS[-1], stop_ids=frozenset({token})) for token in ids]
    for token, found in zip(ids, _sample(engine, *stops), strict=True):
        kept = ids.index(token) + 1
        assert found.stop_reason == "stop"
        assert found.token_ids.tolist() == ids[:kept]
        assert np.abs(found.logprobs - free.logprobs[:kept]).max() <= 1e-5
        assert (len(found.logprobs), len(found.versions)) == (kept, kept)
        assert len(_routes(found)) == len(REQUESTS[-1].token_ids) + kept - 1


def test_a_stop_token_on_the_last_allowed_position_counts_as_a_stop() -> None:
    (free,) = _sample(_engine(), _request(5, seed=1, max_tokens=1))
    stop = frozenset({int(free.token_ids[0])})
    (found,) = _sample(_engine(), _request(5, seed=1, max_tokens=1, stop_ids=stop))
    assert (found.stop_reason, len(found.token_ids)) == ("stop", 1)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 40])
def test_going_on_from_a_handle_equals_the_whole_context_from_cold(length: int) -> None:
    warm = _engine()
    (first,) = _sample(warm, _request(length, seed=3, max_tokens=9))
    context = [*_request(length, seed=3).token_ids, *first.token_ids.tolist(), 7, 8, 9]
    second = _request(length, seed=4, token_ids=context)
    other = warm.submit(_request(22, seed=5))
    (going_on,) = _sample(warm, replace(second, handle=first.handle))
    (cold,) = _sample(_engine(), second)
    assert other != going_on.request
    assert going_on.handle == first.handle
    _same(going_on, cold)
    assert (first.routes_start, going_on.routes_start, cold.routes_start) == (0, length + 8, 0)
    assert (_routes(first, going_on) == _routes(cold)).all()


def test_forks_go_on_apart_and_outlive_the_handle_they_came_from() -> None:
    engine = _engine()
    base = _request(20, seed=1)
    (first,) = _sample(engine, base)
    context = [*base.token_ids, *first.token_ids.tolist(), 5]
    fork = engine.fork(first.handle)
    left = replace(base, token_ids=context, seed=11, handle=first.handle)
    right = replace(base, token_ids=[*context, 6], seed=12, handle=fork)
    (went_left,) = _sample(engine, left)
    engine.release(first.handle)
    (went_right,) = _sample(engine, right)
    _same(went_left, _sample(_engine(), replace(left, handle=None))[0])
    _same(went_right, _sample(_engine(), replace(right, handle=None))[0])
    assert went_right.handle == fork
    assert len(_routes(first, went_right)) == len(context) + 1 + base.max_tokens - 1


def _going_on(base: Request, done: Completion, **changes: object) -> Request:
    """The next turn of what ``done`` sampled."""
    context = [*base.token_ids, *done.token_ids.tolist(), 7]
    return replace(base, token_ids=context, seed=2, **changes)  # type: ignore[arg-type]


def test_a_handle_that_is_released_unknown_in_use_or_of_another_context_costs_a_recomputation_only() -> None:
    engine, base = _engine(), _request(6, seed=1)
    (done,), (other,) = _sample(engine, base), _sample(engine, _request(9, seed=3))
    wanted = _sample(_engine(), _going_on(base, done))[0]
    for handle in (12345, other.handle):
        (found,) = _sample(engine, _going_on(base, done, handle=handle))
        _same(found, wanted)
        assert found.handle not in (done.handle, other.handle, handle)
        assert len(_routes(found)) == len(_routes(wanted))
    twice = _sample(engine, *[_going_on(base, done, handle=done.handle)] * 2)
    assert sorted(c.routes_start for c in twice) == [0, len(base.token_ids) + base.max_tokens - 1]
    for found in twice:
        _same(found, wanted)
    engine.release(done.handle)
    engine.release(done.handle)
    _same(_sample(engine, _going_on(base, done, handle=done.handle))[0], wanted)
    _same(_sample(engine, _going_on(base, done, handle=engine.fork(done.handle)))[0], wanted)


def test_a_context_that_is_not_longer_than_what_a_handle_covers_is_read_again() -> None:
    engine, base = _engine(), _request(6, seed=1)
    (done,) = _sample(engine, base)
    covered = [*base.token_ids, *done.token_ids.tolist()][:-1]  # the last sampled token is not fed yet
    wrong = [*covered[:3], (covered[3] + 1) % CONFIG.vocab_size, *covered[4:], 1]
    for ids in (covered, covered[:4], wrong):
        request = replace(base, token_ids=ids)
        _same(_sample(engine, replace(request, handle=done.handle))[0], _sample(_engine(), request)[0])
    (going_on,) = _sample(engine, _going_on(base, done, handle=done.handle))
    assert going_on.routes_start == len(covered)


@pytest.mark.parametrize("shared", [0, 1, 63, 64, 65, 127, 128, 129, 130])
@pytest.mark.parametrize("forked", [False, True])
def test_b49_a_kept_state_serves_whoever_has_all_of_its_tokens_and_nobody_who_has_only_some(
    shared: int, forked: bool
) -> None:
    prompt = _request(130, seed=1).token_ids
    different = [(i + 1) % CONFIG.vocab_size for i in prompt]
    asked = _request(130, seed=2, token_ids=[*prompt[:shared], *different[shared:], 9], max_tokens=3)
    found = []
    for kept_ids in (prompt, different[::-1]):  # the second run is cold, with as much beside it
        engine = _engine()
        # The sampled token is not read yet: the state covers 130 tokens.
        (kept,) = _sample(engine, _request(130, seed=1, token_ids=kept_ids, max_tokens=1))
        handle = engine.fork(kept.handle) if forked else kept.handle
        found += _sample(engine, replace(asked, handle=handle if kept_ids is prompt else None))
    reusable = 130 if shared == 130 else 0
    assert [c.routes_start for c in found] == [reusable, 0]
    # Going on from a state sums in another order than reading all of it; nothing else may differ by a bit.
    _same(*found, tolerance=1e-5 if reusable and not K3Engine.capabilities.exact else 0.0)


def test_nothing_is_kept_of_what_was_released_or_aborted_and_the_others_go_on() -> None:
    engine = _engine()
    numbers = [engine.submit(r) for r in REQUESTS]
    engine.step()
    assert engine.num_contexts == len(REQUESTS)
    for number in [*numbers[:3], *numbers[4:], 12345]:
        engine.abort(number)
    (found,) = _finish(engine, [numbers[3]])
    _same(found, _sample(_engine(), REQUESTS[3])[0])
    engine.abort(found.request)
    assert engine.num_contexts == 1
    engine.release(found.handle)
    assert engine.num_contexts == 0
    assert engine.step() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": []}, "at least one token"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"token_ids": [1, 256]}, "vocabulary"),
        ({"token_ids": [-1]}, "vocabulary"),
    ],
)
def test_an_impossible_request_is_refused_and_the_others_go_on(changes: dict[str, object], words: str) -> None:
    engine = _engine()
    number = engine.submit(REQUESTS[2])
    with pytest.raises(EngineError, match=words):
        engine.submit(_request(3, seed=1, **changes))
    _same(_finish(engine, [number])[0], _sample(_engine(), REQUESTS[2])[0])


def test_b38_the_same_weights_three_times_sample_bit_for_bit_what_a_fresh_engine_samples() -> None:
    tensors = _weights()
    engine = _engine()
    expected = _sample(_engine(), *REQUESTS)
    for _ in range(3):
        engine.update_weights(_version(tensors), tensors)
        assert engine.version.digest == weights_digest(tensors)
        for found, wanted in zip(_sample(engine, *REQUESTS), expected, strict=True):
            _same(found, wanted, tolerance=0.0)
            engine.release(found.handle)


def test_new_weights_sample_what_a_fresh_engine_with_them_samples() -> None:
    engine = _engine(0)
    _sample(engine, *REQUESTS)
    tensors = _weights(1)
    engine.update_weights(_version(tensors, step=1), tensors)
    found, wanted = _sample(engine, *REQUESTS), _sample(_engine(1), *REQUESTS)
    for a, b in zip(found, wanted, strict=True):
        _same(a, b, tolerance=0.0)
        assert {v.step for v in a.versions} == {1}
    assert [a.token_ids.tolist() for a in found] != [a.token_ids.tolist() for a in _sample(_engine(0), *REQUESTS)]


def test_the_engine_keeps_a_copy_of_its_weights() -> None:
    tensors = _weights()
    engine = K3Engine(CONFIG, _version(tensors), tensors)
    for tensor in tensors.values():
        tensor.zero_()
    _same(_sample(engine, REQUESTS[1])[0], _sample(_engine(), REQUESTS[1])[0], tolerance=0.0)


def _spoil(tensors: Weights, how: str) -> Weights:
    name = "lm_head.weight"
    changed = {
        "missing": {n: t for n, t in tensors.items() if n != name},
        "unexpected": {**tensors, "extra.weight": torch.zeros(2)},
        "shape": {**tensors, name: tensors[name][:-1]},
        "dtype": {**tensors, name: tensors[name].bfloat16()},
        "digest": {**tensors, name: tensors[name] + 1},
    }
    return changed[how]


@pytest.mark.parametrize("how", ["missing", "unexpected", "shape", "dtype", "digest"])
def test_b38_a_wrong_set_of_weights_is_refused_and_the_old_version_goes_on_serving(how: str) -> None:
    engine, old, new = _engine(), _weights(), _weights(1)
    spoilt = _spoil(new, how)
    version = _version(new if how == "digest" else spoilt, step=1)
    base = _request(6, seed=1)
    (done,) = _sample(engine, base)
    words = {"shape": "lm_head", "dtype": "bfloat16"}.get(how, how)
    with pytest.raises(WeightSyncError, match=words):
        engine.update_weights(version, spoilt)
    assert engine.version == _version(old)
    for found, wanted in zip(_sample(engine, *REQUESTS), _sample(_engine(), *REQUESTS), strict=True):
        _same(found, wanted)
    going_on = replace(base, token_ids=[*base.token_ids, *done.token_ids.tolist()], seed=2)
    _same(_sample(engine, replace(going_on, handle=done.handle))[0], _sample(_engine(), going_on)[0])


@pytest.mark.parametrize("how", ["missing", "shape", "dtype"])
def test_b38_not_one_tensor_may_be_missing_or_of_another_shape_or_dtype(how: str) -> None:
    engine, old, new = _engine(), _weights(), _weights(1)
    for name, tensor in new.items():
        changed = {"shape": tensor[None], "dtype": tensor.double(), "missing": tensor}[how]
        spoilt = {n: t for n, t in {**new, name: changed}.items() if how != "missing" or n != name}
        with pytest.raises(WeightSyncError, match=name.replace(".", r"\.")):
            engine.update_weights(_version(spoilt, step=1), spoilt)
    assert engine.version == _version(old)
    _same(_sample(engine, REQUESTS[2])[0], _sample(_engine(), REQUESTS[2])[0], tolerance=0.0)


@pytest.mark.parametrize("after", [1, 3, 7])
def test_requests_under_way_go_on_under_new_weights_from_what_they_have_sampled(after: int) -> None:
    engine, new = _engine(), _weights(1)
    old_all = _sample(_engine(), *REQUESTS)
    numbers = [engine.submit(r) for r in REQUESTS]
    found = {c.request: c for _ in range(after) for c in engine.step()}
    engine.update_weights(_version(new, step=1), new)
    found |= {c.request: c for _ in range(20) for c in engine.step()}
    for request, number, old in zip(REQUESTS, numbers, old_all, strict=True):
        completion, n = found[number], min(after, request.max_tokens)
        ids = completion.token_ids.tolist()
        assert [v.step for v in completion.versions] == [0] * n + [1] * (request.max_tokens - n)
        assert ids[:n] == old.token_ids.tolist()[:n]
        read = len(request.token_ids) + n - 1
        assert (_routes(completion)[:read] == _routes(old)[:read]).all()
        assert len(_routes(completion)) == len(request.token_ids) + len(ids) - 1
        if n < request.max_tokens:
            # Token for token what the new weights say of this context.
            model = K3Model(CONFIG, 1).eval()
            context = torch.tensor([*request.token_ids, *ids])
            with torch.no_grad():
                hidden = model(TokenBatch.pack([context[:-1]])).hidden[len(request.token_ids) + n - 1 :]
                logprobs = model.token_logprobs(hidden, context[len(request.token_ids) + n :], 1.0).logprob
            assert np.abs(logprobs.numpy() - completion.logprobs[n:]).max() <= 1e-5


def test_a_handle_outlives_a_new_version_of_the_same_weights_but_not_other_weights() -> None:
    engine, base, same, new = _engine(), _request(6, seed=1), _weights(), _weights(1)
    (done,) = _sample(engine, base)
    engine.update_weights(_version(same, 1), same)
    (warm,) = _sample(engine, _going_on(base, done, handle=done.handle))
    assert (warm.routes_start, {v.step for v in warm.versions}) == (len(base.token_ids) + base.max_tokens - 1, {1})
    engine.update_weights(_version(new, 2), new)
    (cold,) = _sample(engine, _going_on(base, done, handle=warm.handle))
    assert cold.routes_start == 0
    _same(cold, _sample(_engine(1), _going_on(base, done))[0])


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("name", ["lm_head.weight", "embed_tokens.weight"])
def test_weights_that_are_not_finite_are_an_error_that_names_the_version(name: str, temperature: float) -> None:
    engine, bad, good = _engine(), _weights(), _weights(1)
    bad[name].fill_(float("nan"))
    version = _version(bad, step=7)
    engine.update_weights(version, bad)
    engine.submit(replace(REQUESTS[2], temperature=temperature))
    with pytest.raises(EngineError, match=f"step=7.*{version.digest}"):
        engine.step()
    assert engine.step() == []
    engine.update_weights(_version(good, step=8), good)
    _same(_sample(engine, REQUESTS[2])[0], _sample(_engine(1), REQUESTS[2])[0])


def _as_trajectory(engine: K3Engine, request: Request, completion: Completion, temperature: float) -> Trajectory:
    routes = _routes(completion)
    n, total = len(request.token_ids), len(request.token_ids) + len(completion.token_ids)
    assert len(routes) == total - 1
    padded = np.full((total, *routes.shape[1:]), NO_ROUTE, dtype=np.uint16)
    padded[:-1] = routes
    ids = np.asarray(request.token_ids, dtype=np.int32)
    return Trajectory(
        key=TrajectoryKey(ordinal=0, sample=completion.request),
        task=Task(environment="none", split="train", index=0),
        segments=(
            Segment(kind="prompt", token_ids=ids, routes=padded[:n]),
            Segment(
                kind="action",
                token_ids=completion.token_ids,
                context=0,
                follows=0,
                rollout_logprobs=completion.logprobs,
                version_index=np.zeros(len(completion.token_ids), dtype=np.int32),
                routes=padded[n:],
            ),
        ),
        outcome=Outcome(status="completed"),
        versions=(engine.version,),
        temperature=temperature,
    )


def test_experts_in_mxfp4_are_rounded_when_weights_arrive_as_in_training() -> None:
    config, tensors = replace(CONFIG, expert_format="mxfp4"), _weights()
    engine = K3Engine(config, _version(tensors), tensors)
    completions = _sample(engine, *REQUESTS)
    model = K3Model(config)
    for request, completion in zip(REQUESTS, completions, strict=True):
        ids = torch.tensor([*request.token_ids, *completion.token_ids.tolist()])
        begin = len(request.token_ids) - 1
        hidden = model(TokenBatch.pack([ids[:-1]])).hidden[begin:]
        found = model.token_logprobs(hidden, ids[begin + 1 :], 1.0).logprob.detach().numpy()
        assert np.abs(found - completion.logprobs).max() <= 1e-5
    plain = _sample(_engine(), *REQUESTS)
    assert any(np.abs(a.logprobs[:1] - b.logprobs[:1]).max() > 1e-3 for a, b in zip(plain, completions, strict=True))


def test_an_expert_that_mxfp4_cannot_hold_is_refused_and_the_old_weights_stay() -> None:
    config, tensors = replace(CONFIG, expert_format="mxfp4"), _weights()
    engine = K3Engine(config, _version(tensors), tensors)
    broken = _weights(seed=1)
    broken["layers.1.block_sparse_moe.experts.w2"][3, 2, 1] = float("inf")
    with pytest.raises(WeightSyncError, match="version 1 refused, 0 stays: MXFP4 has no code"):
        engine.update_weights(_version(broken, 1), broken)
    (found,) = _sample(engine, REQUESTS[-1])
    (expected,) = _sample(K3Engine(config, _version(tensors), tensors), REQUESTS[-1])
    assert found.versions == expected.versions
    _same(found, expected)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_b34_the_learner_computes_the_logprobs_that_the_engine_sampled_with(temperature: float) -> None:
    engine = _engine()
    requests = [replace(r, temperature=temperature) for r in REQUESTS]
    completions = _sample(engine, *requests)
    trajectories = [_as_trajectory(engine, r, c, temperature) for r, c in zip(requests, completions, strict=True)]
    batch = build_batch(trajectories, [np.zeros(2) for _ in trajectories])
    model = K3Model(CONFIG)
    vectors = compute_vectors(model, batch, whole_samples(batch, [[0, 1, 2], [3, 4], [5, 6]]))
    gap = (vectors.logprob - batch.rollout_logprobs)[batch.action_mask].abs().max()
    assert batch.num_trained == sum(r.max_tokens for r in requests)
    assert gap <= 1e-5
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.tensor([*request.token_ids, *completion.token_ids.tolist()])
        routes = _routes(completion)
        packed = TokenBatch.pack([ids[:-1]], [torch.from_numpy(routes.astype(np.int64))])
        out = model(packed)
        assert out.routes is not None
        assert packed.routes is not None
        assert (out.routes == packed.routes).all()
        begin = len(request.token_ids) - 1
        found = model.token_logprobs(out.hidden[begin:], ids[begin + 1 :], temperature).logprob.detach().numpy()
        assert np.abs(found - completion.logprobs).max() <= 1e-5


def test_greedy_takes_the_likeliest_token_whatever_the_seed_and_reports_logprobs_at_temperature_1() -> None:
    requests = [_request(9, seed=seed, temperature=0.0) for seed in (1, 2)]
    first, second = _sample(_engine(), *requests)
    _same(first, second)
    model = K3Model(CONFIG).eval()
    ids = torch.tensor([*requests[0].token_ids, *first.token_ids.tolist()])
    with torch.no_grad():
        logits = model(TokenBatch.pack([ids[:-1]])).hidden[8:] @ model.lm_head.weight.T
    best = logits.log_softmax(-1).max(-1)
    assert best.indices.tolist() == first.token_ids.tolist()
    assert np.abs(best.values.numpy() - first.logprobs).max() <= 1e-5


def test_b36_seeds_give_distinct_streams_that_any_engine_repeats() -> None:
    key = TrajectoryKey(ordinal=3, sample=0)
    keys = [replace(key, sample=sample) for sample in range(8)]

    def spread(run_seed: int) -> list[tuple[int, ...]]:
        engines = [_engine() for _ in range(4)]
        requests = [_request(5, seed=k.seed(run_seed, "turn", 0), temperature=1.5) for k in keys]
        return [tuple(_sample(engines[i % 4], r)[0].token_ids.tolist()) for i, r in enumerate(requests)]

    first = spread(0)
    assert len(set(first)) == 8
    assert spread(0) == first
    assert not set(spread(1)) & set(first)
    retry = _request(5, seed=replace(key, attempt=1).seed(0, "turn", 0), temperature=1.5)
    (one,), (two,) = _sample(_engine(), retry), _sample(_engine(), retry)
    assert one.token_ids.tolist() == two.token_ids.tolist() != list(first[0])


def test_an_idle_engine_has_nothing_to_do() -> None:
    assert _engine().step() == []
