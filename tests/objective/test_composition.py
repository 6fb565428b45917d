"""The objective is what its rows say: sequence-level ratios, rows that are new, and what a row declares of itself."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from k3rl.config import ObjectiveConfig
from k3rl.objective import PRESETS, Objective, ObjectiveBatch, TokenVectors, build_batch, resolve
from k3rl.objective.correction import CORRECTIONS, Weights
from k3rl.objective.piece import Piece
from k3rl.objective.ratio import LOG_RATIO_CAP, capped_exp, sequence_ratio
from k3rl.trajectory import Outcome, Segment, Task, Trajectory, TrajectoryKey

GSPO = PRESETS["gspo"]


def make_trajectory(rollout_logprobs: list[float], *, sample: int = 0, observed: int = 0) -> Trajectory:
    """One turn of these log-probabilities, then so many observed tokens."""
    size = len(rollout_logprobs)
    action = Segment(
        kind="action",
        token_ids=np.zeros(size, dtype=np.int32),
        context=0,
        rollout_logprobs=np.asarray(rollout_logprobs, dtype=np.float32),
        version_index=np.zeros(size, dtype=np.int32),
    )
    segments = [Segment(kind="prompt", token_ids=np.zeros(1, dtype=np.int32)), action]
    if observed:
        segments.append(Segment(kind="observation", token_ids=np.zeros(observed, dtype=np.int32), context=1))
    return Trajectory(
        key=TrajectoryKey(ordinal=0, sample=sample),
        task=Task(environment="toy", split="train", index=0),
        segments=tuple(segments),
        outcome=Outcome(status="completed"),
    )


def vectors_at(logprob: torch.Tensor) -> TokenVectors:
    zeros = torch.zeros_like(logprob)
    return TokenVectors(logprob, zeros, zeros, zeros, torch.zeros(len(logprob)))


def gradient(objective: Objective, batch: ObjectiveBatch, logprob: torch.Tensor) -> torch.Tensor:
    """Of the loss with respect to the log-probabilities, [T]."""
    leaf = logprob.clone().requires_grad_()
    loss, _ = objective.loss(vectors_at(leaf), batch)
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad


def test_e_gradient_of_gspo_with_advantages_of_both_signs_in_one_sample() -> None:
    objective = resolve(ObjectiveConfig(preset="gspo", clip_low=0.2, clip_high=0.2))
    batch = objective.prepare(build_batch([make_trajectory([0.0] * 6)], [np.zeros(2)]))
    batch = dataclasses.replace(batch, advantages=torch.tensor([1.0, -1, 1, -1, -1, 1]))
    found = gradient(objective, batch, torch.tensor([1.5, 1.5, 0.5, 0.5, 5, 5]).log())
    assert found.tolist() == pytest.approx([0, 0.2589, 0, 0.2589, 0.2589, 0], abs=1e-4)


def test_the_sequence_ratio_is_the_geometric_mean_over_what_a_sample_trains() -> None:
    batch = build_batch(
        [make_trajectory([0.0] * 2, observed=3), make_trajectory([-1.0] * 3)], [np.zeros(3), np.zeros(2)]
    )
    logprob = torch.tensor([0.1, 0.3, math.nan, 7.0, 7.0, -1.0, -1.3, -1.6])
    ratio = sequence_ratio(logprob, batch, GSPO).exp()
    assert ratio[batch.action_mask].tolist() == pytest.approx([math.exp(0.2)] * 2 + [math.exp(-0.3)] * 3)
    assert ratio.isfinite().all()
    far = capped_exp(sequence_ratio(torch.full((8,), 1e4), batch, GSPO))
    assert far[batch.action_mask].tolist() == pytest.approx([math.exp(LOG_RATIO_CAP)] * 5)


def test_with_one_advantage_a_sample_gspo_has_the_gradient_of_the_geometric_mean_itself() -> None:
    objective = resolve(ObjectiveConfig(preset="gspo", clip_low=0.2, clip_high=0.3))
    rollout = [[-1.0, -2.0], [-0.5, -1.5, -2.5], [-1.0], [-3.0, -1.0]]
    trajectories = [make_trajectory(row, sample=i) for i, row in enumerate(rollout)]
    batch = objective.prepare(build_batch(trajectories, [np.array([0.0, r]) for r in (1.0, 0.0, 2.0, 0.5)]))
    logprob = batch.rollout_logprobs + torch.tensor([0.3, -0.1, 0.2, 0.1, -0.2, 0.9, -0.6, -0.2])
    found = gradient(objective, batch, logprob)

    assert batch.advantages is not None
    leaf = logprob.clone().requires_grad_()
    losses = []
    for sample in batch.samples:
        s = (leaf - batch.rollout_logprobs)[sample.targets].mean().exp()
        a = batch.advantages[sample.start].float()
        losses.append(torch.maximum(-s * a, -s.clamp(0.8, 1.3) * a))
    torch.stack(losses).mean().backward()
    assert leaf.grad is not None
    assert (leaf.grad != 0).tolist() == [True] * 5 + [False] * 3  # the third is clipped above, the fourth below
    assert torch.allclose(found, leaf.grad, atol=1e-7)


def test_gspo_reports_the_clip_of_the_sequence_ratio_and_the_gap_of_each_token() -> None:
    batch = GSPO.prepare(build_batch([make_trajectory([0.0] * 2), make_trajectory([0.0] * 2)], [np.zeros(2)] * 2))
    batch = dataclasses.replace(batch, advantages=torch.ones(4))
    _, metrics = GSPO.loss(vectors_at(torch.tensor([0.5, -0.5, 0.5, -0.4])), batch)
    assert metrics["train/ratio_clipped_frac"] == 0.5
    assert metrics["train/logprob_gap_max"] == pytest.approx(0.5)


def test_a_row_that_is_new_to_its_table_needs_nothing_of_the_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of two; what is new has a key, a need and a text, and the objective asks the row for each."""

    def doubled(batch: ObjectiveBatch, objective: Objective) -> Weights:
        weights = torch.full((batch.num_tokens,), 2.0, dtype=torch.float64)
        return Weights(weights.clamp(max=1 + objective.clip_high), weights)

    row = Piece(compute=doubled, text=lambda o: f"min(2, {1 + o.clip_high:g}) * ", keys=("clip_high",))
    monkeypatch.setitem(CORRECTIONS, "doubled", row)
    plain = Objective(preset="new", advantage="one", ratio="likelihood", trust_region="score")
    objective = dataclasses.replace(plain, correction="doubled", clip_high=0.5)
    assert (plain.is_linear, objective.is_linear) == (True, False)
    assert set(objective.keys) - set(plain.keys) == {"clip_high"}
    assert "  policy  min(2, 1.5) * -log(r) A, r = p" in objective.formula()
    batch = objective.prepare(build_batch([make_trajectory([0.0] * 4)], [np.zeros(2)]))
    assert gradient(objective, batch, torch.zeros(4)).tolist() == pytest.approx([-1.5 / 4] * 4)
    metrics = objective.loss(vectors_at(torch.zeros(4)), batch)[1]
    assert (metrics["train/correction"], metrics["train/correction_raw"]) == (1.5, 2.0)


def with_every_term(name: str) -> Objective:
    preset = PRESETS[name]
    coefficients = ("entropy_coef", "kl_coef", "reward_kl_coef", "drift_coef")
    return dataclasses.replace(preset, horizon=8, **{key: 0.1 for key in coefficients if key in preset.keys})


def prepare_random(objective: Objective) -> tuple[ObjectiveBatch, torch.Tensor]:
    """A batch of one group, and log-probabilities near those of the rollout."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand((4, 3), generator=generator) - 1
    trajectories = [make_trajectory(row.tolist(), sample=i) for i, row in enumerate(rollout)]
    batch = build_batch(trajectories, [np.array([0.0, i]) for i in range(4)])
    logprob = batch.rollout_logprobs + 0.1 * torch.randn(12, generator=generator)
    batch = dataclasses.replace(batch, reference_logprobs=batch.rollout_logprobs)
    return objective.prepare(batch, vectors_at(logprob)), logprob


@pytest.mark.parametrize("name", PRESETS)
def test_an_objective_that_calls_itself_linear_has_the_same_gradient_everywhere(name: str) -> None:
    objective = with_every_term(name)
    batch, logprob = prepare_random(objective)
    here, there = gradient(objective, batch, logprob), gradient(objective, batch, torch.zeros(12))
    assert torch.equal(here, there) == objective.is_linear


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_reads_no_key_but_those_that_its_rows_declare(name: str) -> None:
    seen: set[str] = set()

    class Recorder(Objective):
        def __getattribute__(self, attribute: str) -> object:
            seen.add(attribute)
            return super().__getattribute__(attribute)

    objective = with_every_term(name)
    recorder = Recorder(**{f.name: getattr(objective, f.name) for f in dataclasses.fields(objective)})
    batch, logprob = prepare_random(recorder)
    recorder.loss(vectors_at(logprob), batch)
    recorder.formula()
    keys = {f.name for f in dataclasses.fields(ObjectiveConfig)} - {"preset"}
    assert seen & keys | {"epochs"} == set(objective.keys)
