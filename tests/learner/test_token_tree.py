"""A prefix that samples share is computed once and a long sample in pieces: the numbers are those of whole samples."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.config import ModelConfig, ObjectiveConfig, load_model_config
from k3rl.learner.forward import compute_gradients, compute_vectors
from k3rl.learner.token_tree import Walk, _waves, build_tree, plan_walk, whole_samples
from k3rl.model.moe import QuantileBalancer
from k3rl.model.transformer import K3Model
from k3rl.objective import ObjectiveBatch, Sample, build_batch, resolve
from k3rl.trajectory import Outcome, Segment, SegmentKind, Task, Trajectory, TrajectoryKey

TINY = dataclasses.replace(load_model_config(Path(__file__).parents[2] / "configs/model/k3_tiny.yaml"), value_head=True)
LINEAR = {
    "kda_gate_bound": None,
    "kda_output_gate_rank": 8,
    "q_lora_rank": None,
    "latent_dim": None,
    "attn_res_block": None,
    "mla_output_gate": False,
    "activation": "swiglu",
}
FAMILIES = {
    "k3": TINY,
    "k3 of long tiles": dataclasses.replace(TINY, state_tile=64),
    "kimi_linear": dataclasses.replace(TINY, **LINEAR),  # type: ignore[arg-type]
}


def make_sample(ids: list[int], routes: list[int] | None = None) -> Sample:
    routed = None if routes is None else torch.tensor(routes).view(-1, 1, 1)
    return Sample(0, 0, torch.tensor(ids, dtype=torch.int64), routed)


def make_segment(rng: random.Random, kind: SegmentKind, size: int, context: int | None) -> Segment:
    ids = np.array([rng.randrange(200) for _ in range(size)], dtype=np.int32)
    if kind != "action":
        return Segment(kind=kind, token_ids=ids, context=context, follows=context)
    logprobs = np.array([rng.uniform(-6, -4) for _ in range(size)], dtype=np.float32)
    recorded = {"rollout_logprobs": logprobs, "version_index": np.zeros(size, np.int32)}
    return Segment(kind=kind, token_ids=ids, context=context, follows=context, **recorded)  # type: ignore[arg-type]


def make_tree(seed: int, groups: int = 2, samples: int = 3) -> tuple[list[Trajectory], list[np.ndarray | None]]:
    """Groups that share a prompt, and trajectories that branch at any segment, up to sixteen turns deep."""
    rng = random.Random(seed)
    trajectories: list[Trajectory] = []
    for ordinal in range(groups):
        prompt = make_segment(rng, "prompt", rng.randint(1, 70), None)
        for sample in range(samples):
            segments = [prompt]
            for _ in range(rng.randint(1, 10)):
                context = rng.randrange(len(segments)) if rng.random() < 0.4 else len(segments) - 1
                kind: SegmentKind = "action" if rng.random() < 0.6 else "observation"
                segments.append(make_segment(rng, kind, rng.randint(1, 40), context))
            if not any(s.kind == "action" for s in segments):
                segments.append(make_segment(rng, "action", 3, 0))
            cut = Outcome(status="truncated", limit="max_turns")
            trajectories.append(
                Trajectory(
                    key=TrajectoryKey(ordinal=ordinal, sample=sample),
                    task=Task(environment="toy", split="train", index=ordinal),
                    segments=tuple(segments),
                    outcome=cut if rng.random() < 0.3 else Outcome(status="completed"),
                )
            )
    rewards: list[np.ndarray | None] = [np.array([rng.random() for _ in t.segments]) for t in trajectories]
    return trajectories, rewards


def make_policy(config: ModelConfig) -> K3Model:
    model = K3Model(config, seed=3)
    generator = torch.Generator().manual_seed(4)
    for name, tensor in model.state_dict().items():
        if name.endswith(("res.proj.weight", "e_score_correction_bias", "value_head.weight")):
            tensor.normal_(0.0, 0.1, generator=generator)
    return model.double()


def merged(batch: ObjectiveBatch, longest: int | None, min_shared: int | None, limit: int, *, with_value: bool) -> Walk:
    needed = sorted(batch.samples_to_compute(with_value=with_value))
    tree = build_tree({n: batch.samples[n] for n in needed}, longest, min_shared, keep_last=with_value)
    return Walk(tree, tuple(_waves(tree.nodes, limit)), with_value)


def gradients(model: K3Model) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    worst = {n: float((found[n] - g).norm() / g.norm()) for n, g in wanted.items() if g.norm() > 0}
    assert max(worst.values()) < 1e-10, max(worst, key=lambda n: worst[n])


# --- the tree -----------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=20), min_size=1, max_size=8),
    longest=st.none() | st.integers(1, 7),
    min_shared=st.none() | st.integers(1, 4),
)
def test_a_path_to_the_root_is_a_sample_and_no_token_is_there_twice(
    texts: list[list[int]], longest: int | None, min_shared: int | None
) -> None:
    samples = {7 * n: make_sample(text) for n, text in enumerate(texts)}
    tree = build_tree(samples, longest, min_shared, keep_last=False)
    assert [i for node in tree.nodes for i in node.rows] == list(range(len(tree.ids)))
    end_of = {node.rows[-1]: i for i, node in enumerate(tree.nodes)}
    for n, sample in samples.items():
        rows = tree.rows[n]
        assert tree.ids[rows].tolist() == sample.ids[:-1].tolist()
        node = tree.nodes[end_of[int(rows[-1])]] if int(rows[-1]) in end_of else None
        if node is not None:  # it may end inside a node of a longer sample
            path = torch.cat([tree.context(node), torch.tensor(node.rows)])
            assert path.tolist() == rows.tolist()
            assert node.offset == len(path) - node.size
    for i, node in enumerate(tree.nodes):
        assert node.parent is None or node.parent < i
        assert node.is_parent == any(other.parent == i for other in tree.nodes)
        assert longest is None or node.offset // longest == (node.offset + node.size - 1) // longest
    prefixes = {tuple(text[:k]) for text in texts for k in range(1, len(text))}
    if min_shared == 1:
        assert len(tree.ids) == len(prefixes)
    if min_shared is None:
        assert len(tree.ids) == sum(len(text) - 1 for text in texts)
    waves = _waves(tree.nodes, 6)
    assert sorted(i for wave in waves for i in wave) == list(range(len(tree.nodes)))
    wave_of = {i: w for w, wave in enumerate(waves) for i in wave}
    assert all(node.parent is None or wave_of[node.parent] < wave_of[i] for i, node in enumerate(tree.nodes))
    assert all(len(wave) == 1 or sum(tree.nodes[i].size for i in wave) <= 6 for wave in waves)


def test_tokens_that_were_routed_otherwise_are_not_shared() -> None:
    text = [1, 2, 3, 4, 5]
    both = {0: make_sample(text, [0, 1, 2, 3, 4]), 1: make_sample(text, [0, 1, 9, 3, 4])}
    tree = build_tree(both, None, 1, keep_last=True)
    assert len(tree.ids) == 8
    assert tree.routes is not None
    assert [tree.routes[tree.rows[n]].flatten().tolist() for n in (0, 1)] == [[0, 1, 2, 3, 4], [0, 1, 9, 3, 4]]
    unknown = build_tree({**both, 2: make_sample(text)}, None, 1, keep_last=True)
    assert len(unknown.ids) == 13
    assert unknown.routes is not None
    assert unknown.routes[unknown.rows[2]].flatten().tolist() == [-1] * 5


def test_short_prefixes_are_computed_again_and_policies_that_cannot_chunk_get_whole_samples() -> None:
    trajectories, rewards = make_tree(0)
    batch = build_batch(trajectories, rewards)
    whole = plan_walk(batch, 50)
    assert whole.num_tokens == sum(len(batch.samples[n].ids) - 1 for n in whole.tree.rows)
    assert all(node.parent is None for node in whole.tree.nodes)
    cut = plan_walk(batch, 50, chunked=True)
    assert cut.num_tokens == whole.num_tokens  # nothing as long as MIN_SHARED in common
    assert max(node.size for node in cut.tree.nodes) <= 50 < max(node.size for node in whole.tree.nodes)


# --- numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", ["sft", "grpo", "ppo"])
def test_loss_and_gradients_are_those_of_whole_samples(family: str, preset: str) -> None:
    policy, objective = make_policy(FAMILIES[family]), resolve(ObjectiveConfig(preset=preset))
    with_value = objective.needs_value
    saved = 0
    for seed, (longest, limit) in enumerate(((None, 40), (16, 10_000), (23, 50))):
        batch = build_batch(*make_tree(seed))
        everything = sorted(batch.samples_to_compute(with_value=with_value))
        whole = whole_samples(batch, [everything], with_value=with_value)
        want_loss, want_batch, _ = compute_gradients(policy, objective, batch, whole)
        wanted = gradients(policy)
        walk = merged(batch, longest, 1, limit, with_value=with_value)
        saved += whole.num_tokens - walk.num_tokens
        assert any(node.parent is not None for node in walk.tree.nodes)
        loss, prepared, _ = compute_gradients(policy, objective, batch, walk)
        assert float(loss) == pytest.approx(float(want_loss), rel=1e-10)
        if want_batch.advantages is not None and prepared.advantages is not None:
            assert torch.allclose(prepared.advantages, want_batch.advantages, rtol=0, atol=1e-10)
        assert_equal(gradients(policy), wanted)
    assert saved > 150


def test_vectors_of_a_long_sample_in_pieces_are_those_of_the_whole() -> None:
    policy = make_policy(TINY)
    batch = build_batch(*make_tree(11, groups=1, samples=2))
    needed = sorted(batch.samples_to_compute(with_value=True))
    want = compute_vectors(policy, batch, whole_samples(batch, [needed], with_value=True))
    for longest in (1, 5, 16, 64):
        found = compute_vectors(policy, batch, merged(batch, longest, None, 64, with_value=True))
        for name in ("logprob", "entropy", "lse", "value", "tail_value"):
            a, b = getattr(found, name), getattr(want, name)
            assert torch.allclose(a, b, rtol=0, atol=1e-10, equal_nan=True), (longest, name)


def test_recorded_routes_are_replayed_in_every_piece() -> None:
    policy, objective = make_policy(TINY), resolve(ObjectiveConfig(preset="grpo"))
    trajectories, rewards = make_tree(5, groups=1)
    generator = np.random.default_rng(0)
    shape = (TINY.num_layers - TINY.num_dense_layers, TINY.experts_per_token)
    routed: dict[int, Segment] = {}  # what trajectories share was routed alike

    def with_routes(segment: Segment) -> Segment:
        chosen = generator.random((len(segment), shape[0], TINY.num_experts)).argsort(-1)[..., : shape[1]]
        return routed.setdefault(id(segment), dataclasses.replace(segment, routes=chosen.astype(np.uint16)))

    trajectories = [dataclasses.replace(t, segments=tuple(with_routes(s) for s in t.segments)) for t in trajectories]
    batch = build_batch(trajectories, rewards)
    everything = sorted(batch.samples_to_compute(with_value=False))
    compute_gradients(policy, objective, batch, whole_samples(batch, [everything]))
    wanted = gradients(policy)
    walk = merged(batch, 16, 1, 30, with_value=False)
    assert walk.num_tokens < sum(len(batch.samples[n].ids) - 1 for n in everything)
    compute_gradients(policy, objective, batch, walk)
    assert_equal(gradients(policy), wanted)

    def without(trajectory: Trajectory) -> Trajectory:
        segments = tuple(dataclasses.replace(s, routes=None) for s in trajectory.segments)
        return dataclasses.replace(trajectory, segments=segments)

    plain = build_batch([without(t) for t in trajectories], rewards)
    compute_gradients(policy, objective, plain, whole_samples(plain, [everything]))
    assert any(not torch.allclose(g, wanted[n]) for n, g in gradients(policy).items())


def test_a_balancer_counts_each_token_of_the_tree_once() -> None:
    policy, objective = make_policy(TINY), resolve(ObjectiveConfig(preset="sft"))
    batch = build_batch(*make_tree(2))
    walk = merged(batch, 16, 1, 40, with_value=False)
    balancer = QuantileBalancer(policy.moe_layers)
    for preset in ("sft", "grpo"):
        objective = resolve(ObjectiveConfig(preset=preset))
        with balancer.observe():
            compute_gradients(policy, objective, batch, walk)
        for counts in balancer.counts:
            assert counts is not None
            assert counts.sum(-1).tolist() == [walk.num_tokens] * TINY.num_experts
        balancer.forget()


class Held:
    """A tensor that a graph holds."""

    floats = most = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # with its graph, an output that the graph saves would keep itself
        Held.floats += tensor.numel()
        Held.most = max(Held.most, Held.floats)

    def __del__(self) -> None:
        Held.floats -= self.tensor.numel()


def test_a_long_sample_takes_the_memory_of_one_piece_and_its_context() -> None:
    policy, objective = make_policy(TINY).float(), resolve(ObjectiveConfig(preset="grpo"))
    peaks: dict[tuple[int, bool], int] = {}
    for size, chunked in ((192, True), (768, True), (768, False)):
        rng = random.Random(0)
        segments = (make_segment(rng, "prompt", 8, None), make_segment(rng, "action", size, 0))
        pair = [
            Trajectory(
                key=TrajectoryKey(ordinal=0, sample=sample),
                task=Task(environment="toy", split="train", index=0),
                segments=segments,
                outcome=Outcome(status="completed"),
            )
            for sample in range(2)
        ]
        batch = build_batch(pair, [np.array([0.0, 1.0]), np.zeros(2)])
        walk = plan_walk(batch, 64, chunked=chunked)
        Held.floats = Held.most = 0
        with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
            compute_gradients(policy, objective, batch, walk)
        peaks[size, chunked] = Held.most
        assert Held.floats == 0
    assert peaks[768, True] < 1.5 * peaks[192, True]
    assert peaks[768, True] < peaks[768, False] / 8
