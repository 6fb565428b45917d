"""The model on a GPU against the CPU, without pytest or omegaconf: `python benchmarks/model_on_gpu.py RESULT.json`.

Differences are in float32, on k3_tiny, KDA through its kernels unless K3RL_KERNELS is reference; times and memory are
those of one k3_nano step. Rows have the form that `k3rl bench` writes.
"""

from __future__ import annotations

import ast
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from k3rl.config import ModelConfig  # noqa: E402
from k3rl.model.batch import TokenBatch  # noqa: E402
from k3rl.model.cache import ValueCache  # noqa: E402
from k3rl.model.transformer import K3Model  # noqa: E402

LENGTHS = (37, 130, 64, 1, 200)


def model_config(name: str) -> ModelConfig:
    """One of configs/model/, read without a YAML library."""
    values: dict[str, Any] = {}
    for line in (ROOT / f"configs/model/{name}.yaml").read_text().splitlines():
        key, colon, text = line.split("#")[0].partition(":")
        if colon:
            text = text.strip()
            values[key] = text if text.isalpha() else ast.literal_eval(text)
    return ModelConfig(**{**values, "mla_layers": tuple(values["mla_layers"])})


def row(what: str, shape: str, ours: float, unit: str, goal: float | None = None) -> dict[str, Any]:
    holds = None if goal is None else ours <= goal
    fields = {"baseline": None, "baseline_name": None, "floor": None}
    return {"what": what, "shape": shape, "ours": ours, **fields, "goal": goal, "unit": unit, "holds": holds}


def differences() -> list[dict[str, Any]]:
    """k3_tiny on both devices, and token by token against the whole."""
    config = model_config("k3_tiny")
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(0, config.vocab_size, (n,), generator=generator) for n in LENGTHS]
    found = []
    for device in ("cpu", "cuda"):
        model, packed = K3Model(config, seed=1, device=device), TokenBatch.pack(parts)
        batch = TokenBatch(packed.ids.to(device), packed.cu_seqlens.to(device))
        logprob = model.token_logprobs(model(batch).hidden, batch.ids.roll(-1), 1.0).logprob
        logprob.sum().backward()
        found.append(
            (logprob.detach().cpu(), {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None})
        )
    (cpu, cpu_grads), (gpu, gpu_grads) = found
    relative = max(float((gpu_grads[n] - g).norm() / g.norm().clamp(min=1e-12)) for n, g in cpu_grads.items())
    ids, one = parts[-1].cuda(), torch.tensor([0, 1], device="cuda")
    pieces = []
    with torch.no_grad():
        model = K3Model(config, seed=1, device="cuda")
        whole = model(TokenBatch(ids, torch.tensor([0, len(ids)], device="cuda"))).hidden
        cache: Any = ValueCache.empty(config, 1, device="cuda")
        for t in range(len(ids)):
            out = model(TokenBatch(ids[t : t + 1], one), cache)
            cache = out.cache
            pieces.append(out.hidden)
    decoded = float((torch.cat(pieces) - whole).abs().max())
    shape = f"k3_tiny, {sum(LENGTHS)} tokens"
    return [
        row("largest difference of a logprob, GPU and CPU", shape, float((cpu - gpu).abs().max()), "nats", 1e-4),
        row("largest relative difference of a gradient, GPU and CPU", shape, relative, "1", 1e-4),
        row(
            "largest difference of a hidden state, decoded and whole", f"k3_tiny, {len(ids)} tokens", decoded, "1", 1e-4
        ),
    ]


def step(tokens: int) -> list[dict[str, Any]]:
    """Forward and backward of k3_nano, float32 reference path."""
    model = K3Model(model_config("k3_nano"), device="cuda")
    ids = torch.randint(0, model.config.vocab_size, (tokens,), device="cuda")
    bounds = torch.tensor([0, tokens], device="cuda")
    times = []
    for _ in range(4):
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        hidden = model(TokenBatch(ids, bounds)).hidden
        model.token_logprobs(hidden, ids.roll(-1), 1.0).logprob.mean().backward()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    shape = f"k3_nano, {tokens} tokens"
    return [
        row("forward and backward, float32 reference", shape, statistics.median(times[1:]), "s"),
        row("peak memory, float32 reference", shape, torch.cuda.max_memory_allocated() / 2**30, "GiB"),
    ]


def main() -> None:
    """Measure and write."""
    torch.backends.cuda.matmul.allow_tf32 = False
    environment = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }
    rows = [*differences(), *step(4096)]
    command = "python benchmarks/model_on_gpu.py RESULT.json"
    text = json.dumps({"command": command, "environment": environment, "rows": rows}, indent=1)
    Path(sys.argv[1]).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
