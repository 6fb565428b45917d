"""The whole model against NumPy in float64: the formulas written out once more, token by token.

Nothing of ``model/`` or ``kernels/`` computes here, so that an error would have to be made twice. The oracle reads
``config.json`` and the published tensor names of a checkpoint folder by itself, and uses every tensor in it.

Sources: R, the Kimi K3 report (https://arxiv.org/abs/2607.24653); L, the Kimi Linear report
(https://arxiv.org/abs/2510.26692); OCP, its MX specification 1.0 of narrow floats. Letters: T tokens, D model width,
C channels.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from k3rl.config import ModelConfig
from k3rl.model.batch import TokenBatch
from k3rl.model.cache import ValueCache
from k3rl.model.pretrained import ExpertFormat, from_pretrained, save_pretrained
from k3rl.model.transformer import K3Model

Array = NDArray[np.float64]
Weight = Callable[[str], Array]
"""From a name below a prefix to the tensor of the checkpoint."""

TOLERANCE = 1e-9
"""Largest difference of a logit; logits are about 1. Rounding alone gives 1e-13."""
L2_EPS = 1e-6
MLA_NORM_EPS = 1e-6
"""Of the norms of MLA's latents, whatever ``rms_norm_eps`` is: config.json does not say it."""


class Folder:
    """A checkpoint folder; remembers which tensors were asked for."""

    def __init__(self, path: Path) -> None:
        self.values: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.text: dict[str, Any] = self.values.get("text_config", self.values)
        self.outer = "language_model." if "text_config" in self.values else ""
        self.tensors = {n: t for file in sorted(path.glob("model-*.safetensors")) for n, t in load_file(file).items()}
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> NDArray[Any]:
        self.used.add(self.outer + name)
        return self.tensors[self.outer + name]

    def under(self, prefix: str) -> Weight:
        """Tensors below ``prefix``, as float64, unpacked if they are packed."""

        def weight(name: str) -> Array:
            if f"{self.outer}{prefix}{name}_packed" in self.tensors:
                return unpack(self[f"{prefix}{name}_packed"], self[f"{prefix}{name}_scale"])
            return self[prefix + name].astype(np.float64)

        return weight


def unpack(packed: NDArray[Any], scale: NDArray[Any]) -> Array:
    """MXFP4 (OCP): sign, two bits of exponent, one of mantissa; a power of two per 32 columns."""
    out = np.empty((packed.shape[0], 2 * packed.shape[1]))
    for column in range(out.shape[1]):
        codes = packed[:, column // 2].astype(np.int64)
        code = codes % 16 if column % 2 == 0 else codes // 16
        exponent, mantissa = code // 2 % 4, code % 2
        magnitude = np.where(exponent == 0, mantissa * 0.5, (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1))
        out[:, column] = (1 - 2 * (code // 8)) * magnitude * 2.0 ** (scale[:, column // 32].astype(np.float64) - 127)
    return out


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def gated_activation(gate: Array, up: Array, text: dict[str, Any]) -> Array:
    """SiTU-GLU (R §2.3.2, App. B), whose sigmoid takes the gate as it is, not its tanh; SwiGLU in Kimi Linear."""
    if text["hidden_act"] == "silu":
        return silu(gate) * up
    b1, b2 = text["activation_situ_beta"], text["activation_situ_linear_beta"]
    return b1 * np.tanh(gate / b1) * sigmoid(gate) * b2 * np.tanh(up / b2)


def feed_forward(x: Array, w: Weight, names: Sequence[str], text: dict[str, Any]) -> Array:
    gate, up, down = (w(f"{name}.weight") for name in names)
    return gated_activation(x @ gate.T, x @ up.T, text) @ down.T


def convolved(x_TD: Array, w: Weight, name: str) -> Array:
    """A projection, a causal filter per channel whose last tap is the token's own, and SiLU (R §2.1.1; L)."""
    inputs_TC, filters = x_TD @ w(f"{name}_proj.weight").T, w(f"{name}_conv1d.weight")
    assert filters.shape[1] == 1
    taps = filters.shape[2]
    out_TC = np.zeros_like(inputs_TC)
    for t in range(len(x_TD)):
        for back in range(min(taps, t + 1)):
            out_TC[t] += filters[:, 0, taps - 1 - back] * inputs_TC[t - back]
    return silu(out_TC)


def kda(x_TD: Array, w: Weight, text: dict[str, Any]) -> Array:
    """Kimi Delta Attention (R §2.1.1)."""
    linear = text["linear_attn_config"]
    shape = (len(x_TD), linear["num_heads"], linear["head_dim"])
    q, k, v = (convolved(x_TD, w, name).reshape(shape) for name in "qkv")
    # R Eq. 2: queries and keys of unit length, with epsilon inside the root; queries scaled.
    q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + L2_EPS) for x in (q, k))
    q = q / np.sqrt(linear["head_dim"])
    beta = sigmoid(x_TD @ w("b_proj.weight").T)
    log_decay = kda_log_decay(x_TD, w, text).reshape(shape)
    out = np.zeros(shape)
    eye = np.eye(linear["head_dim"])
    for h in range(linear["num_heads"]):
        state = np.zeros((linear["head_dim"], linear["head_dim"]))
        for t in range(len(x_TD)):
            # R Eq. 1, the same in L: S_t = (I - beta k k^T) diag(alpha) S_{t-1} + beta k v^T, o_t = S_t^T q_t
            erase = eye - beta[t, h] * np.outer(k[t, h], k[t, h])
            state = erase @ np.diag(np.exp(log_decay[t, h])) @ state + beta[t, h] * np.outer(k[t, h], v[t, h])
            out[t, h] = state.T @ q[t, h]
    # R Eq. 6: first the norm of each head, then the gate, of full rank or (L) through a bottleneck.
    full_rank = linear.get("use_full_rank_gate", False)
    gate = x_TD @ w("g_proj.weight").T if full_rank else x_TD @ w("g_a_proj.weight").T @ w("g_b_proj.weight").T
    normed = rms_norm(out, w("o_norm.weight"), text["rms_norm_eps"]).reshape(gate.shape)
    return (normed * sigmoid(gate)) @ w("o_proj.weight").T


def kda_log_decay(x_TD: Array, w: Weight, text: dict[str, Any]) -> Array:
    """Per key channel [T, H K]: bounded (R Eq. 5), or Kimi Linear's unbounded one (L)."""
    linear = text["linear_attn_config"]
    heads, bound = linear["num_heads"], linear.get("gate_lower_bound")
    shifted = x_TD @ w("f_a_proj.weight").T @ w("f_b_proj.weight").T + w("dt_bias")
    a_log = w("A_log")
    # K3's files pad it with zeros to the width of a head, Kimi Linear's give it axes of one.
    assert a_log.shape == ((1, 1, heads, 1) if bound is None else (linear["head_dim"],))
    assert not a_log.flatten()[heads:].any()
    rate = np.repeat(np.exp(a_log.flatten()[:heads]), linear["head_dim"])
    return -rate * np.logaddexp(0, shifted) if bound is None else bound * sigmoid(rate * shifted)


def mla(x_TD: Array, w: Weight, text: dict[str, Any]) -> Array:
    """Latent attention with keys and values expanded and no positions (R §2.1.2, Eq. 7)."""
    heads, rank = text["num_attention_heads"], text["kv_lora_rank"]
    nope, value, num = text["qk_nope_head_dim"], text["v_head_dim"], len(x_TD)
    width = nope + text["qk_rope_head_dim"]
    if text["q_lora_rank"] is None:
        q = x_TD @ w("q_proj.weight").T
    else:
        q = rms_norm(x_TD @ w("q_a_proj.weight").T, w("q_a_layernorm.weight"), MLA_NORM_EPS) @ w("q_b_proj.weight").T
    q = q.reshape(num, heads, width)
    compressed = x_TD @ w("kv_a_proj_with_mqa.weight").T
    latent, shared_key = compressed[:, :rank], compressed[:, rank:]  # one key for all heads, not normalised
    latent = rms_norm(latent, w("kv_a_layernorm.weight"), MLA_NORM_EPS)
    expanded = (latent @ w("kv_b_proj.weight").T).reshape(num, heads, nope + value)
    out = np.zeros((num, heads, value))
    for h in range(heads):
        keys = np.concatenate([expanded[:, h, :nope], shared_key], axis=1)
        for t in range(num):
            weights = np.exp(keys[: t + 1] @ q[t, h] / np.sqrt(width))
            out[t, h] = weights @ expanded[: t + 1, h, nope:] / weights.sum()
    flat = out.reshape(num, heads * value)
    if text.get("mla_use_output_gate", False):
        flat = flat * sigmoid(x_TD @ w("g_proj.weight").T)
    return flat @ w("o_proj.weight").T


def moe(x_TD: Array, w: Weight, text: dict[str, Any]) -> Array:
    """Experts in a latent with a norm after they are combined (R §2.3, Eq. 11 and 13), or of full width (L)."""
    latent = text.get("routed_expert_hidden_size") is not None
    num_experts, top_k = text["num_experts"], text["num_experts_per_token"]
    scores = sigmoid(x_TD @ w("gate.weight").T)
    # The bias decides who is chosen; the weights are the plain scores, brought to a sum of one.
    choice = scores + w("gate.e_score_correction_bias")
    inputs = x_TD @ w("routed_expert_down_proj.weight").T if latent else x_TD
    outputs = [
        feed_forward(inputs, w, [f"experts.{e}.{n}" for n in ("w1", "w3", "w2")], text) for e in range(num_experts)
    ]
    routed = np.zeros_like(inputs)
    for t in range(len(x_TD)):
        chosen = sorted(range(num_experts), key=lambda e: -choice[t, e])[:top_k]
        total = sum(scores[t, e] for e in chosen) + 1e-20
        for e in chosen:
            routed[t] += text["routed_scaling_factor"] * scores[t, e] / total * outputs[e][t]
    if latent:
        routed = rms_norm(routed, w("routed_expert_norm.weight"), text["rms_norm_eps"])
        routed = routed @ w("routed_expert_up_proj.weight").T
    names = ("shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj")
    return routed + feed_forward(x_TD, w, names, text)


def mix(prefix: Array, bank: list[Array], w: Weight, name: str, eps: float) -> Array:
    """Block attention residuals (R §2.2, Eq. 8-10): softmax over blocks of normed keys, values not normed."""
    sources = np.stack([*bank, prefix])
    keys = rms_norm(sources, w(f"{name}_norm.weight"), eps)
    weights = np.exp(keys @ w(f"{name}_proj.weight")[0])
    return np.einsum("st,std->td", weights / weights.sum(axis=0), sources)


def logits_of(folder: Folder, ids: list[int]) -> Array:
    """Logits [T, vocabulary] of one sequence."""
    text, outer = folder.text, folder.under("model.")
    full = text["linear_attn_config"]["full_attn_layers"]
    block = text.get("attn_res_block_size")
    stream = outer("embed_tokens.weight")[ids]
    bank: list[Array] = []
    for i in range(text["num_hidden_layers"]):
        layer, attention = folder.under(f"model.layers.{i}."), folder.under(f"model.layers.{i}.self_attn.")
        attend = mla if i + 1 in full else kda  # both lists of layers count from one
        mixer_norm, ffn_norm = layer("input_layernorm.weight"), layer("post_attention_layernorm.weight")
        eps = text["rms_norm_eps"]

        def ffn(x: Array, i: int = i) -> Array:
            if i < text["first_k_dense_replace"]:
                return feed_forward(
                    x, folder.under(f"model.layers.{i}.mlp."), ("gate_proj", "up_proj", "down_proj"), text
                )
            return moe(x, folder.under(f"model.layers.{i}.block_sparse_moe."), text)

        if block is None:  # L: the usual residual stream
            stream = stream + attend(rms_norm(stream, mixer_norm, eps), attention, text)
            stream = stream + ffn(rms_norm(stream, ffn_norm, eps))
            continue
        # R §2.2: a block's first layer banks what came before it, before its attention, whose output then stands alone.
        hidden = mix(stream, bank, layer, "self_attention_res", eps) if bank else stream
        attended = attend(rms_norm(hidden, mixer_norm, eps), attention, text)
        if i % block == 0:
            bank.append(stream)
            stream = attended
        else:
            stream = stream + attended
        stream = stream + ffn(rms_norm(mix(stream, bank, layer, "mlp_res", eps), ffn_norm, eps))
    if block is not None:
        stream = mix(stream, bank, outer, "output_attn_res", text["rms_norm_eps"])
    hidden = rms_norm(stream, outer("norm.weight"), text["rms_norm_eps"])
    return hidden @ folder.under("")("lm_head.weight").T


# Widths that differ from each other wherever they may, and constants that are nobody's default.
K3 = ModelConfig(
    vocab_size=97,
    hidden_size=48,
    num_layers=5,
    mla_layers=(2, 4),
    num_heads=3,
    kda_key_dim=16,
    kda_value_dim=16,
    kda_gate_rank=16,
    kda_gate_bound=-4.5,
    conv_kernel=4,
    q_lora_rank=28,
    kv_lora_rank=24,
    qk_nope_dim=12,
    qk_rope_dim=8,
    v_head_dim=20,
    dense_dim=72,
    num_experts=7,
    experts_per_token=3,
    routed_scale=1.7,
    latent_dim=32,
    expert_dim=64,
    shared_dim=128,
    attn_res_block=2,
    situ_beta=3.0,
    situ_linear_beta=11.0,
    rms_norm_eps=1e-4,
)
K3_BLOCKS_OF_3 = dataclasses.replace(
    K3, num_layers=7, mla_layers=(1, 5), num_dense_layers=2, experts_per_token=1, attn_res_block=3, state_tile=64
)
LINEAR = dataclasses.replace(
    K3,
    kda_gate_bound=None,
    kda_output_gate_rank=16,
    q_lora_rank=None,
    mla_output_gate=False,
    routed_scale=2.446,
    latent_dim=None,
    attn_res_block=None,
    activation="swiglu",
    rms_norm_eps=1e-5,
)
LINEAR_TOP_1 = dataclasses.replace(LINEAR, num_dense_layers=2, experts_per_token=1, num_heads=2, state_tile=64)
FOLDERS: dict[str, tuple[ModelConfig, ExpertFormat]] = {
    "k3": (K3, "plain"),
    "k3-mxfp4": (K3, "mxfp4"),
    "k3-blocks-of-3": (K3_BLOCKS_OF_3, "plain"),
    "linear": (LINEAR, "plain"),
    "linear-top-1": (LINEAR_TOP_1, "plain"),
}
LENGTHS = (1, 15, 17, 40)


def _scrambled(config: ModelConfig) -> K3Model:
    """None of its tensors is at its initial value, and activations are of a size at which every epsilon shows."""
    model = K3Model(config).double()
    generator = np.random.default_rng(11)
    for name, tensor in model.state_dict().items():
        noise = generator.standard_normal(tensor.shape)
        if name.endswith("norm.weight"):
            noise = 1 + 0.3 * noise
        elif name.endswith(("A_log", "e_score_correction_bias")):
            noise = 0.4 * noise
        elif name.endswith(("q_conv1d.weight", "k_conv1d.weight")):
            noise = 0.03 * noise
        elif name.endswith("res.proj.weight"):
            noise = 0.2 * noise
        elif not name.endswith(("dt_bias", "v_conv1d.weight")):
            noise = noise / np.sqrt(tensor.shape[-1])
        if name.endswith("q_a_proj.weight"):
            noise *= 0.02
        if name.endswith("kv_a_proj_with_mqa.weight"):
            noise[: config.kv_lora_rank] *= 0.02
        tensor.copy_(torch.from_numpy(noise))
    return model


@pytest.fixture(scope="module", params=FOLDERS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[K3Model, Folder]:
    """A model, and the folder that it was written to; of packed experts, the model that was read from it."""
    config, experts = FOLDERS[request.param]
    path = tmp_path_factory.mktemp("checkpoint") / "folder"
    model = _scrambled(config)
    save_pretrained(model, path, experts=experts, max_shard_bytes=200_000)
    return model if experts == "plain" else from_pretrained(path, dtype=torch.float64), Folder(path)


def _ids(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, K3.vocab_size, length).tolist()


@torch.no_grad()
def _logits(model: K3Model, *sequences: list[int]) -> Array:
    batch = TokenBatch.pack([torch.tensor(ids) for ids in sequences])
    return model.lm_head(model(batch).hidden).numpy()


def _assert_equal(got: Array, want: Array) -> None:
    assert got.shape == want.shape
    assert np.abs(got - want).max() < TOLERANCE
    assert want.std() > 0.3  # they say something


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_are_those_of_the_formulas(both: tuple[K3Model, Folder], length: int) -> None:
    model, folder = both
    _assert_equal(_logits(model, _ids(length)), logits_of(folder, _ids(length)))


def test_logits_of_packed_sequences_are_those_of_the_formulas_one_by_one(both: tuple[K3Model, Folder]) -> None:
    model, folder = both
    sequences = [_ids(length) for length in (*LENGTHS, 300)]  # so many that experts are computed one by one
    _assert_equal(_logits(model, *sequences), np.concatenate([logits_of(folder, ids) for ids in sequences]))


@torch.no_grad()
def test_logits_of_tokens_decoded_one_by_one_are_those_of_the_formulas(both: tuple[K3Model, Folder]) -> None:
    model, folder = both
    ids = _ids(70)  # past the end of a tile of either size
    out = model(TokenBatch.pack([torch.tensor(ids[:15])]), ValueCache.empty(model.config, 1, dtype=torch.float64))
    rows = [out.hidden]
    for token in ids[15:]:
        out = model(TokenBatch.pack([torch.tensor([token])]), out.cache)
        rows.append(out.hidden)
    _assert_equal(model.lm_head(torch.cat(rows)).numpy(), logits_of(folder, ids))


def test_the_formulas_use_every_tensor_of_the_folder_but_the_first_layers_unused_mix(
    both: tuple[K3Model, Folder],
) -> None:
    _, folder = both
    logits_of(folder, _ids(3))
    unused = {name for name in folder.tensors if name not in folder.used}
    is_k3 = folder.outer != ""
    assert unused == (
        {f"language_model.model.layers.0.self_attention_res_{x}.weight" for x in ("norm", "proj")} if is_k3 else set()
    )


@pytest.mark.parametrize("name", ["k3", "linear"])
def test_gradients_are_the_differences_of_the_formulas(name: str, tmp_path: Path) -> None:
    """Along a random direction in each parameter, at most as large as changes the loss by about ``step``."""
    ids, step = _ids(18), 1e-5
    model = _scrambled(FOLDERS[name][0])
    generator = np.random.default_rng(1)
    weights = generator.standard_normal((len(ids), K3.vocab_size))
    logits = model.lm_head(model(TokenBatch.pack([torch.tensor(ids)])).hidden)
    (logits * torch.from_numpy(weights)).sum().backward()

    def loss(parameter: torch.Tensor, direction: torch.Tensor, at: float) -> float:
        was = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(direction, alpha=at)
            save_pretrained(model, tmp_path / "folder", max_shard_bytes=2**30)
            parameter.copy_(was)
        found = float((logits_of(Folder(tmp_path / "folder"), ids) * weights).sum())
        shutil.rmtree(tmp_path / "folder")
        return found

    for own, parameter in model.named_parameters():
        if parameter.grad is None:
            assert own.startswith("layers.0.self_attention_res."), own
            continue
        size = float(parameter.grad.norm())
        direction = torch.from_numpy(generator.standard_normal(parameter.shape)) / max(size, 1.0)
        found = (loss(parameter, direction, step) - loss(parameter, direction, -step)) / (2 * step)
        assert size > 1e-3, own
        assert found == pytest.approx(float((parameter.grad * direction).sum()), abs=1e-6 * min(size, 1.0)), own
