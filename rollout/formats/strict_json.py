"""JSON that round-trips or is refused with a typed reason: no NaN, no infinity, no lost key, no deep nesting."""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_JSON_CHARACTERS = 1 << 20
MAX_JSON_DEPTH = 64
MAX_NAME_CHARACTERS = 1024
_MAX_INTEGER_DIGITS = 4300  # CPython refuses more: int() takes quadratic time
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)


class ParseFailure(ValueError):  # noqa: N818  (data on its way to a ParseError, not an error of ours)
    """Why text is not an action; the format's parser turns it into a ParseError."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def check_name(name: str) -> str:
    """Return ``name``; ParseFailure when it is too long to be one. Whether a tool has it, the environment says."""
    if len(name) > MAX_NAME_CHARACTERS:
        raise ParseFailure("too_long", f"a name of {len(name)} characters; at most {MAX_NAME_CHARACTERS} are allowed")
    return name


def parse_json(text: str) -> Any:
    """The value that ``text`` holds; ParseFailure of kind bad_json, duplicate_key, too_deep or too_long when none."""
    _check_size(text)
    try:
        return json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_parse_float,
            parse_int=_parse_int,
            object_pairs_hook=_make_object,
        )
    except ParseFailure:
        raise
    except RecursionError:
        raise ParseFailure("too_deep", "the JSON nests too deeply") from None
    except ValueError as error:
        raise ParseFailure("bad_json", f"not JSON: {error}") from None


def dump_json(value: Any) -> str:
    """``value`` with Python's default separators, non-ASCII kept; ValueError when ``parse_json`` would refuse it."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"an argument is not JSON: {error}") from error
    if parse_json(text) != value:
        raise ValueError("an argument does not survive JSON: objects have string keys, and lists are lists")
    return text


def _check_size(text: str) -> None:
    if len(text) > MAX_JSON_CHARACTERS:
        raise ParseFailure("too_long", f"JSON of {len(text)} characters; at most {MAX_JSON_CHARACTERS} are allowed")
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        first = text[match.start()]
        depth += (first in "[{") - (first in "]}")
        if depth > MAX_JSON_DEPTH:
            raise ParseFailure("too_deep", f"the JSON nests more than {MAX_JSON_DEPTH} levels")


def _refuse_constant(name: str) -> Any:
    raise ParseFailure("bad_json", f"{name} is not a JSON number")


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ParseFailure("bad_json", "a number is too large for a float")
    return value


def _parse_int(text: str) -> int:
    if len(text.lstrip("-")) > _MAX_INTEGER_DIGITS:
        raise ParseFailure("bad_json", f"an integer of more than {_MAX_INTEGER_DIGITS} digits")
    return int(text)


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        # The last one would win in silence, and a reader of the transcript may believe the first.
        raise ParseFailure("duplicate_key", "a JSON object has the same key twice")
    return made
