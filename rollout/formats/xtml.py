"""Kimi K3's message format: XML-like tags whose delimiters are tokens of their own, so that nothing needs escaping.

A tag opens as ``<|open|>name key="value"<|sep|>`` and closes as ``<|close|>name<|sep|>``. An assistant turn in thinking
mode, line breaks added::

    <|open|>message role="assistant"<|sep|><|open|>think<|sep|>                    generation prefix, prompt side
    {reasoning}<|close|>think<|sep|>                                               sampled from here
    <|open|>response<|sep|>{answer, may be empty}<|close|>response<|sep|>
    <|open|>tools<|sep|><|open|>call tool="find" index="1"<|sep|>
    <|open|>argument key="name" type="string"<|sep|>bokip<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|>
    <|close|>message<|sep|><|end_of_msg|>

Without thinking there is no think channel and the prefix opens ``response``. Strings are raw, other values JSON.
Each piece is encoded apart, as K3 does it (a tag name; an attribute's key, ``="``, value and closing quote; a text).

The system speaks in messages of its own: ``tool-declare`` before everything and wherever a message adds tools,
``thinking-effort`` behind the first, and, after all else so that no cached prefix changes, ``tool-choice`` and
``response-format``, which hold for the next turn alone. Their sentences (:class:`Wording`) are ours.
``xtml.jinja`` renders the same text for programs that take a chat template.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from k3rl.envs.base import AssistantAction, Message, ParseError, ToolCall
from k3rl.errors import ConfigError, suggest
from k3rl.rollout.formats.pieces import Piece, split_turn
from k3rl.rollout.formats.strict_json import ParseFailure, check_name, dump_json, parse_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k3rl.model.tokenizer import Tokenizer

Effort = Literal["low", "medium", "high", "max"]
ToolChoice = Literal["required", "none"]

_OPEN, _CLOSE, _SEP, _END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
_HEADER = re.compile(r'([a-z]+)((?: [a-z]+="[^"]*")*)')
_ATTRIBUTE = re.compile(r' ([a-z]+)="([^"]*)"')
_ENTITY = re.compile(r"&(amp|quot);")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wording:
    """What the system's own messages say; ``{json}`` and ``{effort}`` are filled in.

    The released K3 was trained with sentences of Moonshot's, which are in its own encoder: write them into a JSON file
    with these keys and name it as the option ``wording`` when you go on from that checkpoint.
    """

    tools: str = "# Tools\n\n```json\n{json}\n```"
    more_tools: str = "# More tools\n\nThese are added to the tools above.\n\n```json\n{json}\n```"
    effort: str = "Thinking effort: {effort}."
    tool_choice_required: str = "Tool choice: required. The next message calls a tool."
    tool_choice_none: str = "Tool choice: none. The next message calls no tool."
    json_object: str = "Response format: json_object. The response is one JSON object, no more."
    json_schema: str = (
        "Response format: json_schema. The response is JSON of this schema, no more.\n\n```json\n{json}\n```"
    )

    @staticmethod
    def load(path: str | Path) -> Wording:
        """Read a JSON file; what it does not give stays ours. ConfigError names what is wrong with it."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"chat_options.wording: {path} is no readable JSON: {error}") from error
        known = [f.name for f in fields(Wording)]
        if not isinstance(values, dict) or not all(isinstance(text, str) for text in values.values()):
            raise ConfigError(f"chat_options.wording: {path} must hold an object of strings")
        for key in values.keys() - set(known):
            raise ConfigError(
                f"chat_options.wording: {path} has an unknown key {key!r}; known are {', '.join(known)}."
                + suggest(key, known)
            )
        return Wording(**values)


class XtmlFormat:
    """Renders and parses XTML. ``effort`` is announced in thinking mode only; ``wording`` names a JSON file."""

    MARKERS = (_END, _OPEN, _CLOSE, _SEP)
    WORDS = (
        *("message", "role", "type", "system", "user", "assistant", "tool", "index", "think", "response", "tools"),
        *("call", "argument", "key", "string", "number", "boolean", "null", "object", "array", "true", "false"),
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        thinking: bool = False,
        effort: Effort | None = None,
        wording: str | Path | None = None,
    ) -> None:
        if effort is not None and not thinking:
            raise ConfigError("chat_options.effort: a matter of thinking mode; set thinking: true, or leave it out")
        if effort is not None and effort not in get_args(Effort):
            raise ConfigError(f"chat_options.effort: must be one of {', '.join(get_args(Effort))}, got {effort!r}")
        self._tokenizer = tokenizer
        self._ids = {name: tokenizer.marker(name) for name in self.MARKERS}
        self._thinking = thinking
        self._effort = effort
        self._fixed = functools.cache(tokenizer.encode)  # of tags and keys, which are few
        self._wording = Wording() if wording is None else Wording.load(wording)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text between the markers."""
        return self._tokenizer

    @property
    def stop_ids(self) -> frozenset[int]:
        """The id of ``<|end_of_msg|>``."""
        return frozenset((self._ids[_END],))

    def render_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        tool_choice: ToolChoice | None = None,
        response_format: Literal["json_object"] | Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of the tool declaration (if any), the effort (if set), the messages and the generation prefix.

        ``tool_choice`` and ``response_format`` (a mapping is a JSON schema) hold for the next turn alone.
        """
        ids: list[int] = []
        if tools:
            ids += self._declare(self._wording.tools, tools)
        if self._effort is not None:
            ids += self._system("thinking-effort", self._wording.effort.replace("{effort}", self._effort))
        ids += self._messages(messages)
        if tool_choice is not None:
            wanted = {"required": self._wording.tool_choice_required, "none": self._wording.tool_choice_none}
            ids += self._system("tool-choice", wanted[tool_choice])
        if response_format == "json_object":
            ids += self._system("response-format", self._wording.json_object)
        elif response_format is not None:
            ids += self._system(
                "response-format", self._wording.json_schema.replace("{json}", _sorted(response_format))
            )
        return ids + self._generation_prefix()

    def render_observation(self, messages: Sequence[Message]) -> list[int]:
        """Ids of new messages and the generation prefix; tool results are numbered since the last turn."""
        return self._messages(messages) + self._generation_prefix()

    def render_action(self, action: AssistantAction) -> list[int]:
        """Ids of the turn from the reasoning (``action.text``, thinking mode only) to ``<|end_of_msg|>``.

        ValueError for an action with an error or nothing, and for calls with an empty answer, which is no answer. Calls
        whose arguments are no JSON, which conversations recorded elsewhere have, are rendered and never parsed.
        """
        if action.error is not None or (not action.calls and action.answer is None):
            raise ValueError("an action to render has calls or an answer, and no error")
        if action.calls and action.answer == "":
            raise ValueError("beside calls an empty answer is no answer: say None")
        ids: list[int] = []
        if self._thinking:
            ids += self._tokenizer.encode(action.text) + self._close_tag("think") + self._open_tag("response")
        ids += self._tokenizer.encode(action.answer or "") + self._close_tag("response")
        if action.calls:
            ids += self._open_tag("tools")
            for index, call in enumerate(action.calls, 1):
                ids += self._render_call(call, index)
            ids += self._close_tag("tools")
        return [*ids, *self._close_tag("message"), self._ids[_END]]

    def parse_action(self, ids: Sequence[int]) -> AssistantAction:
        """Calls, an answer, or an error (no_stop, malformed, bad_json, duplicate_key, too_deep, too_long).

        In thinking mode ``text`` is the reasoning; of an error it is the whole turn.
        """
        try:
            return _parse_turn(_Reader(split_turn(self._tokenizer, ids, _END)), self._thinking)
        except ParseFailure as failure:
            text = self._tokenizer.decode(ids)
            return AssistantAction(error=ParseError(kind=failure.kind, message=str(failure), text=text), text=text)

    def chat_template(self) -> str:
        """A Jinja chat template, as Hugging Face's tokenizers take it, that renders the text of the same ids.

        It takes ``messages`` in OpenAI's form with arguments as objects, ``tools``, ``add_generation_prompt``,
        ``thinking``, ``thinking_effort``, ``tool_choice`` and ``response_format``. Text is all that it can give: a
        program that tokenises it again takes markers spelt inside a message for structure, which ids never do.
        """
        template = (Path(__file__).parent / "xtml.jinja").read_text(encoding="utf-8")
        values = {"wording": asdict(self._wording), "default_thinking": self._thinking, "default_effort": self._effort}
        settings = "".join(f"{{%- set {key} = {_jinja_literal(value)} -%}}\n" for key, value in values.items())
        return settings + template

    def _generation_prefix(self) -> list[int]:
        return self._open_tag("message", {"role": "assistant"}) + self._open_tag(
            "think" if self._thinking else "response"
        )

    def _messages(self, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        index = 1
        for message in messages:
            if message.role == "assistant":
                ids += self._generation_prefix() + self.render_action(AssistantAction.of(message))
                index = 1
            elif message.role == "tool":
                ids += self._message({"role": "tool", "tool": message.tool or "", "index": str(index)}, message.content)
                index += 1
            elif message.tools:
                ids += self._declare(self._wording.more_tools, message.tools)
            else:
                named = {} if message.name is None else {"name": message.name}
                ids += self._message({"role": message.role, **named}, message.content)
        return ids

    def _declare(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        wrapped = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
        return self._system("tool-declare", text.replace("{json}", _sorted(wrapped)))

    def _system(self, kind: str, text: str) -> list[int]:
        return self._message({"role": "system", "type": kind}, text)

    def _message(self, attributes: Mapping[str, str], content: str) -> list[int]:
        ids = self._open_tag("message", attributes) + self._tokenizer.encode(content)
        return [*ids, *self._close_tag("message"), self._ids[_END]]

    def _render_call(self, call: ToolCall, index: int) -> list[int]:
        ids = self._open_tag("call", {"tool": check_name(call.name), "index": str(index)})
        if call.invalid_json is not None:
            ids += self._open_tag("json", {"type": "object"}) + self._tokenizer.encode(call.invalid_json)
            return ids + self._close_tag("json") + self._close_tag("call")
        for key, value in call.arguments.items():
            text = value if isinstance(value, str) else dump_json(value)
            ids += self._open_tag("argument", {"key": check_name(key), "type": _type_name(value)})
            ids += self._tokenizer.encode(text) + self._close_tag("argument")
        return ids + self._close_tag("call")

    def _open_tag(self, name: str, attributes: Mapping[str, str] | None = None) -> list[int]:
        ids = [self._ids[_OPEN], *self._fixed(name)]
        for key, value in (attributes or {}).items():
            escaped = value.replace("&", "&amp;").replace('"', "&quot;")
            ids += self._fixed(f" {key}") + self._fixed('="') + self._tokenizer.encode(escaped) + self._fixed('"')
        return [*ids, self._ids[_SEP]]

    def _close_tag(self, name: str) -> list[int]:
        return [self._ids[_CLOSE], *self._fixed(name), self._ids[_SEP]]


class _Reader:
    """Reads tags one after the other; whatever else stands there is a ParseFailure."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces
        self._at = 0

    def take_text(self) -> str:
        """Text before the first marker."""
        return self._take("") if self._next_marker() == "" else ""

    def opens(self) -> bool:
        """Whether a tag opens here."""
        return self._next_marker() == _OPEN

    def open(self, name: str, keys: tuple[str, ...] = ()) -> tuple[list[str], str]:
        """Attribute values of the opening tag ``name``, which has just these ``keys``, and the text behind it."""
        header = self._take(_OPEN)
        match = _HEADER.fullmatch(header)
        attributes = [] if match is None else _ATTRIBUTE.findall(match[2])
        if match is None or match[1] != name or tuple(key for key, _ in attributes) != keys:
            wanted = name + "".join(f' {key}=".."' for key in keys)
            raise ParseFailure("malformed", f"expected the tag {wanted!r}, found {header[:80]!r}")
        values = [_ENTITY.sub(lambda m: "&" if m[1] == "amp" else '"', value) for _, value in attributes]
        return values, self._take(_SEP)

    def open_block(self, name: str, keys: tuple[str, ...] = ()) -> list[str]:
        """Attribute values of an opening tag with no text behind it."""
        values, text = self.open(name, keys)
        _refuse_text(text)
        return values

    def close(self, name: str) -> None:
        """Read the closing tag ``name``, with no text behind it."""
        found = self._take(_CLOSE)
        if found != name:
            raise ParseFailure("malformed", f"expected {name!r} to close, found {found[:80]!r}")
        _refuse_text(self._take(_SEP))

    def end(self) -> None:
        """Refuse anything that is left."""
        if self._at < len(self._pieces):
            raise ParseFailure("malformed", f"{self._next_marker()} after the end of the message")

    def _next_marker(self) -> str | None:
        return self._pieces[self._at].marker if self._at < len(self._pieces) else None

    def _take(self, marker: str) -> str:
        found = self._next_marker()
        if found != marker:
            raise ParseFailure("malformed", f"expected {marker or 'text'}, found {found or 'the end of the turn'}")
        self._at += 1
        return self._pieces[self._at - 1].text


def _parse_turn(reader: _Reader, thinking: bool) -> AssistantAction:
    reasoning, answer = "", reader.take_text()
    if thinking:
        reasoning = answer
        reader.close("think")
        _, answer = reader.open("response")
    reader.close("response")
    calls: list[ToolCall] = []
    if reader.opens():
        reader.open_block("tools")
        while reader.opens():
            calls.append(_parse_call(reader, len(calls) + 1))
        reader.close("tools")
        if not calls:
            raise ParseFailure("malformed", "the tools channel holds no call")
    reader.close("message")
    reader.end()
    return AssistantAction(calls=tuple(calls), answer=None if calls and not answer else answer, text=reasoning)


def _parse_call(reader: _Reader, index: int) -> ToolCall:
    name, found_index = reader.open_block("call", ("tool", "index"))
    if found_index != str(index):
        raise ParseFailure("malformed", f"call {index} has the index {found_index[:20]!r}")
    arguments: dict[str, Any] = {}
    while reader.opens():
        (key, kind), text = reader.open("argument", ("key", "type"))
        reader.close("argument")
        if check_name(key) in arguments:
            raise ParseFailure("duplicate_key", f"argument {key!r} is given twice")
        arguments[key] = _parse_value(text, kind)
    reader.close("call")
    return ToolCall(name=check_name(name), arguments=arguments)


def _parse_value(text: str, kind: str) -> Any:
    if kind == "string":
        return text
    value = parse_json(text)
    if isinstance(value, str) or _type_name(value) != kind:
        raise ParseFailure("bad_json", f"an argument of type {kind[:20]!r} holds a {_type_name(value)}")
    return value


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (bool, "boolean"),
        (str, "string"),
        ((int, float), "number"),
        (dict, "object"),
        ((list, tuple), "array"),
    )
    for kind, name in kinds:
        if isinstance(value, kind):
            return name
    raise ValueError(f"an argument of type {type(value).__name__} is not JSON")


def _sorted(value: Any) -> str:
    """Compact JSON, keys sorted: a declaration is a cached prefix and must not depend on how a dict was built."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _jinja_literal(value: Any) -> str:
    """JSON is Jinja's notation too, but for null."""
    return "none" if value is None else json.dumps(value)


def _refuse_text(text: str) -> None:
    if text:
        raise ParseFailure("malformed", f"text between tags: {text[:80]!r}")
