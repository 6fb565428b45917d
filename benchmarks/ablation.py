"""Load balancing, attention residuals and the decay's bound, from scratch: `python benchmarks/ablation.py RESULT.json`.

K3-tiny learns English, byte by byte: the manual of Python's language that ships with CPython as `pydoc_data.topics`.
Arms differ in one thing and share steps, tokens, order of the text, optimiser and seed of the weights. Figures are
means over three seeds with Student's 95% interval; a difference is taken seed by seed.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import hashlib
import json
import math
import pydoc_data.topics
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from k3rl.config import ModelConfig, OptimizerConfig, load_model_config  # noqa: E402
from k3rl.kernels.moe import expert_load, route, router_scores  # noqa: E402
from k3rl.learner.optim import build_optimizer, lr_factor  # noqa: E402
from k3rl.model.batch import TokenBatch  # noqa: E402
from k3rl.model.moe import Balancer, LoadQuantileBalancer, QuantileBalancer, SparseMoE  # noqa: E402
from k3rl.model.transformer import K3Model  # noqa: E402
from k3rl.runtime.bench import environment  # noqa: E402

SEEDS = (0, 1, 2)
STUDENT_T = 4.302652729911275
"""Quantile 0.975 with the two degrees of freedom of three seeds."""
SEQUENCES, LENGTH = 8, 256
OPTIMIZER = OptimizerConfig(name="muon", lr=3e-2, warmup_steps=20, decay="linear", final_lr_frac=0.1)
"""Of the rates 0.003, 0.01, 0.03 and 0.1 this one learnt most without balancing, in 150 steps and with another seed."""
BF16_EVERY = 10
"""Steps between two passes of a bfloat16 copy."""
HELD_OUT_EVERY = 5
"""One topic of so many is held out."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train; all else is as in the first of :data:`ARMS`."""

    name: str
    balancer: Callable[[Sequence[SparseMoE]], Balancer] | None = QuantileBalancer
    auxiliary: float = 0.0
    """Coefficient of the auxiliary loss; Switch Transformers take 0.01 (https://arxiv.org/abs/2101.03961)."""
    changes: tuple[tuple[str, Any], ...] = ()


ARMS = (
    Arm("QB"),
    Arm("load-quantile rule", LoadQuantileBalancer),
    Arm("auxiliary loss, 0.01", None, 0.01),
    Arm("auxiliary loss, 0.1", None, 0.1),
    Arm("no balancing", None),
    Arm("QB, no AttnRes", changes=(("attn_res_block", None),)),
    Arm("QB, softplus decay", changes=(("kda_gate_bound", None),)),
)
COUNTED: tuple[str, ...] = ("activations", "logits", "gradients", "checked")
BALANCING = ARMS[1:5]
FIGURES = {
    "held-out loss": "nats/byte",
    "training loss, last 50 steps": "nats/byte",
    "held-out load, max / mean": "1",
    "held-out load, max / mean, worst layer": "1",
    "held-out load, coefficient of variation": "1",
    "load of a step, max / mean, last 100 steps": "1",
    "router scores under 0.01 or over 0.99": "share",
    "gradient norm, median": "1",
    "gradient norm, largest": "1",
    "NaN or Inf among bf16 activations": "values",
    "NaN or Inf among bf16 logits": "values",
    "NaN or Inf among bf16 gradients": "values",
    "time": "s",
}


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on and bytes held out, whole topics each; a paragraph that stands in several is kept once."""
    seen: set[str] = set()
    parts: tuple[list[str], list[str]] = ([], [])
    for i, name in enumerate(sorted(pydoc_data.topics.topics)):
        held_out = i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        for paragraph in pydoc_data.topics.topics[name].split("\n\n"):
            if paragraph not in seen:
                seen.add(paragraph)
                parts[held_out].append(paragraph)
    train, test = (torch.tensor(list("\n\n".join(part).encode())) for part in parts)
    return train, test


def cut(text: torch.Tensor, starts: Sequence[int]) -> tuple[TokenBatch, torch.Tensor]:
    """Windows of ``text`` as a packed batch, and the byte after each."""
    windows = [text[s : s + LENGTH + 1] for s in starts]
    return TokenBatch.pack([w[:-1] for w in windows]), torch.cat([w[1:] for w in windows])


def auxiliary_loss(inputs_TD: torch.Tensor, layer: SparseMoE) -> torch.Tensor:
    """``E sum_e f_e P_e``: share of the selections times mean share of the scores; 1 when both are even."""
    scores_TE = router_scores(inputs_TD, layer.gate.weight)
    ids_Tk, _ = route(scores_TE, layer.gate.e_score_correction_bias, layer.top_k)
    chosen_E = expert_load(ids_Tk, scores_TE.shape[1]) / ids_Tk.numel()
    return scores_TE.shape[1] * (chosen_E * (scores_TE / scores_TE.sum(-1, keepdim=True)).mean(0)).sum()


@contextmanager
def hooked(modules: Sequence[torch.nn.Module], hook: Callable[[torch.nn.Module, Any, Any], None]) -> Iterator[None]:
    """Call ``hook(module, inputs, output)`` after every forward inside."""
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def loss_of(model: K3Model, batch: TokenBatch, targets: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Mean of -log p over the bytes, and the forward's output."""
    out = model(batch)
    return -model.token_logprobs(out.hidden, targets, 1.0).logprob.mean(), out


def count_in_bf16(model: K3Model, batch: TokenBatch, targets: torch.Tensor) -> dict[str, int]:
    """Values that are not finite in a forward and backward of a bfloat16 copy; activations are all modules' outputs."""
    model = copy.deepcopy(model).to(torch.bfloat16)
    model.zero_grad()
    found = dict.fromkeys(COUNTED, 0)

    def count(kind: str, tensor: torch.Tensor) -> None:
        found[kind] += int((~tensor.isfinite()).sum())
        found["checked"] += tensor.numel()

    def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                count("activations", tensor.detach())

    with hooked([m for m in model.modules() if m is not model], hook):
        loss, out = loss_of(model, batch, targets)
    with torch.no_grad():
        count("logits", model.lm_head(out.hidden))
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            count("gradients", parameter.grad)
    return found


@torch.no_grad()
def held_out(model: K3Model, text: torch.Tensor) -> tuple[float, torch.Tensor, float]:
    """Mean loss over all whole windows, the load [L, E] on them, and the share of router scores near 0 or 1."""
    starts = list(range(0, len(text) - LENGTH, LENGTH))
    total, load = 0.0, torch.zeros(0)
    extreme: list[torch.Tensor] = []

    def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        extreme.append(((output[2] < 0.01) | (output[2] > 0.99)).double().mean())

    for at in range(0, len(starts), SEQUENCES):
        some = starts[at : at + SEQUENCES]
        with hooked(model.moe_layers, hook):
            loss, out = loss_of(model.eval(), *cut(text, some))
        total += float(loss) * len(some)
        part = torch.stack([expert_load(ids, model.config.num_experts) for ids in out.routes.unbind(1)])
        load = part if at == 0 else load + part
    return total / len(starts), load.double(), float(torch.stack(extreme).mean())


def train(arm: Arm, seed: int, steps: int, lr: float, texts: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """Train one model; the values of :data:`FIGURES`, and how many values the bfloat16 passes looked at."""
    began = time.perf_counter()
    config: ModelConfig = load_model_config(ROOT / "configs/model/k3_tiny.yaml")
    model = K3Model(dataclasses.replace(config, **dict(arm.changes)), seed=seed).train()
    optimizer = build_optimizer(model, OPTIMIZER)
    balancer = None if arm.balancer is None else arm.balancer(model.moe_layers)
    order = torch.Generator().manual_seed(seed)
    auxiliary: list[torch.Tensor] = []
    losses, norms, loads, counts = [], [], [], dict.fromkeys(COUNTED, 0)

    def hook(module: torch.nn.Module, inputs: Any, _output: Any) -> None:
        assert isinstance(module, SparseMoE)
        auxiliary.append(auxiliary_loss(inputs[0], module))

    for step in range(steps):
        batch, targets = cut(texts[0], torch.randint(len(texts[0]) - LENGTH, (SEQUENCES,), generator=order).tolist())
        if step % BF16_EVERY == 0 or step == steps - 1:
            counts = {kind: n + counts[kind] for kind, n in count_in_bf16(model, batch, targets).items()}
        auxiliary.clear()
        with (
            nullcontext() if balancer is None else balancer.observe(),
            hooked(model.moe_layers if arm.auxiliary else [], hook),
        ):
            loss, out = loss_of(model, batch, targets)
        model.zero_grad()
        (loss + arm.auxiliary * sum(auxiliary)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)))
        for group in optimizer.param_groups:
            group["lr"] = lr * lr_factor(step, steps, OPTIMIZER)
        optimizer.step()
        if balancer is not None:
            balancer.step()
        losses.append(float(loss.detach()))
        load = out.stats["moe_load"].double()
        loads.append(float((load.amax(1) / load.mean(1)).mean()))
    test_loss, load, extreme = held_out(model, texts[1])
    relative = load.amax(1) / load.mean(1)
    values = (
        test_loss,
        statistics.fmean(losses[-50:]),
        float(relative.mean()),
        float(relative.max()),
        float((load.std(1, correction=0) / load.mean(1)).mean()),
        statistics.fmean(loads[-100:]),
        extreme,
        statistics.median(norms),
        max(norms),
        counts["activations"],
        counts["logits"],
        counts["gradients"],
        time.perf_counter() - began,
    )
    return dict(zip(FIGURES, values, strict=True)) | {"values checked in bf16": counts["checked"]}


def half_width(values: Sequence[float]) -> float:
    """Half of the 95% interval of a mean of three."""
    return STUDENT_T * statistics.stdev(values) / math.sqrt(len(values))


def row(what: str, arm: str, values: Sequence[float], unit: str, **other: Any) -> dict[str, Any]:
    """One row of the result, with its interval beside the form that all results have."""
    fields = {"baseline": None, "baseline_name": None, "floor": None, "goal": None}
    result = {"what": what, "shape": arm, "ours": statistics.fmean(values), **fields, "unit": unit, "holds": None}
    return {**result, **other, "half_width_95": half_width(values), "seeds": list(values)}


def summarise(runs: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Rows of what was measured, then what is required of QB: no more load, and no more loss than chance allows."""
    base = ARMS[0].name
    rows = [
        row(what, arm, [run[what] for run in found], unit)
        | ({} if arm == base else {"baseline": statistics.fmean(r[what] for r in runs[base]), "baseline_name": base})
        for what, unit in FIGURES.items()
        for arm, found in runs.items()
    ]
    for what in ("held-out load, max / mean", "held-out load, coefficient of variation", "held-out loss"):
        for arm in BALANCING:
            if arm.name not in runs:
                continue
            pairs = zip(runs[base], runs[arm.name], strict=True)
            values = [ours[what] - theirs[what] for ours, theirs in pairs]
            goal = half_width(values) if what == "held-out loss" else 0.0
            holds = statistics.fmean(values) <= goal
            rows.append(row(f"{what}, QB minus {arm.name}", "QB", values, FIGURES[what], goal=goal, holds=holds))
    return rows


def main() -> None:
    """Train every arm with every seed and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=OPTIMIZER.lr)
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS[1:]], help="besides QB; default: all")
    options = parser.parse_args()
    arms = [arm for arm in ARMS if arm is ARMS[0] or not options.arms or arm.name in options.arms]
    torch.set_num_threads(1)
    started, machine, texts = datetime.datetime.now(datetime.UTC), environment(), corpus()
    runs: dict[str, list[dict[str, float]]] = {arm.name: [] for arm in arms}
    for seed in SEEDS:
        for arm in arms:
            runs[arm.name].append(train(arm, seed, options.steps, options.lr, texts))
            print(seed, arm.name, {k: round(v, 4) for k, v in runs[arm.name][-1].items()}, flush=True)
    settings = {
        "model": "k3_tiny",
        "steps": options.steps,
        "tokens_per_step": SEQUENCES * LENGTH,
        "optimizer": dataclasses.asdict(OPTIMIZER) | {"lr": options.lr},
        "seeds": list(SEEDS),
        "corpus": "pydoc_data.topics of CPython, each paragraph once",
        "corpus_bytes": {"train": len(texts[0]), "held_out": len(texts[1])},
        "corpus_sha256": hashlib.sha256(bytes(torch.cat(texts).tolist())).hexdigest(),
    }
    result = {
        "command": "OMP_NUM_THREADS=1 python " + shlex.join(["benchmarks/ablation.py", "RESULT.json", *sys.argv[2:]]),
        "started": f"{started:%Y-%m-%dT%H:%M:%SZ}",
        "environment": machine,
        "settings": settings,
        "rows": summarise(runs),
    }
    options.result.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
