"""Evaluate an arithmetic expression that a policy wrote: no ``eval``, bounded length, size and exponent.

Cost is bounded by construction, and a deadline is checked at every operation.
"""

from __future__ import annotations

import ast
import math
import operator
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_CHARS = 200
MAX_BITS = 2048
MAX_EXPONENT = 256
_Number = int | float
_BINARY: dict[type[ast.operator], Callable[[_Number, _Number], _Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class CalculatorError(ValueError):
    """The expression is none, or is too large."""


def calculate(expression: str, deadline_s: float = 0.1) -> str:
    """Value of an expression of numbers, ``+ - * / // % **`` and parentheses; whole results without a point.

    Raises:
        CalculatorError: not such an expression, too large, not finite, division by zero or past the deadline.
    """
    if len(expression) > MAX_CHARS:
        raise CalculatorError(f"longer than {MAX_CHARS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        value = _evaluate(tree.body, time.monotonic() + deadline_s)
    except (SyntaxError, RecursionError, MemoryError, ZeroDivisionError, OverflowError) as error:
        raise CalculatorError(type(error).__name__) from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value)


def _evaluate(node: ast.expr, deadline: float) -> _Number:
    if time.monotonic() > deadline:
        raise CalculatorError("too slow")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _check(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _evaluate(node.operand, deadline)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left, deadline), _evaluate(node.right, deadline)
        if isinstance(node.op, ast.Pow):
            return _check(_power(left, right))
        if type(node.op) in _BINARY:
            return _check(_BINARY[type(node.op)](left, right))
    raise CalculatorError("only numbers, + - * / // % ** and parentheses")


def _power(base: _Number, exponent: _Number) -> _Number:
    if abs(exponent) > MAX_EXPONENT:
        raise CalculatorError("exponent too large")
    if isinstance(base, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise CalculatorError("number too large")
    return base**exponent


def _check(value: object) -> _Number:
    if isinstance(value, int) and value.bit_length() <= MAX_BITS:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise CalculatorError("number too large or not real")
