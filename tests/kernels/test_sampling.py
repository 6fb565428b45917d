"""Sampling picks what the distribution says, and records the probability of what it picked."""

from __future__ import annotations

import pytest
import torch

from k3rl.kernels.linear_logprob import linear_logprob
from k3rl.kernels.sampling import sample_tokens


def draw(logits: list[float], uniforms: torch.Tensor, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample from given logits: the head is a column of logits and every hidden state is 1."""
    n = len(uniforms)
    return sample_tokens(torch.ones(n, 1), torch.tensor(logits)[:, None], uniforms, torch.full((n,), temperature))


@pytest.mark.parametrize(("temperature", "logprob"), [(1.0, -0.126928), (0.5, -0.018150)])
def test_b34_the_recorded_logprob_is_of_the_scaled_distribution(temperature: float, logprob: float) -> None:
    ids, logprobs = draw([2.0, 0.0], torch.zeros(1, dtype=torch.float64), temperature)
    assert ids.tolist() == [0]
    assert logprobs.item() == pytest.approx(logprob, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_frequencies_over_a_grid_of_uniforms_are_the_probabilities(temperature: float) -> None:
    logits = torch.tensor([1.0, -2.0, 0.3, 0.0, 2.5])
    n = 100_000
    uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    ids, _ = draw(logits.tolist(), uniforms, temperature)
    share = torch.bincount(ids, minlength=5) / n
    torch.testing.assert_close(share.float(), torch.softmax(logits / temperature, 0), atol=2e-5, rtol=0)


def test_the_largest_uniform_does_not_fall_off_the_end_nor_pick_an_impossible_token() -> None:
    last = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert draw([0.0, 1.0, -1.0], last)[0].item() == 2
    assert draw([0.0, 1.0, -torch.inf], last)[0].item() == 1
    assert draw([-torch.inf, 1.0, 0.0], torch.zeros(1, dtype=torch.float64))[0].item() == 1


def test_temperature_zero_is_greedy_with_the_lowest_id_among_equals() -> None:
    ids, logprobs = draw([0.0, 3.0, 3.0], torch.tensor([0.99], dtype=torch.float64), 0.0)
    assert ids.item() == 1
    assert logprobs.item() == pytest.approx(torch.log_softmax(torch.tensor([0.0, 3.0, 3.0]), 0)[1].item(), abs=1e-6)


def test_a_row_is_sampled_alike_alone_and_in_a_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(33, 16, generator=generator), torch.randn(50, 16, generator=generator)
    uniforms = torch.rand(33, generator=generator, dtype=torch.float64)
    temperature = torch.rand(33, generator=generator) + 0.5
    ids, _ = sample_tokens(hidden, weight, uniforms, temperature)
    alone = [
        sample_tokens(hidden[i : i + 1], weight, uniforms[i : i + 1], temperature[i : i + 1])[0].item()
        for i in range(33)
    ]
    assert ids.tolist() == alone


def test_sampler_and_learner_score_alike_in_bfloat16_too() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 1024, generator=generator).bfloat16()
    weight = (torch.randn(4096, 1024, generator=generator) / 32).bfloat16()
    uniforms = torch.rand(8, generator=generator, dtype=torch.float64)
    ids, logprobs = sample_tokens(hidden, weight, uniforms, torch.full((8,), 0.7))
    assert (linear_logprob(hidden, weight, ids, 0.7)[0] - logprobs).abs().max() <= 1e-6
