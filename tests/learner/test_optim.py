"""Muon against a singular value decomposition, Adam against torch, and the schedule."""

import math

import pytest
import torch
from torch import nn

from k3rl.config import OptimizerConfig
from k3rl.learner.optim import Muon, build_optimizer, lr_factor, orthogonalise
from k3rl.testing.toy_policy import ToyPolicy


@pytest.mark.parametrize("shape", [(12, 12), (8, 24), (24, 8), (3, 8, 12)])
def test_newton_schulz_keeps_the_singular_vectors_and_flattens_the_values(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
    core = u.mT @ orthogonalise(matrices) @ vh.mT
    diagonal = core.diagonal(dim1=-2, dim2=-1)
    assert float((core - torch.diag_embed(diagonal)).abs().max()) < 1e-4
    resolved = s > 0.02 * s.norm(dim=-1, keepdim=True)
    assert bool(((diagonal > 0.6) & (diagonal < 1.2))[resolved].all())


def test_muon_cuts_a_projection_into_heads_and_takes_stacks_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(8, 6))
    stack = nn.Parameter(torch.zeros(2, 4, 6))
    gradient = torch.randn(8, 6, generator=generator)
    weight.grad, stack.grad = gradient.clone(), gradient.reshape(2, 4, 6).clone()
    group = {"params": [weight, stack], "algorithm": "muon", "blocks": [2, 1]}
    Muon([group], lr=0.1).step()
    want = torch.cat([orthogonalise(part) for part in gradient.chunk(2)]) * -0.1 * 0.2 * math.sqrt(6)
    assert torch.allclose(weight, want, atol=1e-6)
    assert torch.equal(weight.reshape(2, 4, 6), stack)


def test_the_adam_part_equals_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    muon = Muon([{"params": [ours], "algorithm": "adam"}], lr=0.1)
    adam = torch.optim.Adam([theirs], lr=0.1, betas=(0.9, 0.98))
    for _ in range(4):
        ours.grad = torch.randn(5, generator=generator)
        theirs.grad = ours.grad.clone()
        muon.step()
        adam.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_parameter_is_optimised_once_and_tables_go_to_adam(name: str) -> None:
    policy = ToyPolicy()
    optimizer = build_optimizer(policy, OptimizerConfig(name=name, weight_decay=0.1))  # type: ignore[arg-type]
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in policy.parameters())
    if name == "muon":
        matrices = {id(p) for g in optimizer.param_groups if g["algorithm"] == "muon" for p in g["params"]}
        assert matrices == {id(policy.cell.weight_ih_l0), id(policy.cell.weight_hh_l0)}


def test_the_rate_warms_up_then_decays_to_its_final_fraction() -> None:
    config = OptimizerConfig(warmup_steps=4, decay="linear", final_lr_frac=0.1)
    rates = [lr_factor(i, 11, config) for i in range(13)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[7] == pytest.approx(0.55)
    assert rates[10:] == pytest.approx([0.1] * 3)
    cosine = OptimizerConfig(warmup_steps=0, decay="cosine", final_lr_frac=0.0)
    assert [lr_factor(i, 3, cosine) for i in range(3)] == pytest.approx([1.0, 0.5, 0.0])
    assert lr_factor(99, 3, OptimizerConfig(warmup_steps=0, decay="none")) == 1.0
