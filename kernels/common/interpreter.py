"""Triton's interpreter made right for bf16, so that kernels can be tested on a CPU.

Triton 3.6 keeps bf16 as uint16 bit patterns and computes with the patterns. Here every elementwise operation and
product of bf16 widens to float32, computes, and rounds to nearest even, as the GPU does; a reduction is refused. Set
TRITON_INTERPRET=1 before a kernel is defined.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder
_done: list[bool] = []
BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)


def _is_bf16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def widen(bits: np.ndarray) -> np.ndarray:
    """Bf16 bit patterns to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Float32 to bf16 bit patterns, to nearest even; a NaN stays one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest.astype(np.uint16))


def _wide(handle: Any) -> Any:
    return Handle(widen(handle.data), tl.float32) if _is_bf16(handle) else handle


def _widened(original: Any) -> Any:
    """The operation on float32, its result rounded back unless it is a comparison's."""

    def run(self: Any, *args: Any) -> Any:
        *handles, op = args
        if not any(_is_bf16(h) for h in handles) or op in (*BITWISE, np.where):
            return original(self, *args)
        out = original(self, *(_wide(h) for h in handles), op)
        return Handle(narrow(out.data), tl.bfloat16) if out.dtype.scalar == tl.float32 else out

    return run


def _cast(original: Any) -> Any:
    def run(self: Any, source: Any, target: Any) -> Any:
        if _is_bf16(source) == (target.scalar == tl.bfloat16):
            return original(self, source, target)
        if _is_bf16(source):
            return original(self, _wide(source), target)
        return Handle(narrow(source.data.astype(np.float32)), tl.bfloat16)

    return run


def _cast_rounding(original: Any, cast: Any) -> Any:
    def run(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if tl.bfloat16 in (source.dtype.scalar, target.scalar):
            return cast(self, source, target)
        return original(self, source, target, rounding)

    return run


def _dot(original: Any) -> Any:
    def run(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return original(self, _wide(left), _wide(right), *rest)

    return run


def _refused(original: Any) -> Any:
    def run(self: Any, inputs: Any) -> Any:
        if any(_is_bf16(x.handle) for x in (inputs if isinstance(inputs, tuple) else (inputs,))):
            raise TypeError("a reduction or scan of bf16: widen to float32 first, as its sum should be")
        return original(self, inputs)

    return run


def _index(tensor: Any) -> int:
    return int(np.asarray(tensor.handle.data).item())


def _patch_tensor(original: Any) -> Any:
    """numpy 2.4 refuses int() of an array of one element, by which Triton reads a loop's bound."""

    def run(tensor: Any, scope: Any) -> Any:
        result = original(tensor, scope)
        scope.set_attr(tensor, "__index__", _index)
        return result

    return run


def make_interpreter_right() -> None:
    """Patch Triton's interpreter in this process; a second call changes nothing."""
    if _done:
        return
    for name in ("binary_op", "unary_op", "ternary_op"):
        setattr(Builder, name, _widened(getattr(Builder, name)))
    Builder.cast_impl = _cast(Builder.cast_impl)
    Builder.create_fp_to_fp = _cast_rounding(Builder.create_fp_to_fp, Builder.cast_impl)
    Builder.create_dot = _dot(Builder.create_dot)
    for operation in (interpreter.ReduceOps, interpreter.ScanOps):
        operation.apply = _refused(operation.apply)
    # The interpreter's products are exact in float32, whatever precision is named.
    options = interpreter.interpreter_builder.options
    object.__setattr__(options, "allowed_dot_input_precisions", ("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6"))
    interpreter._patch_lang_tensor = _patch_tensor(interpreter._patch_lang_tensor)
    _done.append(True)
