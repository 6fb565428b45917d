"""What a kernel takes of a Hopper GPU, by compiling it on any machine with Triton installed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one compiled kernel."""

    registers: int  # per thread
    stack_bytes: int  # per thread: what does not fit into registers
    shared_bytes: int  # per program
    wgmma: int  # instructions that an old ptxas may assemble wrongly
    mma: int


def compile_for_hopper(kernel: Any, signature: dict[str, str], constants: dict[str, Any], **options: int) -> Resources:
    """Compile for sm_90a.

    Args:
        kernel: a function under ``triton.jit``, defined without TRITON_INTERPRET.
        signature: type of each argument in Triton's notation, "constexpr" for the constants.
        constants: their values.
        options: num_warps, num_stages.
    """
    # Sixteen bytes: what torch's allocator guarantees of a tensor, and a launch on the GPU finds out by itself.
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled: Any = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        sass = subprocess.run([tool, "--dump-sass", file.name], capture_output=True, text=True, check=True).stdout
    fields = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    mma = len(re.findall(r"\bHMMA", sass))
    return Resources(int(fields["REG"]), int(fields["STACK"]), compiled.metadata.shared, sass.count("HGMMA"), mma)
