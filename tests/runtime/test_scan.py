"""The scan of decay, attention and states, against the whole sequence at once in float64."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from k3rl.config import ModelConfig, load_model_config
from k3rl.errors import ConfigError
from k3rl.kernels.kda import kda_recurrent
from k3rl.model.batch import TokenBatch
from k3rl.model.cache import ValueMemory
from k3rl.model.kda import KdaMixer
from k3rl.model.mla import MlaMixer
from k3rl.model.transformer import K3Model
from k3rl.runtime.scan import QUERIES, scan, scan_folder

MODELS = Path(__file__).parents[2] / "configs" / "model"
TINY = load_model_config(MODELS / "k3_tiny.yaml")
LINEAR = dataclasses.replace(
    TINY,
    kda_gate_bound=None,
    kda_output_gate_rank=8,
    q_lora_rank=None,
    mla_output_gate=False,
    latent_dim=None,
    attn_res_block=None,
    activation="swiglu",
)
LENGTHS = (5, 97, 203)


def _layer_inputs(model: K3Model, ids: torch.Tensor) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    mixers = [model.get_submodule(f"layers.{i}.self_attn") for i in range(len(model.layers))]
    handles = [x.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) for x in mixers]
    model(TokenBatch.pack([ids]))
    for handle in handles:
        handle.remove()
    return seen


def _direct_decay(mixer: KdaMixer, x: torch.Tensor) -> torch.Tensor:
    z = (x @ mixer.f_a_proj.weight.T @ mixer.f_b_proj.weight.T + mixer.dt_bias).view(len(x), mixer.heads, -1)
    rate = mixer.A_log.exp()[:, None]
    return -rate * (1 + z.exp()).log() if mixer.bound is None else mixer.bound / (1 + (-rate * z).exp())


def _direct_kda(mixer: KdaMixer, x: torch.Tensor, tile: int) -> dict[str, float]:
    g = _direct_decay(mixer, x)
    sums = [-g[i + 1 : i + 16].sum(0).min().item() for i in range(0, len(g), 16) if i + 1 < len(g)]
    layout = ValueMemory.fresh(TINY, torch.tensor([0, len(x)])).layout
    rows = mixer._rows(x, mixer._convolve(x, layout, None)[0])
    sizes = [mixer.key_dim, mixer.key_dim, mixer.value_dim, mixer.key_dim, 1]
    full = len(x) // tile * tile
    q, k, v, _, beta = (y[None, :full] for y in rows.split(sizes, dim=-1))
    _, state = kda_recurrent(q, k, v, g[None, :full], beta[..., 0])
    norms = state[0].square().sum((-1, -2)).sqrt()
    return {
        "decay_min": g.min().item(),
        "decay_max": g.max().item(),
        "decays_rounding_to_1": (g.exp() == 1).double().mean().item(),
        "tile_log_reciprocal": max(sums),
        "overflow_margin": math.log(torch.finfo(torch.float64).max) - max(sums),
        "state_norm_mean": norms.mean().item(),
        "state_norm_max": norms.max().item(),
    }


def _direct_mla(mixer: MlaMixer, x: torch.Tensor) -> dict[str, float]:
    latent, pe = mixer.kv_a_proj_with_mqa(x).split([mixer.rank, mixer.pe_dim], dim=-1)
    kv = mixer.kv_b_proj(mixer.kv_a_layernorm(latent)).view(len(x), mixer.heads, -1)
    q = mixer.queries(x).view(len(x), mixer.heads, -1)
    entropies, shares = [], []
    for t in range(max(0, len(x) - QUERIES), len(x)):
        for h in range(mixer.heads):
            keys = torch.cat([kv[: t + 1, h, : mixer.key_dim], pe[: t + 1]], dim=-1)
            p = torch.softmax(keys @ q[t, h] / math.sqrt(q.shape[-1]), 0)
            entropies.append(-(p * p.log()).sum().item())
            shares.append(entropies[-1] / math.log(t + 1) if t else 0.0)
    return {"entropy": sum(entropies) / len(entropies), "entropy_share": sum(shares) / len(shares)}


@pytest.mark.parametrize("config", [TINY, LINEAR], ids=["k3", "kimi_linear"])
@torch.no_grad()
def test_a_streamed_scan_equals_the_whole_sequence_at_once_whatever_the_chunk(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k3rl.runtime.scan.SCORES", {"cpu": 64 * 150})  # chunks of 64 shorten on the way
    model = K3Model(config, seed=3).double().eval()
    ids = torch.randint(0, 256, (LENGTHS[-1],), generator=torch.Generator().manual_seed(5))
    found = {chunk: list(scan(model, ids, LENGTHS, chunk)) for chunk in (7, 64)}
    for length in LENGTHS:
        for index, x in enumerate(_layer_inputs(model, ids[:length])):
            mixer = model.layers[index].self_attn
            if isinstance(mixer, KdaMixer):
                want = _direct_kda(mixer, x, config.state_tile)
            else:
                assert isinstance(mixer, MlaMixer)
                want = _direct_mla(mixer, x)
            for rows in found.values():
                (row,) = [r for r in rows if (r["layer"], r["length"]) == (index, length)]
                assert {name: row[name] for name in want} == pytest.approx(want, rel=1e-9, abs=1e-12)
                if isinstance(mixer, KdaMixer):
                    assert row.keys() - want.keys() - {"layer", "length"} == {
                        "decay_q0.01",
                        "decay_q0.5",
                        "decay_q0.99",
                    }
                    g = _direct_decay(mixer, x).flatten()
                    for share in (0.01, 0.5, 0.99):
                        exact = torch.quantile(g, share, interpolation="nearest").item()
                        assert row[f"decay_q{share:g}"] == pytest.approx(exact, rel=0.02)


def test_a_weak_decay_rounds_to_one_in_bfloat16_and_not_in_float32() -> None:
    ids = torch.arange(64)
    shares = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = K3Model(TINY, seed=3)
        for layer in model.layers:
            if isinstance(layer.self_attn, KdaMixer):
                torch.nn.init.constant_(layer.self_attn.dt_bias, -8.0)  # g about -5 sigmoid(-8) = -0.0017
        shares[dtype] = next(scan(model.to(dtype).eval(), ids, [64]))["decays_rounding_to_1"]
    assert shares[torch.float32] == 0
    assert shares[torch.bfloat16] > 0.5


def test_the_figures_are_written_as_rows_of_results_and_bad_input_is_named(tmp_path: Path) -> None:
    out = tmp_path / "new" / "scan.json"

    def run(lengths: list[int], content: bytes | None = None) -> None:
        text = None if content is None else tmp_path / "text"
        if text is not None and content is not None:
            text.write_bytes(content)
        scan_folder(
            MODELS / "k3_tiny.yaml", out, dtype="float32", lengths=lengths, text=text, seed=0, chunk=32, device="cpu"
        )

    run([20, 40], b"to be or not to be, that is the question" * 2)
    document = json.loads(out.read_text())
    assert document["command"].endswith(f"--lengths 20,40 --chunk 32 --text {tmp_path / 'text'}")
    rows = document["rows"]
    assert {row["shape"].split(", ")[1] for row in rows} == {"20 tokens", "40 tokens"}
    margins = [row for row in rows if row["what"] == "overflow_margin"]
    assert len(margins) == 2 * (TINY.num_layers - len(TINY.mla_layers))
    assert all(row["holds"] is (row["ours"] > 0) for row in margins)
    with pytest.raises(ConfigError, match="lengths"):
        run([40, 20])
    with pytest.raises(ConfigError, match="text"):
        run([40], b"short")
