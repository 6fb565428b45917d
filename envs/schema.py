"""Arguments of a tool: JSON schema from its signature, lossless coercion, strict validation.

Models write ``"42"`` for 42 and ``1`` for true. A value is changed only where the schema does not admit it as it is and
exactly one value of the schema says the same; everything else is a typed error that names the argument.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import typing
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, ValidationError, create_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}", re.ASCII)
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?", re.ASCII)
_MAX_DEPTH = 32


class ArgumentError(ValueError):
    """An argument does not fit its schema; the message begins with the argument's name."""


class Parameters:
    """The parameters of one tool method."""

    def __init__(self, method: Callable[..., Any]) -> None:
        hints = typing.get_type_hints(method)
        fields: dict[str, Any] = {}
        for name, parameter in list(inspect.signature(method).parameters.items())[1:]:
            if name not in hints:
                raise TypeError(f"tool {method.__name__}: parameter {name!r} has no type")
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            fields[name] = (hints[name], default)
        config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
        self._model = create_model(method.__name__, __config__=config, **fields)
        self.schema: dict[str, Any] = self._model.model_json_schema()
        self._types = {name: admitted_types(s) for name, s in self.schema.get("properties", {}).items()}
        self._names = tuple(fields)

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Coerce and validate.

        Raises:
            ArgumentError: names the argument and what is wrong with it.
        """
        coerced = {name: coerce(name, value, self._types.get(name, ())) for name, value in arguments.items()}
        try:
            # As JSON, which has no enumerations, tuples or dates: what stands for them is taken.
            model = self._model.model_validate_json(json.dumps(coerced))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ArgumentError(f"{where[:40]}: {first['msg']}") from None
        return {name: getattr(model, name) for name in self._names}


def admitted_types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """JSON type names that ``schema`` admits at its top; empty when it does not say."""
    kind = schema.get("type")
    if kind is not None:
        return (kind,) if isinstance(kind, str) else tuple(kind)
    return tuple(t for part in schema.get("anyOf", ()) for t in admitted_types(part))


def coerce(name: str, value: Any, types: tuple[str, ...]) -> Any:
    """Return ``value``, or the value of one of ``types`` that says the same; ArgumentError for NaN and infinity."""
    _refuse_non_finite(name, value)
    if isinstance(value, str) and "string" not in types:
        return _from_text(name, value, types)
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return _from_number(value, types)
    return value


def _from_text(name: str, text: str, types: tuple[str, ...]) -> Any:
    if "integer" in types and _INTEGER.fullmatch(text):
        return int(text)
    if "number" in types and len(text) <= 64 and _NUMBER.fullmatch(text):
        number = float(text)
        _refuse_non_finite(name, number)
        return number
    if "boolean" in types and text in ("true", "false"):
        return text == "true"
    return text


def _from_number(value: int | float, types: tuple[str, ...]) -> Any:
    if "integer" in types and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if "integer" in types or "number" in types:
        return value
    if "boolean" in types and value in (0, 1):
        return bool(value)
    if "string" in types and isinstance(value, int) and abs(value) < 10**18:
        return str(value)
    return value


def _refuse_non_finite(name: str, value: Any, depth: int = 0) -> None:
    if depth > _MAX_DEPTH:
        raise ArgumentError(f"{name[:40]}: nested too deeply")
    if isinstance(value, float) and not math.isfinite(value):
        raise ArgumentError(f"{name[:40]}: a number must be finite")
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            _refuse_non_finite(name, part, depth + 1)
