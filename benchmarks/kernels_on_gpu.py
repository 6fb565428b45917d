"""Kernels on a GPU: right first, then timed: `python benchmarks/kernels_on_gpu.py RESULT.json`.

Needs torch and triton; compares with fla-core where it can be imported. Times are medians of CUDA graph replays over
inputs that change from replay to replay, so that no input is found in the L2 cache. The floor is bytes that must move
over the bandwidth of a copy measured in the same run. Rows have the form that `k3rl bench` writes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from k3rl.kernels.kda import TilePlan, kda_chunk, kda_packed, kda_recurrent  # noqa: E402

REGIMES = {"random": 0.0, "long memory": -8.5, "saturated": 9.0}
"""What is added to the gate's input: log decay near -2.5, -1e-3 and -5 a token."""
SHAPES = ((8192, 64), (4096, 16), (32768, 32), (32768, 16))  # T, H of the forward
WIDTH = 128
COPIES = 4  # of all inputs


def row(what: str, shape: str, unit: str, ours: float, **fields: Any) -> dict[str, Any]:
    found = {"baseline": None, "baseline_name": None, "floor": None, "goal": None, **fields}
    holds = None if found["goal"] is None else ours <= found["goal"]
    return {"what": what, "shape": shape, "ours": ours, **found, "unit": unit, "holds": holds}


def kda_inputs(rows: int, heads: int, shift: float, seed: int, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """q, k, v, z, b, A_log, dt_bias."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32)

    wide = [normal(rows, heads, WIDTH).to(dtype) for _ in range(4)]
    bias = normal(heads, WIDTH) * 0.1 + shift
    return [*wide, normal(rows, heads).to(dtype), torch.zeros(heads, device="cuda"), bias]


def poison() -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    for size in (2**20, 2**24, 2**28):
        torch.full((size,), torch.nan, device="cuda")


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm; NaN stays NaN."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def kda_errors() -> list[dict[str, Any]]:
    """Against the float64 recurrence of the same rounded inputs, three gates, two types."""
    rows = []
    for regime, shift in REGIMES.items():
        for dtype, goal in ((torch.float32, 2e-5), (torch.bfloat16, 8e-3)):
            inputs = kda_inputs(1000, 4, shift, 1, dtype)
            cu_seqlens = torch.tensor([0, 1000], device="cuda")
            state = torch.randn(1, 4, WIDTH, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(2))
            poison()
            out, final = kda_chunk(*inputs, plan=TilePlan.make(cu_seqlens, 1000), initial_state=state)
            wide: Any = [x.double() for x in inputs]
            want = kda_packed(*wide, cu_seqlens=cu_seqlens, initial_state=state.double(), form=kda_recurrent)
            shape = f"T=1000 H=4, {regime} gate, {str(dtype)[6:]}"
            rows.append(row("KDA forward, relative error of outputs", shape, "1", relative(out, want[0]), goal=goal))
            rows.append(row("KDA forward, relative error of state", shape, "1", relative(final, want[1]), goal=goal))
    return rows


def kda_bits() -> list[dict[str, Any]]:
    """Bits that must not change: count of elements that differ."""
    lengths = (1, 15, 0, 16, 17, 700, 64, 2000)
    total, inputs = sum(lengths), kda_inputs(sum(lengths), 4, 0.0, 3)
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    packed, _ = kda_chunk(*inputs, plan=TilePlan.make(bounds, total))
    alone = repeats = prefix = 0
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        for stop in {end, begin + (end - begin) // 2} - {begin}:
            part: Any = [x[begin:stop] for x in inputs[:5]]
            plan = TilePlan.make(torch.tensor([0, stop - begin], device="cuda"), stop - begin)
            differ = int((kda_chunk(*part, *inputs[5:], plan=plan)[0] != packed[begin:stop]).sum())
            alone, prefix = (alone + differ, prefix) if stop == end else (alone, prefix + differ)
    for _ in range(10):
        poison()
        repeats += int((kda_chunk(*inputs, plan=TilePlan.make(bounds, total))[0] != packed).sum())
    shape = f"lengths {lengths}, H=4"
    return [
        row("KDA forward, outputs that differ alone and in a pack", shape, "elements", alone, goal=0),
        row("KDA forward, outputs that differ in a shorter sequence", shape, "elements", prefix, goal=0),
        row("KDA forward, outputs that differ in ten repeats", shape, "elements", repeats, goal=0),
    ]


def graph_ms(calls: list[Callable[[], Any]], replays: int = 12) -> float:
    """Median time of one of ``calls``, captured together in a CUDA graph and replayed."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for i in range(replays + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) / len(calls))
    return statistics.median(times)


def fla_forward(inputs: list[Any]) -> Callable[[], Any]:
    """fla's ``chunk_kda`` of the same inputs."""
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

    q, k, v, z, b = (x.unsqueeze(0) for x in inputs[:5])
    switches = dict.fromkeys(
        ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate"), True
    )
    fixed = {"A_log": inputs[5], "dt_bias": inputs[6].flatten(), "lower_bound": -5.0, "output_final_state": True}
    return lambda: chunk_kda(q, k, v, z, b, **fixed, **switches)


def kda_times(bandwidth: float) -> Iterator[dict[str, Any]]:
    """Forward without gradient, bf16."""
    has_fla = importlib.util.find_spec("fla") is not None
    for length, heads in SHAPES:
        # q, k, v, z and the output once, each of two bytes.
        floor = 5 * 2 * length * heads * WIDTH / bandwidth * 1e3
        plan = TilePlan.make(torch.tensor([0, length], device="cuda"), length)
        for regime, shift in REGIMES.items():
            copies = [kda_inputs(length, heads, shift, seed) for seed in range(COPIES)]
            with torch.no_grad():
                ours = graph_ms([lambda x=x, plan=plan: kda_chunk(*x, plan=plan) for x in copies])
                theirs = graph_ms([fla_forward(x) for x in copies]) if has_fla else None
            yield row(
                "KDA forward",
                f"T={length} H={heads} K=V=128, {regime} gate, bfloat16",
                "ms",
                ours,
                baseline=theirs,
                baseline_name=None if theirs is None else "fla-core chunk_kda",
                floor=floor,
                goal=None if theirs is None else theirs / (3 if (length, heads) == (32768, 16) else 2.5),
            )


def copy_bandwidth() -> float:
    """Bytes read and written in a second by a copy of 2 GiB."""
    source = torch.zeros(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / graph_ms([lambda: torch.mul(source, 2, out=target)]) * 1e3


def environment() -> dict[str, Any]:
    """Where the figures are from."""
    import triton

    bundled = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    ptxas = os.environ.get("TRITON_PTXAS_PATH", str(bundled))
    version = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "card": torch.cuda.get_device_name(),
        "driver": subprocess.run(smi, capture_output=True, text=True, check=True).stdout.strip(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "ptxas": version.split("release ")[-1].split("\n")[0],
        "python": sys.version.split()[0],
        "fla-core": importlib.metadata.version("fla-core") if importlib.util.find_spec("fla") else None,
    }


def main() -> None:
    """Measure and write."""
    torch.backends.cuda.matmul.allow_tf32 = False
    checks = [*kda_errors(), *kda_bits()]
    for check in checks:
        print(check, flush=True)
    if not all(check["holds"] for check in checks):
        raise SystemExit("a kernel is wrong: nothing is timed")
    bandwidth = copy_bandwidth()
    rows = [row("copy of 2 GiB", "read and written", "TB/s", bandwidth / 1e12), *checks]
    command = "python benchmarks/kernels_on_gpu.py RESULT.json"
    # Written after every row: a machine's time may end before the list does.
    for timed in kda_times(bandwidth):
        rows.append(timed)
        print(timed, flush=True)
        text = json.dumps({"command": command, "environment": environment(), "rows": rows}, indent=1)
        Path(sys.argv[1]).write_text(text + "\n")


if __name__ == "__main__":
    main()
