"""Training with experts in MXFP4: what is sampled, trained and exported is one function."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3rl.config import ModelConfig, load_model_config
from k3rl.errors import ConfigError
from k3rl.kernels.moe import apply_experts
from k3rl.kernels.situ import swiglu
from k3rl.model.batch import TokenBatch
from k3rl.model.moe import EXPERT_WEIGHTS, Experts
from k3rl.model.mxfp4 import BLOCK, pack_mxfp4, round_mxfp4, unpack_mxfp4
from k3rl.model.pretrained import convert, from_pretrained, save_pretrained
from k3rl.model.transformer import K3Model

K3 = dataclasses.replace(
    load_model_config(Path(__file__).parents[2] / "configs/model/k3_tiny.yaml"), expert_format="mxfp4"
)
LINEAR = dataclasses.replace(
    K3,
    kda_gate_bound=None,
    kda_output_gate_rank=32,
    q_lora_rank=None,
    mla_output_gate=False,
    latent_dim=None,
    attn_res_block=None,
    activation="swiglu",
)
FAMILIES = pytest.mark.parametrize("config", [K3, LINEAR], ids=["k3", "linear"])
IDS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1))


def _logits(model: K3Model) -> torch.Tensor:
    return model.lm_head(model(TokenBatch.pack([IDS])).hidden)


def _as_plain(model: K3Model) -> K3Model:
    """The same function without quantised training: its experts are unpacked from what ``model``'s pack to."""
    plain = K3Model(dataclasses.replace(model.config, expert_format="plain"))
    plain.load_state_dict(
        {
            name: unpack_mxfp4(*pack_mxfp4(t), torch.float32) if name.endswith(EXPERT_WEIGHTS) else t
            for name, t in model.state_dict().items()
        }
    )
    return plain


@given(st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(-130, 120))
def test_rounding_is_packing_and_unpacking_and_rounds_no_further(seed: int, dtype: torch.dtype, log_size: int) -> None:
    weight = torch.randn(3, 2 * BLOCK, generator=torch.Generator().manual_seed(seed)).ldexp(torch.tensor(log_size))
    weight = weight.to(dtype)
    rounded = round_mxfp4(weight)
    assert rounded.dtype == dtype
    assert torch.equal(rounded, unpack_mxfp4(*pack_mxfp4(weight), dtype))
    assert torch.equal(round_mxfp4(rounded), rounded)


@FAMILIES
def test_the_forward_is_that_of_the_exported_model(config: ModelConfig, tmp_path: Path) -> None:
    model = K3Model(config, seed=3)
    assert not torch.equal(_logits(model), _logits(K3Model(dataclasses.replace(config, expert_format="plain"), seed=3)))
    save_pretrained(model, tmp_path / "packed")
    save_pretrained(model, tmp_path / "plain", experts="plain")
    for name in ("packed", "plain"):
        loaded = from_pretrained(tmp_path / name)
        assert loaded.config == config
        assert torch.equal(_logits(loaded), _logits(model))
        # Who knows nothing of the training reads the same.
        path = tmp_path / name / "config.json"
        values = json.loads(path.read_text())
        assert ("quantization_config" in values) == (name == "packed")
        del values["k3rl"]["expert_format"]
        path.write_text(json.dumps(values))
        foreign = from_pretrained(tmp_path / name)
        assert foreign.config.expert_format == "plain"
        assert torch.equal(_logits(foreign), _logits(model))


def test_converting_what_was_exported_changes_no_value(tmp_path: Path) -> None:
    save_pretrained(K3Model(K3, seed=3), tmp_path / "plain", experts="plain")
    convert(tmp_path / "plain", tmp_path / "packed", experts="mxfp4")
    convert(tmp_path / "packed", tmp_path / "again", experts="plain")
    expected = from_pretrained(tmp_path / "plain").state_dict()
    for name in ("packed", "again"):
        found = from_pretrained(tmp_path / name).state_dict()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@FAMILIES
def test_gradients_are_those_at_the_rounded_weights_passed_straight_through(config: ModelConfig) -> None:
    model = K3Model(config, seed=3)
    plain = _as_plain(model)
    for each in (model, plain):
        each.token_logprobs(each(TokenBatch.pack([IDS])).hidden, IDS.roll(-1), 1.0).logprob.sum().backward()
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert expected.grad is not None
        assert torch.equal(parameter.grad, expected.grad), name


def _fit(seed: int, *, rounded: bool) -> float:
    """Loss of experts that were fitted to others, once they are rounded."""
    generator = torch.Generator().manual_seed(seed)
    teacher, student = Experts(4, BLOCK, BLOCK, rounded=False), Experts(4, BLOCK, BLOCK, rounded=rounded)
    for experts in (teacher, student):
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, 0.0, BLOCK**-0.5, generator=generator)
    inputs = torch.randn(256, BLOCK, generator=generator)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in inputs])
    weights = torch.full(ids.shape, 0.5)

    def loss() -> torch.Tensor:
        wanted, got = (apply_experts(inputs, ids, weights, *e.weights(), swiglu) for e in (teacher, student))
        return (wanted.detach() - got).square().mean()

    optimizer = torch.optim.Adam(student.parameters(), 1e-2)
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 200)
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    student.rounded = True
    return float(loss().detach())


def test_experts_trained_in_mxfp4_lose_less_by_the_export_than_experts_rounded_afterwards() -> None:
    for seed in range(3):
        assert _fit(seed, rounded=True) < 0.8 * _fit(seed, rounded=False)


def test_widths_that_blocks_do_not_divide_are_refused_by_name() -> None:
    for config, name in ((K3, "latent_dim"), (K3, "expert_dim"), (LINEAR, "hidden_size"), (LINEAR, "expert_dim")):
        with pytest.raises(ConfigError, match=rf"model\.{name}: must be a multiple of 32 .* got 48"):
            dataclasses.replace(config, **{name: 48})  # type: ignore[arg-type]
    assert dataclasses.replace(K3, expert_format="plain", expert_dim=48).expert_dim == 48
    assert dataclasses.replace(K3, hidden_size=48).hidden_size == 48  # the latent is what the experts read
