"""Kimi Linear against ``transformers``' own code: checkpoints both ways, logits, every gradient, generation.

Runs in an environment of its own (``make oracles``), whose versions constraints-oracles.txt pins.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from k3rl.config import ModelConfig
from k3rl.kernels.kda import kda_softplus_gate
from k3rl.model import kda
from k3rl.model.batch import TokenBatch
from k3rl.model.cache import ValueCache
from k3rl.model.pretrained import from_pretrained, save_pretrained
from k3rl.model.transformer import K3Model

transformers = importlib.import_module("transformers")  # of this environment, unknown to the one that checks types

CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=48,
    num_layers=5,
    mla_layers=(2, 4),
    num_heads=3,
    kda_key_dim=16,
    kda_value_dim=16,
    kda_gate_rank=16,
    kda_gate_bound=None,
    kda_output_gate_rank=16,
    q_lora_rank=None,
    kv_lora_rank=24,
    qk_nope_dim=12,
    qk_rope_dim=8,
    v_head_dim=20,
    mla_output_gate=False,
    num_dense_layers=1,
    dense_dim=72,
    num_experts=7,
    experts_per_token=3,
    routed_scale=2.446,
    latent_dim=None,
    expert_dim=32,
    shared_dim=64,
    attn_res_block=None,
    activation="swiglu",
)
CONFIGS = pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        dataclasses.replace(CONFIG, mla_layers=(1,), num_dense_layers=2, experts_per_token=2, q_lora_rank=28),
    ],
    ids=["direct-queries", "low-rank-queries"],
)
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["float32", "float64"]
)
SPREAD = {torch.float32: 0.03, torch.float64: 0.2}
"""Of the weights. Wide ones cost float32 some 1e-5, in their code no less than in ours."""
LENGTHS = (1, 15, 17, 64, 65, 150)
"""On both sides of a tile of ours (16) and of theirs (64)."""


class Widened(TorchFunctionMode):
    """transformers computes much of the model in float32 whatever it is given: in here, float64 stands in its place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide: list[Any] = [torch.float64 if x is torch.float32 else x for x in args]
        named = {n: torch.float64 if x is torch.float32 else x for n, x in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*wide, **named)


@contextmanager
def _computing_in(dtype: torch.dtype) -> Iterator[None]:
    if dtype == torch.float32:
        yield
    else:
        with Widened():
            yield


def _scrambled(config: ModelConfig, spread: float) -> K3Model:
    """A model none of whose tensors is at its initial value."""
    model = K3Model(config)
    generator = torch.Generator().manual_seed(7)
    for name, tensor in model.state_dict().items():
        small = name.endswith(("norm.weight", "A_log", "dt_bias", "e_score_correction_bias"))
        tensor.add_((0.3 if small else spread) * torch.randn(tensor.shape, generator=generator))
    return model


def _theirs(folder: Path, dtype: torch.dtype) -> Any:
    """The folder as transformers loads it, which must know every tensor by name."""
    with _computing_in(dtype):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
        )
    assert {name: list(found) for name, found in info.items() if found} == {}
    assert type(model).__module__ == "transformers.models.kimi_linear.modeling_kimi_linear"
    assert {tensor.dtype for tensor in model.state_dict().values()} == {dtype}
    return model


def _ids(length: int) -> torch.Tensor:
    return torch.randint(0, CONFIG.vocab_size, (length,), generator=torch.Generator().manual_seed(length))


def _logits(model: K3Model, ids: torch.Tensor) -> torch.Tensor:
    return model.lm_head(model(TokenBatch.pack([ids])).hidden)


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, ids.roll(-1), reduction="sum")


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference, relative to that of ``want``."""
    assert got.shape == want.shape
    got, want = got.detach(), want.detach()
    return float((got - want).norm() / want.norm())


@CONFIGS
@PRECISIONS
def test_logits_and_every_gradient_are_theirs(
    config: ModelConfig, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    ours = _scrambled(config, SPREAD[dtype])
    save_pretrained(ours, tmp_path / "model")
    ours, theirs = ours.to(dtype), _theirs(tmp_path / "model", dtype)
    losses = []
    for length in LENGTHS:
        ids = _ids(length)
        with _computing_in(dtype):
            want = theirs(ids.unsqueeze(0), use_cache=False).logits[0]
        got = _logits(ours, ids)
        assert _difference(got, want) < tolerance, length
        losses.append((_loss(got, ids), _loss(want, ids)))
    for sides in zip(*losses, strict=True):
        torch.stack(sides).sum().backward()
    # Our gradients take the weights' way through a folder, so that they meet theirs under the same names and layouts.
    for parameter in ours.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    save_pretrained(ours, tmp_path / "gradients")
    gradients = _theirs(tmp_path / "gradients", dtype)
    for (name, got), (_, parameter) in zip(gradients.named_parameters(), theirs.named_parameters(), strict=True):
        assert parameter.grad.norm() > 0, name
        assert _difference(got, parameter.grad) < tolerance, name


def _their_config(**changes: Any) -> Any:
    """A configuration as transformers' users write it, without the keys of the published checkpoints."""
    values: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "linear_head_dim": 16,
        "linear_num_heads": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "intermediate_size": 72,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return transformers.KimiLinearConfig(**{**values, **changes})


@PRECISIONS
@torch.no_grad()
def test_a_folder_that_they_initialised_and_wrote_is_read_and_gives_their_logits(
    dtype: torch.dtype, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rate of decay is up to 16. With wide weights a tile decays by more than any ratio in float32."""
    torch.manual_seed(1)
    theirs = transformers.AutoModelForCausalLM.from_config(
        _their_config(initializer_range=0.3), attn_implementation="eager", experts_implementation="eager"
    )
    theirs.save_pretrained(tmp_path / "theirs")
    ours, theirs = from_pretrained(tmp_path / "theirs", dtype=dtype), theirs.to(dtype)
    strongest = []

    def gate(*args: torch.Tensor) -> torch.Tensor:
        log_decay = kda_softplus_gate(*args)
        strongest.append(float(-log_decay[:16].sum(0).min()))
        return log_decay

    monkeypatch.setattr(kda, "kda_softplus_gate", gate)
    for length in LENGTHS:
        with _computing_in(dtype):
            want = theirs(_ids(length).unsqueeze(0), use_cache=False).logits[0]
        assert _difference(_logits(ours, _ids(length)), want) < tolerance, length
    assert max(strongest) > 150  # float32 holds exp(88)


@CONFIGS
def test_a_folder_that_they_loaded_and_wrote_again_comes_back_bit_for_bit(config: ModelConfig, tmp_path: Path) -> None:
    ours = _scrambled(config, SPREAD[torch.float32])
    save_pretrained(ours, tmp_path / "ours")
    _theirs(tmp_path / "ours", torch.float32).save_pretrained(tmp_path / "theirs")
    again = from_pretrained(tmp_path / "theirs")
    assert again.config == ours.config
    assert all(torch.equal(tensor, ours.state_dict()[name]) for name, tensor in again.state_dict().items())


@CONFIGS
@PRECISIONS
@pytest.mark.parametrize("strong", [False, True], ids=["mild", "strong"])
@pytest.mark.parametrize("length", [1, 30, 60])
@torch.no_grad()
def test_greedy_generation_with_caches_is_theirs(
    config: ModelConfig, dtype: torch.dtype, tolerance: float, strong: bool, length: int, tmp_path: Path
) -> None:
    ours, prompt = _scrambled(config, SPREAD[dtype]), _ids(length)
    for name, tensor in ours.state_dict().items():
        if strong and name.endswith("A_log"):
            tensor.fill_(math.log(16))
        elif strong and name.endswith("dt_bias"):  # from a channel that hardly forgets to one that keeps nothing
            tensor.copy_(torch.linspace(-6, 2, len(tensor)))
    save_pretrained(ours, tmp_path / "model")
    ours, theirs = ours.to(dtype), _theirs(tmp_path / "model", dtype)
    with _computing_in(dtype):
        out = theirs.generate(
            prompt.unsqueeze(0), do_sample=False, max_new_tokens=20, output_logits=True, return_dict_in_generate=True
        )
    cache, new, rows = ValueCache.empty(config, 1, dtype=dtype), prompt, []
    for _ in range(20):
        forward = ours(TokenBatch.pack([new]), cache)
        cache = forward.cache
        rows.append(ours.lm_head(forward.hidden[-1]))
        new = rows[-1].argmax().unsqueeze(0)
    assert [int(row.argmax()) for row in rows] == out.sequences[0, length:].tolist()
    assert _difference(torch.stack(rows), torch.cat(out.logits)) < tolerance
