"""The compact format: as few tokens as a small model needs to learn tool use in minutes.

::

    <|user|>price of bokip<|end|><|asst|>                         prompt
    <|call|>find<|arg|>bokip<|end|>                               action
    <|tool|>417<|end|><|asst|>                                    observation
    <|call|>order<|arg|>417<|arg|>2<|end|>                        action: arguments in the order of the schema
    <|call|>plot<|json|>{"points": [1, 2]}<|end|>                 action: whatever the plain form cannot say
    <|ans|>12<|end|>                                              action

An argument is plain text when the schema's type gives the same value back (``2`` for an integer, ``002`` stays a
string); otherwise all arguments of the call are one JSON object. Several calls follow each other before ``<|end|>``,
and an answer may come after them. Tools are not declared in the prompt: a model of this size learns them by heart.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from k3rl.envs.base import AssistantAction, Message, ParseError, ToolCall
from k3rl.rollout.formats.pieces import Piece, split_turn
from k3rl.rollout.formats.strict_json import ParseFailure, check_name, dump_json, parse_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k3rl.model.tokenizer import Tokenizer

_OPENERS = {"system": "<|sys|>", "user": "<|user|>", "tool": "<|tool|>"}
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_FLOAT = re.compile(r"-?[0-9]{1,17}\.[0-9]{1,17}")


class CompactFormat:
    """Renders and parses the compact format. ``tools`` give the order and types of plain arguments."""

    MARKERS = ("<|end|>", "<|sys|>", "<|user|>", "<|asst|>", "<|tool|>", "<|call|>", "<|arg|>", "<|json|>", "<|ans|>")
    WORDS = ("true", "false", "null")

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = {name: tokenizer.marker(name) for name in self.MARKERS}
        self._parameters = {tool["name"]: _parameter_types(tool) for tool in tools}

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text between the markers."""
        return self._tokenizer

    @property
    def stop_ids(self) -> frozenset[int]:
        """The id of ``<|end|>``."""
        return frozenset((self._ids["<|end|>"],))

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of the messages and ``<|asst|>``. ``tools`` are not declared in this format."""
        return self.render_observation(messages)

    def render_observation(self, messages: Sequence[Message]) -> list[int]:
        """Ids of new messages and ``<|asst|>``. Tool results have no number in this format."""
        ids: list[int] = []
        for message in messages:
            if message.role == "assistant":
                ids.append(self._ids["<|asst|>"])
                ids += self.render_action(AssistantAction.of(message))
            else:
                ids += self._section(_OPENERS[message.role], message.content)
                ids.append(self._ids["<|end|>"])
        return [*ids, self._ids["<|asst|>"]]

    def render_action(self, action: AssistantAction) -> list[int]:
        """Ids of calls and answer and ``<|end|>``; ValueError for an action with an error, or with nothing."""
        if action.error is not None or (not action.calls and action.answer is None):
            raise ValueError("an action to render has calls or an answer, and no error")
        ids: list[int] = []
        for call in action.calls:
            if call.invalid_json is not None:
                raise ValueError(f"the arguments of {call.name!r} are no JSON, which this format has no place for")
            ids += self._section("<|call|>", check_name(call.name))
            ids += self._render_arguments(call)
        if action.answer is not None:
            ids += self._section("<|ans|>", action.answer)
        return [*ids, self._ids["<|end|>"]]

    def parse_action(self, ids: Sequence[int]) -> AssistantAction:
        """Calls, an answer, or an error (no_stop, malformed, bad_json, duplicate_key, too_deep, too_long)."""
        try:
            return self._parse_pieces(split_turn(self._tokenizer, ids, "<|end|>"))
        except ParseFailure as failure:
            text = self._tokenizer.decode(ids)
            return AssistantAction(error=ParseError(kind=failure.kind, message=str(failure), text=text), text=text)

    def _section(self, marker: str, text: str) -> list[int]:
        return [self._ids[marker], *self._tokenizer.encode(text)]

    def _render_arguments(self, call: ToolCall) -> list[int]:
        plain = self._plain_arguments(call)
        if plain is None:
            return self._section("<|json|>", dump_json(call.arguments))
        return [i for text in plain for i in self._section("<|arg|>", text)]

    def _plain_arguments(self, call: ToolCall) -> list[str] | None:
        """Arguments as plain texts in the schema's order, or None when one would not come back as it is."""
        types = self._parameters.get(call.name, {})
        names = list(types)[: len(call.arguments)]
        if set(names) != set(call.arguments):
            return None
        texts = []
        for name in names:
            value = call.arguments[name]
            text = str(value).lower() if isinstance(value, bool) else str(value)
            back = _from_plain(text, types[name])
            if type(back) is not type(value) or back != value:
                return None
            texts.append(text)
        return texts

    def _parse_pieces(self, pieces: list[Piece]) -> AssistantAction:
        calls: list[ToolCall] = []
        at = 0
        while at < len(pieces) and pieces[at].marker == "<|call|>":
            end = at + 1
            while end < len(pieces) and pieces[end].marker in ("<|arg|>", "<|json|>"):
                end += 1
            calls.append(self._parse_call(check_name(pieces[at].text), pieces[at + 1 : end]))
            at = end
        rest = pieces[at:]
        if not rest:
            return AssistantAction(calls=tuple(calls))
        if len(rest) > 1 or rest[0].marker != "<|ans|>":
            found = rest[1 if rest[0].marker == "<|ans|>" else 0].marker or "text"
            raise ParseFailure("malformed", f"a turn is <|call|>s, then at most one <|ans|>; {found} has no place here")
        return AssistantAction(calls=tuple(calls), answer=rest[0].text)

    def _parse_call(self, name: str, pieces: list[Piece]) -> ToolCall:
        if any(piece.marker == "<|json|>" for piece in pieces):
            if len(pieces) > 1:
                raise ParseFailure("malformed", "<|json|> holds all arguments of a call, so it stands alone")
            arguments = parse_json(pieces[0].text)
            if not isinstance(arguments, dict):
                raise ParseFailure("bad_json", "<|json|> holds an object of arguments")
            return ToolCall(name=name, arguments=arguments)
        types = self._parameters.get(name, {})
        # An unknown tool or one argument too many is kept, so that the environment can say what is wrong with it.
        surplus = {f"#{i}": "string" for i in range(len(types) + 1, len(pieces) + 1)}
        named = zip({**types, **surplus}.items(), pieces, strict=False)
        return ToolCall(name=name, arguments={key: _from_plain(piece.text, kind) for (key, kind), piece in named})


def _parameter_types(tool: Mapping[str, Any]) -> dict[str, Any]:
    properties = tool.get("parameters", {}).get("properties", {})
    return {name: schema.get("type") for name, schema in properties.items()}


def _from_plain(text: str, kind: Any) -> Any:
    """The value of plain ``text`` for a parameter of type ``kind``: itself, unless it is the type's canonical text."""
    if kind in ("integer", "number") and _INTEGER.fullmatch(text):
        return int(text)
    if kind == "number" and _FLOAT.fullmatch(text) and repr(float(text)) == text:
        return float(text)
    if kind == "boolean" and text in ("true", "false"):
        return text == "true"
    return text
