"""The update as a whole, on a toy policy."""

import dataclasses
import itertools
import json
import random

import numpy as np
import pytest
import torch

from k3rl.config import LearnerConfig, ObjectiveConfig, OptimizerConfig
from k3rl.errors import ConfigError, TrainingError
from k3rl.learner.forward import compute_gradients, compute_vectors, pack
from k3rl.learner.token_tree import build_tree, plan_walk, whole_samples
from k3rl.learner.update import Learner
from k3rl.model.batch import PolicyCapabilities, TokenBatch
from k3rl.objective import PRESETS, TokenVectors, build_batch, resolve
from k3rl.objective.normaliser import NORMALISERS
from k3rl.testing.toy_policy import ToyPolicy
from k3rl.trajectory import NO_ROUTE, Outcome, Segment, Task, Trajectory, TrajectoryKey
from k3rl.weights.base import weights_digest

TASK = Task(environment="toy", split="train", index=0)
VOCABULARY = 11


def make_trajectory(rng: np.random.Generator, index: int, turns: int | None = None) -> Trajectory:
    """A linear trajectory of prompt, actions and observations; every fourth one is truncated."""
    segments = [Segment(kind="prompt", token_ids=rng.integers(0, VOCABULARY, rng.integers(1, 4), dtype=np.int32))]
    for _ in range(turns or int(rng.integers(1, 4))):
        for kind in ("action", "observation"):
            size = int(rng.integers(1, 6))
            at = len(segments) - 1
            extra = {}
            if kind == "action":
                behaviour = rng.normal(-2.4, 0.2, size).astype(np.float32)
                extra = {"rollout_logprobs": behaviour, "version_index": np.zeros(size, dtype=np.int32)}
            ids = rng.integers(0, VOCABULARY, size, dtype=np.int32)
            segments.append(Segment(kind=kind, token_ids=ids, context=at, follows=at, **extra))  # type: ignore[arg-type]
    outcome = Outcome(status="truncated", limit="max_turns") if index % 4 == 3 else Outcome(status="completed")
    key = TrajectoryKey(ordinal=index // 4, sample=index % 4)
    return Trajectory(key=key, task=TASK, segments=tuple(segments), outcome=outcome)


def make_batch(count: int = 16, seed: int = 0) -> tuple[list[Trajectory], list[np.ndarray | None]]:
    rng = np.random.default_rng(seed)
    trajectories = [make_trajectory(rng, i) for i in range(count)]
    return trajectories, [rng.integers(0, 3, len(t.segments)).astype(np.float64) for t in trajectories]


def make_learner(policy: ToyPolicy | None = None, *, preset: str = "grpo", **kwargs: object) -> Learner:
    optimizer = OptimizerConfig(**{"lr": 1e-2, "warmup_steps": 2, **kwargs})  # type: ignore[arg-type]
    config = LearnerConfig(optimizer=optimizer, micro_batch_tokens=40)
    return Learner(policy or ToyPolicy(), resolve(ObjectiveConfig(preset=preset)), config, total_steps=20)


def flat_gradient(policy: ToyPolicy) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def random_plan(rng: random.Random, indices: list[int]) -> list[list[int]]:
    """Samples dealt to ranks and micro-batches; a part that got none is left out, sample 5 may be alone in one."""
    parts: list[list[int]] = [[] for _ in range(rng.choice([1, 2, 4]) * rng.choice([1, 2, 8]))]
    for n in rng.sample(indices, len(indices)):
        rng.choice(parts).append(n)
    return [part for part in parts if part]


DECOUPLED = {"anchor": "initial", "correction": "token", "truncate_high": 1.1}
OBJECTIVES: dict[str, dict[str, object]] = {
    **{f"{name} over {unit}": {"preset": name, "normaliser": unit} for name in PRESETS for unit in NORMALISERS},
    "turn ratio": {"ratio": "turn", "trust_region": "dual_clip"},
    "dppo": {"trust_region": "dppo", "divergence": 0.01},
    "decoupled": DECOUPLED,
    "decoupled, of sequences": {**DECOUPLED, "correction": "sequence", "rejection": "sequence"},
    "icepop": {"anchor": "initial", "correction": "icepop", "keep_low": 0.9, "keep_high": 1.1, "count_rejected": False},
    "whitened": {"advantage": "group_whitened", "baseline": "leave_one_out"},
    "by path": {"preset": "gigpo", "same_state": "path", "spread": "batch"},
    "kl of the loss": {"kl": "k3_ratio", "kl_coef": 0.1},
    "kl of the reward": {"preset": "ppo", "reward_kl_coef": 0.1, "advantage": "gae_token"},
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_b06_loss_and_gradient_do_not_depend_on_the_split(name: str) -> None:
    objective = resolve(ObjectiveConfig(**OBJECTIVES[name]), horizon=32)  # type: ignore[arg-type]
    if "entropy" in objective.terms:
        objective = dataclasses.replace(objective, entropy_coef=0.01)
    trajectories, rewards = make_batch()
    rewards[5] = None  # nothing of it is trained: alone in a part it takes part and adds 0
    batch = build_batch(trajectories, rewards)
    policy = ToyPolicy()
    with_value = objective.needs_value
    teacher = compute_vectors(ToyPolicy(seed=1), batch, plan_walk(batch, 100)).logprob
    batch = dataclasses.replace(batch, reference_logprobs=teacher)

    # the truth: one graph over everything, no surrogate
    indices = list(range(len(batch.samples)))
    packed = TokenBatch.pack([s.ids for s in batch.samples])
    hidden = policy(packed).hidden
    rows = torch.cat([torch.arange(a, b - 1) for a, b in itertools.pairwise(packed.cu_seqlens.tolist())])
    head = policy.token_logprobs(hidden[rows], torch.cat([s.ids[1:] for s in batch.samples]), 1.0)
    values = policy.values(hidden)
    truth = TokenVectors(head.logprob, head.entropy, head.lse, values[rows], values[packed.cu_seqlens[1:] - 1].detach())
    prepared = objective.prepare(
        batch, compute_vectors(policy, batch, whole_samples(batch, [indices], with_value=with_value))
    )
    want_loss, _ = objective.loss(truth, prepared)
    want_loss.backward()
    want = flat_gradient(policy)

    rng = random.Random(name)
    for trial in range(3):  # of each of a hundred objectives
        policy.zero_grad()
        walk = whole_samples(batch, random_plan(rng, indices), with_value=with_value)
        if not trial:
            walk = plan_walk(batch, 40, with_value=with_value)
        loss, _, _ = compute_gradients(policy, objective, batch, walk)
        assert float(loss.detach()) == pytest.approx(float(want_loss.detach()), rel=1e-6, abs=1e-7)
        assert float((flat_gradient(policy) - want).norm() / want.norm()) < 1e-6


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "sft"])
def test_the_order_of_the_trajectories_changes_neither_loss_nor_gradient(preset: str) -> None:
    objective = resolve(ObjectiveConfig(preset=preset), horizon=32)
    trajectories, rewards = make_batch()
    teacher, found = ToyPolicy(seed=1), []
    for order in (list(range(16)), random.Random(preset).sample(range(16), 16)):
        policy = ToyPolicy()
        batch = build_batch([trajectories[i] for i in order], [rewards[i] for i in order])
        logprobs = compute_vectors(teacher, batch, plan_walk(batch, 100)).logprob
        batch = dataclasses.replace(batch, reference_logprobs=logprobs)
        walk = plan_walk(batch, 40, with_value=objective.needs_value)
        loss, _, _ = compute_gradients(policy, objective, batch, walk)
        found.append((float(loss), flat_gradient(policy)))
    (one, want), (other, shuffled) = found
    assert other == pytest.approx(one, rel=1e-6, abs=1e-7)
    assert float((shuffled - want).norm() / want.norm()) < 1e-6


def test_each_trajectory_learns_from_the_teacher_of_its_environment() -> None:
    trajectories, rewards = make_batch(8)
    shop = dataclasses.replace(TASK, environment="shop")
    mixed = [dataclasses.replace(t, task=shop) if i % 3 else t for i, t in enumerate(trajectories)]
    teachers = {"toy": ToyPolicy(seed=1), "shop": ToyPolicy(seed=2)}
    opd, config = resolve(ObjectiveConfig(preset="opd")), LearnerConfig(micro_batch_tokens=40)
    learner = Learner(ToyPolicy(), opd, config, total_steps=5, reference=teachers)
    batch = build_batch(mixed, rewards)
    alone = [compute_vectors(teacher, batch, plan_walk(batch, 100)).logprob for teacher in teachers.values()]
    is_shop = torch.tensor([t.task.environment == "shop" for t in mixed])[batch.trajectory]
    want = torch.where(is_shop, alone[1], alone[0])
    assert torch.allclose(learner.score_by_reference(batch, mixed), want, atol=1e-6)
    assert learner.update(mixed, rewards)["train/advantage_abs"] > 0
    with pytest.raises(TrainingError, match="'lab'; there are: shop, toy"):
        learner.update([dataclasses.replace(mixed[0], task=dataclasses.replace(TASK, environment="lab"))], rewards[:1])


def test_a_student_comes_nearer_to_its_teacher_on_what_it_samples() -> None:
    student, teacher = ToyPolicy(), ToyPolicy(seed=1)
    config = LearnerConfig(optimizer=OptimizerConfig(lr=3e-2, warmup_steps=0), micro_batch_tokens=200)
    learner = Learner(student, resolve(ObjectiveConfig(preset="opd")), config, total_steps=20, reference=teacher)
    prompts = [np.array([i], dtype=np.int32) for i in range(VOCABULARY)]

    def next_logprobs(policy: ToyPolicy) -> torch.Tensor:
        packed = TokenBatch.pack([torch.tensor([i]) for i in range(VOCABULARY)])
        return policy.lm_head(policy(packed).hidden).detach().log_softmax(-1)

    def distance() -> float:
        mine, theirs = next_logprobs(student), next_logprobs(teacher)
        return float((mine.exp() * (mine - theirs)).sum(-1).mean())

    def sample(prompt: int, token: int, logprob: float) -> Trajectory:
        behaviour, version = np.array([logprob], dtype=np.float32), np.zeros(1, dtype=np.int32)
        ids, known = np.array([token], dtype=np.int32), {"rollout_logprobs": behaviour, "version_index": version}
        segments = (
            Segment(kind="prompt", token_ids=prompts[prompt]),
            Segment(kind="action", token_ids=ids, context=0, **known),
        )
        key = TrajectoryKey(ordinal=prompt, sample=0)
        return Trajectory(key=key, task=TASK, segments=segments, outcome=Outcome(status="completed"))

    before, generator = distance(), torch.Generator().manual_seed(0)
    for _ in range(20):
        logprobs = next_logprobs(student)
        drawn = torch.multinomial(logprobs.exp(), 4, replacement=True, generator=generator).tolist()
        batch = [sample(i, token, float(logprobs[i, token])) for i, row in enumerate(drawn) for token in row]
        learner.update(batch, [np.zeros(2)] * len(batch))
    assert distance() < 0.5 * before


def test_a_plan_splits_no_sample_and_leaves_out_what_is_not_trained() -> None:
    trajectories, rewards = make_batch()
    rewards[3] = None
    batch = build_batch(trajectories, rewards)
    plan = plan_walk(batch, 25).samples
    assert sorted(n for part in plan for n in part) == [n for n in range(16) if n != 3]
    assert all(len(part) == 1 or sum(batch.samples[n].num_targets for n in part) <= 25 for part in plan)


def test_b07_an_empty_update_changes_nothing_and_leaves_zero_gradients() -> None:
    learner = make_learner()
    trajectories, _ = make_batch(4)
    before = weights_digest(learner.policy.state_dict())
    metrics = learner.update(trajectories, [None] * 4)
    assert metrics["train/empty_updates"] == 1
    assert weights_digest(learner.policy.state_dict()) == before
    assert all(p.grad is not None and not p.grad.any() for _, p in learner.policy.named_parameters())
    assert learner.step == 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_b33_a_gradient_that_is_not_finite_changes_nothing_and_three_in_a_row_stop(name: str, poison: float) -> None:
    learner = make_learner(name=name)
    trajectories, rewards = make_batch(8)
    learner.update(trajectories, rewards)
    tensors, _ = learner.state_dict()
    before = weights_digest(learner.policy.state_dict())
    parameter = dict(learner.policy.named_parameters())["lm_head.weight"]
    one_entry = torch.zeros_like(parameter)
    one_entry[0, 0] = poison
    hook = parameter.register_hook(lambda gradient: gradient + one_entry)
    for i in range(3):
        if i < 2:
            assert learner.update(trajectories, rewards)["train/skipped_updates"] == 1
        else:
            with pytest.raises(TrainingError, match="3 updates in a row"):
                learner.update(trajectories, rewards)
        assert weights_digest(learner.policy.state_dict()) == before
        assert (learner.step, learner.skipped) == (1, i + 1)
    assert all(torch.equal(tensors[k], v) for k, v in learner.state_dict()[0].items())
    hook.remove()
    learner.update(trajectories, rewards)
    assert (learner.step, learner.skipped_in_a_row) == (2, 0)


@pytest.mark.parametrize(("temperature", "logprob", "entropy"), [(1.0, -0.126928, 0.365334), (0.5, -0.01815, 0.090095)])
def test_b34_the_temperature_scales_logprob_and_entropy_alike_and_never_the_value(
    temperature: float, logprob: float, entropy: float
) -> None:
    policy = ToyPolicy(vocab_size=2, hidden_size=2)
    with torch.no_grad():
        policy.lm_head.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    policy.cell.forward = lambda part: (torch.tensor([[2.0, 0.0]]).expand(len(part), 2), None)  # type: ignore[assignment]
    action = Segment(
        kind="action",
        token_ids=np.zeros(1, dtype=np.int32),
        context=0,
        rollout_logprobs=np.zeros(1, dtype=np.float32),
        version_index=np.zeros(1, dtype=np.int32),
    )
    prompt = Segment(kind="prompt", token_ids=np.zeros(1, dtype=np.int32))
    base = make_trajectory(np.random.default_rng(0), 0)
    one = dataclasses.replace(base, segments=(prompt, action), temperature=temperature)
    batch = build_batch([one], [np.zeros(2)])
    vectors = compute_vectors(policy, batch, plan_walk(batch, 100, with_value=True))
    assert float(vectors.logprob[0]) == pytest.approx(logprob, abs=1e-6)
    assert float(vectors.entropy[0]) == pytest.approx(entropy, abs=1e-6)
    want = policy.values(torch.tensor([[2.0, 0.0]])).detach()
    assert vectors.value is not None
    assert torch.allclose(vectors.value, want)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_b34_the_reference_is_scored_at_the_temperature_that_sampled(temperature: float) -> None:
    trajectories, rewards = make_batch(8)
    sampled = [dataclasses.replace(t, temperature=temperature) for t in trajectories]
    objective = resolve(ObjectiveConfig(preset="grpo", kl_coef=0.1))
    config = LearnerConfig(micro_batch_tokens=40)
    learner = Learner(ToyPolicy(), objective, config, total_steps=5, reference=ToyPolicy())
    assert learner.update(sampled, rewards)["train/reference_kl"] == pytest.approx(0.0, abs=1e-9)


def test_b34_a_batch_sampled_at_two_temperatures_is_refused() -> None:
    trajectories, rewards = make_batch(2)
    with pytest.raises(ValueError, match=r"one temperature, got \[0\.5, 1\.0\]"):
        build_batch([trajectories[0], dataclasses.replace(trajectories[1], temperature=0.5)], rewards)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_grpo_update_raises_the_logprob_of_the_better_sample(name: str) -> None:
    learner = make_learner(name=name)
    rng = np.random.default_rng(1)
    trajectories = [make_trajectory(rng, i, turns=1) for i in range(2)]
    batch = build_batch(trajectories, [np.zeros(3)] * 2)
    walk = plan_walk(batch, 100)
    before = compute_vectors(learner.policy, batch, walk).logprob
    behaviour = [
        dataclasses.replace(
            t,
            segments=tuple(
                dataclasses.replace(s, rollout_logprobs=before[r[0] : r[1]].numpy()) if s.kind == "action" else s
                for s in t.segments
            ),
        )
        for t, r in zip(trajectories, batch.turn_ranges.tolist(), strict=True)
    ]
    metrics = learner.update(behaviour, [np.array([0.0, 1.0, 0.0]), np.zeros(3)])
    assert metrics["train/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["train/logprob_gap_max"] < 1e-6
    after = compute_vectors(learner.policy, batch, walk).logprob
    (a, b), (c, d) = batch.turn_ranges.tolist()
    assert float((after - before)[a:b].sum()) > 0
    assert float((after - before)[c:d].sum()) < 0


def test_sft_lowers_the_loss_of_the_demonstrations_and_ppo_that_of_its_critic() -> None:
    learner = make_learner(preset="sft")
    trajectories, rewards = make_batch(8)
    losses = [learner.update(trajectories, rewards)["train/loss"] for _ in range(12)]
    assert losses[-1] < losses[0] - 0.1
    critic = make_learner(preset="ppo", name="adamw")
    values = [critic.update(trajectories, rewards)["train/value_loss"] for _ in range(12)]
    assert values[-1] < values[0]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_resumed_learner_takes_the_bitwise_identical_next_step(name: str) -> None:
    trajectories, rewards = make_batch(8)
    first = make_learner(preset="ppo", name=name)
    for _ in range(3):
        first.update(trajectories, rewards)
    tensors, counters = first.state_dict()
    weights = {k: v.clone() for k, v in first.policy.state_dict().items()}
    second = make_learner(ToyPolicy(seed=9), preset="ppo", name=name)
    second.policy.load_state_dict(weights)
    second.load_state_dict(tensors, json.loads(json.dumps(counters)))
    assert weights_digest(first.policy.state_dict()) == weights_digest(second.policy.state_dict())
    for learner in (first, second):
        learner.update(trajectories, rewards)
    assert weights_digest(first.policy.state_dict()) == weights_digest(second.policy.state_dict())
    assert weights_digest(weights) != weights_digest(first.policy.state_dict())


def test_recorded_routes_are_replayed_and_unknown_ones_are_left_to_the_policy() -> None:
    base = make_trajectory(np.random.default_rng(0), 0, turns=1)
    routed = []
    for i, part in enumerate(base.segments):
        routes = np.full((len(part), 2, 1), i, dtype=np.uint16)
        routed.append(dataclasses.replace(part, routes=routes))
    routed[1].routes[-1] = NO_ROUTE  # type: ignore[index]
    both = [dataclasses.replace(base, segments=tuple(routed)), base]
    batch = build_batch(both, [np.zeros(3)] * 2)
    policy = ToyPolicy()
    tree = build_tree(dict(enumerate(batch.samples)), None, None, keep_last=False)
    assert pack(policy, tree, tree.nodes).routes is None
    policy.capabilities = PolicyCapabilities(chunk=False, routes=True, value=True)
    packed = pack(policy, tree, tree.nodes)
    assert packed.routes is not None
    prompt, action, observation = (len(s) for s in base.segments)
    want = [0] * prompt + [1] * (action - 1) + [-1] + [2] * (observation - 1)
    assert packed.routes[:, 0, 0].tolist() == want + [-1] * (base.num_tokens - 1)


def test_a_policy_without_a_value_head_is_refused_for_ppo() -> None:
    policy = ToyPolicy()
    policy.capabilities = PolicyCapabilities(chunk=False, routes=False, value=False)
    with pytest.raises(ConfigError, match="value_head"):
        make_learner(policy, preset="ppo")


def test_a_digest_sees_every_bit_and_the_dtype() -> None:
    weights = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.tensor(1)}
    digest = weights_digest(weights)
    assert digest == weights_digest(dict(reversed(weights.items())))
    assert digest != weights_digest({**weights, "a": -weights["a"]})
    assert digest != weights_digest({**weights, "a": weights["a"].half()})


def test_later_epochs_keep_the_advantages_and_do_not_touch_the_gap() -> None:
    trajectories, rewards = make_batch(8)
    gaps = []
    for epochs in (1, 3):
        objective = resolve(ObjectiveConfig(preset="ppo", epochs=epochs))
        learner = Learner(ToyPolicy(), objective, LearnerConfig(micro_batch_tokens=40), total_steps=5)
        gaps.append(learner.update(trajectories, rewards)["train/logprob_gap_max"])
        assert learner.step == epochs
    assert gaps[0] == gaps[1]
