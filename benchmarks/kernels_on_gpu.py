"""Kernels on a GPU: right first, then timed: `python benchmarks/kernels_on_gpu.py RESULT.json [SECTION ...]`.

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
# T, H. fla tunes its kernels for each H at first sight, the backward's for minutes: H changes as seldom as it can.
GRADIENT_SHAPES = ((4096, 16), (32768, 16), (8192, 64))
SHAPES = ((8192, 64), (4096, 16), (32768, 16), (32768, 32))
GRADIENTS = ("q", "k", "v", "z", "b", "A_log", "dt_bias", "initial state")
WIDTH = 128
COPIES = 4  # of all inputs
HAS_FLA = importlib.util.find_spec("fla") is not None
BASELINE = "fla-core chunk_kda"


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


def kda_results(
    run: Callable[..., Any], inputs: list[Any], weights: list[torch.Tensor], **options: Any
) -> list[torch.Tensor]:
    """Outputs, state and the eight gradients of what ``run`` makes of the inputs, the initial state last of them."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = run(*leaves[:7], initial_state=leaves[7], **options)
    wanted = [w.to(x.dtype) for w, x in zip(weights, results, strict=True)]
    return [*(x.detach() for x in results), *torch.autograd.grad(results, leaves, wanted)]


def with_state(inputs: list[Any], sequences: int, seed: int) -> tuple[list[Any], list[torch.Tensor]]:
    """The inputs with initial states, and gradients of outputs and final states."""
    generator = torch.Generator("cuda").manual_seed(seed)
    rows, heads = inputs[0].shape[:2]
    states = torch.randn(2, sequences, heads, WIDTH, WIDTH, device="cuda", generator=generator)
    out = torch.randn(rows, heads, WIDTH, device="cuda", generator=generator).to(inputs[0].dtype)
    return [*inputs, states[0]], [out, states[1]]


def kda_errors() -> Iterator[dict[str, Any]]:
    """Against the float64 recurrence of the same rounded inputs, three gates, two types."""
    length, heads = 1000, 16
    cu_seqlens = torch.tensor([0, length], device="cuda")
    plan = TilePlan.make(cu_seqlens, length)
    for regime, shift in REGIMES.items():
        for dtype, goal in ((torch.float32, 2e-5), (torch.bfloat16, 8e-3)):
            inputs, weights = with_state(kda_inputs(length, heads, shift, 1, dtype), 1, 2)
            poison()
            got = kda_results(kda_chunk, inputs, weights, plan=plan)
            wide = [x.double() for x in inputs]
            want = kda_results(kda_packed, wide, weights, cu_seqlens=cu_seqlens, form=kda_recurrent)
            theirs = [None] * len(got)
            if dtype == torch.bfloat16 and HAS_FLA:
                theirs = [
                    relative(x.reshape(w.shape), w) for x, w in zip(fla_results(inputs, weights), want, strict=True)
                ]
            shape = f"T={length} H={heads}, {regime} gate, {str(dtype)[6:]}"
            names = ["forward, relative error of outputs", "forward, relative error of state"]
            names += [f"backward, relative error of the gradient of {x}" for x in GRADIENTS]
            for name, x, w, other in zip(names, got, want, theirs, strict=True):
                # Sums of products of both signs: fla's own tests allow them as much.
                loose = 2.5 if name.endswith((" b", " A_log")) else 1.0
                fields = {"goal": goal * loose, "baseline": other, "baseline_name": None if other is None else BASELINE}
                yield row(f"KDA {name}", shape, "1", relative(x, w), **fields)


def differing(left: list[torch.Tensor], right: list[torch.Tensor]) -> int:
    return sum(int((x != y).sum()) for x, y in zip(left, right, strict=True))


def kda_bits() -> list[dict[str, Any]]:
    """Bits that must not change: count of elements that differ."""
    lengths = (1, 15, 0, 16, 17, 700, 64, 2000)
    total = sum(lengths)
    inputs, weights = with_state(kda_inputs(total, 16, 0.0, 3), len(lengths), 4)
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    packed = kda_results(kda_chunk, inputs, weights, plan=TilePlan.make(bounds, total))
    per_row = [0, 2, 3, 4, 5, 6]  # of the results: outputs, gradients of q to b
    counts = dict.fromkeys(("alone and in a pack", "in a shorter sequence", "in ten repeats", "without a gradient"), 0)
    for n, (begin, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        for stop in {end, begin + (end - begin) // 2} - {begin}:
            part = [*(x[begin:stop] for x in inputs[:5]), *inputs[5:7], inputs[7][n : n + 1]]
            plan = TilePlan.make(torch.tensor([0, stop - begin], device="cuda"), stop - begin)
            got = kda_results(kda_chunk, part, [weights[0][begin:stop], weights[1][n : n + 1]], plan=plan)
            if stop == end:
                mine = [packed[i][begin:stop] for i in per_row] + [packed[i][n : n + 1] for i in (1, 9)]
                counts["alone and in a pack"] += differing([got[i] for i in (*per_row, 1, 9)], mine)
            else:
                counts["in a shorter sequence"] += differing(got[:1], [packed[0][begin:stop]])
    for _ in range(10):
        poison()
        again = kda_results(kda_chunk, inputs, weights, plan=TilePlan.make(bounds, total))
        counts["in ten repeats"] += differing(again, packed)
    with torch.no_grad():
        plain = kda_chunk(*inputs[:7], initial_state=inputs[7], plan=TilePlan.make(bounds, total))
    counts["without a gradient"] = differing(list(plain), packed[:2])
    shape = f"lengths {lengths}, H=16"
    return [row(f"KDA, results that differ {name}", shape, "elements", n, goal=0) for name, n in counts.items()]


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


def fla_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor | None = None,
) -> Any:
    """fla's ``chunk_kda`` of the same inputs."""
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

    rows = (x.unsqueeze(0) for x in (q, k, v, z, b))
    switches = dict.fromkeys(
        ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate"), True
    )
    fixed = {"A_log": A_log, "dt_bias": dt_bias.flatten(), "lower_bound": -5.0, "output_final_state": True}
    return chunk_kda(*rows, initial_state=initial_state, **fixed, **switches)


def fla_results(inputs: list[Any], weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return kda_results(fla_kda, inputs, [weights[0].unsqueeze(0), weights[1]])


def kda_times(bandwidth: float) -> Iterator[dict[str, Any]]:
    """Forward without gradient, bf16."""
    for length, heads in SHAPES:
        # q, k, v, z and the output once, each of two bytes.
        floor = 5 * 2 * length * heads * WIDTH / bandwidth * 1e3
        plan = TilePlan.make(torch.tensor([0, length], device="cuda"), length)
        for regime, shift in REGIMES.items():
            copies = [kda_inputs(length, heads, shift, seed) for seed in range(COPIES)]
            with torch.no_grad():
                ours = graph_ms([lambda x=x, plan=plan: kda_chunk(*x, plan=plan) for x in copies])
                theirs = graph_ms([lambda x=x: fla_kda(*x) for x in copies]) if HAS_FLA else None
            part = 3 if (length, heads) == (32768, 16) else 2.5
            yield timed_row("KDA forward", length, heads, regime, ours, theirs, floor, part)


def kda_gradient_times(bandwidth: float) -> Iterator[dict[str, Any]]:
    """Forward and backward, bf16, with a gradient of the outputs alone."""
    for length, heads in GRADIENT_SHAPES:
        # The forward's five; q, k, v, z and the outputs' gradient again, four gradients.
        floor = 14 * 2 * length * heads * WIDTH / bandwidth * 1e3
        plan = TilePlan.make(torch.tensor([0, length], device="cuda"), length)
        for regime, shift in REGIMES.items():
            copies = [[x.requires_grad_() for x in kda_inputs(length, heads, shift, seed)] for seed in range(COPIES)]
            wanted = torch.randn_like(copies[0][2])

            def ours(x: list[Any], plan: TilePlan = plan, wanted: torch.Tensor = wanted) -> Any:
                return torch.autograd.grad(kda_chunk(*x, plan=plan)[0], x, wanted)

            def theirs(x: list[Any], wanted: torch.Tensor = wanted) -> Any:
                return torch.autograd.grad(fla_kda(*x)[0], x, wanted.unsqueeze(0))

            times = [
                graph_ms([lambda x=x, run=run: run(x) for x in copies]) if run is ours or HAS_FLA else None
                for run in (ours, theirs)
            ]
            assert times[0] is not None
            yield timed_row("KDA forward and backward", length, heads, regime, times[0], times[1], floor, 1.3)


def timed_row(
    what: str, length: int, heads: int, regime: str, ours: float, theirs: float | None, floor: float, part: float
) -> dict[str, Any]:
    """A time in ms; the goal is fla's over ``part``."""
    found = {} if theirs is None else {"baseline": theirs, "baseline_name": BASELINE, "goal": theirs / part}
    return row(what, f"T={length} H={heads} K=V={WIDTH}, {regime} gate, bfloat16", "ms", ours, floor=floor, **found)


def kda_parts() -> Iterator[dict[str, Any]]:
    """Time of each kernel in a forward and backward."""
    length, heads = SHAPES[0]
    plan = TilePlan.make(torch.tensor([0, length], device="cuda"), length)
    inputs = [x.requires_grad_() for x in kda_inputs(length, heads, 0.0, 0)]
    wanted, runs = torch.randn_like(inputs[2]), 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            torch.autograd.grad(kda_chunk(*inputs, plan=plan)[0], inputs, wanted)
        torch.cuda.synchronize()
    for event in profile.key_averages():
        name, spent = event.key, event.self_device_time_total / runs / 1e3
        if spent >= 0.005:
            shape = f"T={length} H={heads} K=V={WIDTH}, random gate, bfloat16"
            yield row(f"KDA forward and backward, {name[:60]} alone", shape, "ms", spent)


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
        "fla-core": importlib.metadata.version("fla-core") if HAS_FLA else None,
    }


CHECKS = ("errors", "bits")
SECTIONS = (*CHECKS, "parts", "backward", "forward")


def main() -> None:
    """Measure and write."""
    torch.backends.cuda.matmul.allow_tf32 = False
    target, *chosen = sys.argv[1:]
    if unknown := set(chosen) - set(SECTIONS):
        raise SystemExit(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    bandwidth = copy_bandwidth()
    rows = [row("copy of 2 GiB", "read and written", "TB/s", bandwidth / 1e12)]
    measures: dict[str, Callable[[], Any]] = {
        "errors": kda_errors,
        "bits": kda_bits,
        "backward": lambda: kda_gradient_times(bandwidth),
        "parts": kda_parts,
        "forward": lambda: kda_times(bandwidth),
    }
    for section in chosen or SECTIONS:
        if section not in CHECKS and not all(r["holds"] for r in rows[1:] if r["unit"] != "ms"):
            raise SystemExit("a kernel is wrong: nothing is timed")
        for measured in measures[section]():
            rows.append(measured)
            print(measured, flush=True)
            # Written after every row: a machine's time may end before the list does.
            command = f"python benchmarks/kernels_on_gpu.py RESULT.json {' '.join(chosen)}".rstrip()
            text = json.dumps({"command": command, "environment": environment(), "rows": rows}, indent=1)
            Path(target).write_text(text + "\n")


if __name__ == "__main__":
    main()
