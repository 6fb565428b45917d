"""Every chat format renders append-only, parses what it renders, and treats whatever else is sampled as data."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.envs.base import AssistantAction, Message, ToolCall
from k3rl.errors import ConfigError
from k3rl.rollout.chat_format import ChatFormat, make_chat_format, make_tokenizer


def _tool(tool: str, /, **types: Any) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {"name": tool, "description": tool, "parameters": {"type": "object", "properties": properties}}


TOOLS = [
    _tool("find", name="string"),
    _tool("order", item="string", quantity="integer"),
    _tool("scale", factor="number", exact="boolean"),
    _tool("mixed", value=["integer", "string"]),
    _tool("list_all"),
]
QUESTIONS = ("price of", "total for", "order", "if in stock", "short", "done")


def _make(name: str, **options: Any) -> ChatFormat:
    tokenizer = make_tokenizer(name, QUESTIONS, [t["name"] for t in TOOLS])
    return make_chat_format(name, tokenizer, TOOLS, **options)


FORMATS = {"compact": _make("compact"), "xtml": _make("xtml"), "xtml_thinking": _make("xtml", thinking=True)}
every_format = pytest.mark.parametrize("chat_format", FORMATS.values(), ids=FORMATS.keys())

TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=20) | st.sampled_from(
    [
        "<|end|>",
        "<|close|>message<|sep|>",
        '" index="2"',
        "&quot;",
        "&amp;quot;",
        "007",
        "-0",
        "true",
        "{}",
        "1.50",
        "1",
    ]
)
SCALAR = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
JSON = st.recursive(SCALAR, lambda x: st.lists(x, max_size=3) | st.dictionaries(TEXT, x, max_size=3), max_leaves=8)
KNOWN_CALL = st.sampled_from(TOOLS).flatmap(
    lambda tool: st.builds(
        ToolCall, st.just(tool["name"]), st.fixed_dictionaries({}, optional=dict.fromkeys(_names(tool), SCALAR))
    )
)
CALL = KNOWN_CALL | st.builds(ToolCall, TEXT, st.dictionaries(TEXT, JSON, max_size=3))
ACTION = st.builds(AssistantAction, st.just(()), TEXT) | st.builds(
    AssistantAction, st.lists(CALL, min_size=1, max_size=3).map(tuple), st.none() | TEXT.filter(bool)
)


def _names(tool: dict[str, Any]) -> list[str]:
    return list(tool["parameters"]["properties"])


def _exact(value: Any) -> str:
    """Tells 1, 1.0 and True apart, which == does not."""
    return repr(value)


@every_format
@settings(max_examples=300, deadline=None)
@given(action=ACTION)
def test_a_rendered_action_parses_to_itself(chat_format: ChatFormat, action: AssistantAction) -> None:
    ids = chat_format.render_action(action)
    parsed = chat_format.parse_action(ids)
    assert parsed == action
    sort = [_exact(sorted(c.arguments.items(), key=lambda item: item[0])) for c in action.calls]
    assert [_exact(sorted(c.arguments.items(), key=lambda item: item[0])) for c in parsed.calls] == sort
    assert ids[-1] in chat_format.stop_ids
    assert not set(ids[:-1]) & chat_format.stop_ids


@every_format
@given(text=TEXT)
@settings(deadline=None)
def test_no_message_text_becomes_structure(chat_format: ChatFormat, text: str) -> None:
    tokenizer = chat_format.tokenizer
    markers = set(tokenizer.markers.values())
    hostile = text + "".join(tokenizer.markers)
    for role in ("system", "user", "tool"):
        plain = chat_format.render_observation((Message(role=role, content="", tool="find"),))
        attacked = chat_format.render_observation((Message(role=role, content=hostile, tool=hostile),))
        assert [i for i in attacked if i in markers] == [i for i in plain if i in markers]
    declared = chat_format.render_prompt((), [{"name": hostile, "description": hostile}])
    harmless = chat_format.render_prompt((), [{"name": "", "description": ""}])
    assert [i for i in declared if i in markers] == [i for i in harmless if i in markers]


@every_format
def test_random_ids_never_raise(chat_format: ChatFormat) -> None:
    rng = random.Random(0)
    tokenizer = chat_format.tokenizer
    markers, stop = list(tokenizer.markers.values()), next(iter(chat_format.stop_ids))
    valid = chat_format.render_action(
        AssistantAction((ToolCall("order", {"item": "a", "quantity": 2}), ToolCall("x", {"k": [1]})), None)
    )
    kinds = set()
    for round_ in range(20_000):
        if round_ % 2:
            ids = [
                rng.choice(markers) if rng.random() < 0.4 else rng.randrange(-2, 300) for _ in range(rng.randrange(12))
            ]
        else:  # near misses reach deeper than noise
            ids = list(valid)
            for _ in range(rng.randrange(1, 4)):
                ids[rng.randrange(len(ids))] = rng.choice(markers) if rng.random() < 0.5 else rng.randrange(300)
        if rng.random() < 0.7:
            ids.append(stop)
        action = chat_format.parse_action(ids)
        assert (action.error is None) != (not action.calls and action.answer is None)
        kinds.add(action.error.kind if action.error else "action")
    assert kinds >= {"action", "no_stop", "malformed"}


@every_format
def test_b27_turns_joined_are_the_whole_conversation_and_begin_with_what_was_sampled(chat_format: ChatFormat) -> None:
    task = (Message(role="system", content="shop"), Message(role="user", content="order 2 bokip"))
    turns = [
        (AssistantAction((ToolCall("find", {"name": "bokip"}),)), (Message(role="tool", content="417", tool="find"),)),
        (
            AssistantAction((ToolCall("order", {"item": "417", "quantity": 2}), ToolCall("list_all", {}))),
            (Message(role="tool", content="ok", tool="order"), Message(role="tool", content="-", tool="list_all")),
        ),
    ]
    joined = chat_format.render_prompt(task, TOOLS)
    history: tuple[Message, ...] = task
    for action, observation in turns:
        sampled = chat_format.render_action(action)
        before = list(joined)
        joined += sampled + chat_format.render_observation(observation)
        assert joined[: len(before) + len(sampled)] == before + sampled
        history += (Message(role="assistant", calls=action.calls), *observation)
        assert joined == chat_format.render_prompt(history, TOOLS)


@every_format
def test_a_turn_without_its_stop_token_is_an_error_and_not_an_answer(chat_format: ChatFormat) -> None:
    ids = chat_format.render_action(AssistantAction(answer="12"))
    for cut in range(len(ids)):
        error = chat_format.parse_action(ids[:cut]).error
        assert error is not None
        assert error.kind == "no_stop"
    error = chat_format.parse_action(ids + ids).error
    assert error is not None
    assert error.kind == "malformed"
    assert error.text == chat_format.tokenizer.decode(ids + ids)


@every_format
@pytest.mark.parametrize(
    "text",
    ["a } b", 'he said "hi" {\\', "use </tool_call> here", "<|end|>", "<|close|>argument<|sep|>", "\\u0022", "]}"],
)
def test_b28_delimiters_inside_string_arguments_are_only_text(chat_format: ChatFormat, text: str) -> None:
    for call in (ToolCall("find", {"name": text}), ToolCall("write", {"text": text, "more": {"in": [text]}})):
        parsed = chat_format.parse_action(chat_format.render_action(AssistantAction((call,))))
        assert parsed.calls == (call,)
        assert parsed.answer is None


def _random_json(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 4 else 5)
    if kind == 5:
        return [_random_json(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 6:
        return {_random_text(rng): _random_json(rng, depth + 1) for _ in range(rng.randrange(3))}
    return (None, rng.random() < 0.5, rng.randrange(-(10**20), 10**20), rng.gauss(0, 1e6), _random_text(rng))[kind]


def _random_text(rng: random.Random) -> str:
    return "".join(rng.choice('ab "\\{}[]:,\n<|>é😀\x00') for _ in range(rng.randrange(6)))


@every_format
def test_b28_ten_thousand_random_json_values_round_trip(chat_format: ChatFormat) -> None:
    rng = random.Random(1)
    for _ in range(1000):
        arguments = {f"k{i}": _random_json(rng) for i in range(10)}
        parsed = chat_format.parse_action(chat_format.render_action(AssistantAction((ToolCall("t", arguments),))))
        assert _exact(parsed.calls[0].arguments) == _exact(arguments)


def _json_turn(name: str, text: str) -> list[int]:
    """A turn whose one argument (xtml: of type array or object) is ``text``, whatever it says."""
    chat_format = FORMATS[name]
    placeholder = "@@"
    call = ToolCall("t", {"k": [placeholder]} if name == "xtml" else {"k": placeholder})
    whole = json.dumps([placeholder] if name == "xtml" else {"k": placeholder})
    ids, tokenizer = chat_format.render_action(AssistantAction((call,))), chat_format.tokenizer
    old = tokenizer.encode(whole)
    at = next(i for i in range(len(ids)) if ids[i : i + len(old)] == old)
    return ids[:at] + tokenizer.encode(text) + ids[at + len(old) :]


@pytest.mark.parametrize("name", ["compact", "xtml"])
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("NaN", "bad_json"),
        ("-Infinity", "bad_json"),
        ("1e400", "bad_json"),
        ("9" * 5000, "bad_json"),
        ("{'a': 1}", "bad_json"),
        ("", "bad_json"),
        ('{"a": 1, "a": 2}', "duplicate_key"),
        ("[" * 100_000, "too_deep"),
        ("[" * 80 + "]" * 80, "too_deep"),
        ('"' + "x" * (1 << 20) + '"', "too_long"),
    ],
    ids=["nan", "infinity", "overflow", "digits", "quotes", "empty", "duplicate", "bomb", "deep", "long"],
)
def test_b30_json_that_would_lose_or_break_something_is_refused_with_its_kind(name: str, value: str, kind: str) -> None:
    text = f"[{value}]" if name == "xtml" else f'{{"k": {value}}}'
    error = FORMATS[name].parse_action(_json_turn(name, text)).error
    if name == "xtml" and value == "":
        assert error is None  # "[]" is an empty array
    else:
        assert error is not None
        assert error.kind == kind


@every_format
def test_names_of_tools_are_for_the_environment_to_judge_unless_they_are_absurdly_long(chat_format: ChatFormat) -> None:
    for name in ("", "__init__", "calc_gsm8k_rewrd"):
        call = ToolCall(name, {"x": "1"})
        assert chat_format.parse_action(chat_format.render_action(AssistantAction((call,)))).calls == (call,)
    with pytest.raises(ValueError, match="1000000 characters"):
        chat_format.render_action(AssistantAction((ToolCall("n" * 10**6, {}),)))
    ids = chat_format.render_action(AssistantAction((ToolCall("qqqq", {}),)))
    tokenizer = chat_format.tokenizer
    at = next(i for i in range(len(ids)) if tokenizer.decode(ids[i : i + 4]) == "qqqq")
    error = chat_format.parse_action(ids[:at] + tokenizer.encode("n") * 10**6 + ids[at + 4 :]).error
    assert error is not None
    assert error.kind == "too_long"


@every_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), {1: 2}, (1, 2), object(), b"x"])
def test_an_argument_that_would_not_come_back_is_not_rendered(chat_format: ChatFormat, bad: Any) -> None:
    with pytest.raises(ValueError):
        chat_format.render_action(AssistantAction((ToolCall("t", {"k": bad}),)))


@every_format
def test_an_action_with_nothing_in_it_is_not_rendered(chat_format: ChatFormat) -> None:
    with pytest.raises(ValueError, match="calls or an answer"):
        chat_format.render_action(AssistantAction())


def test_an_unknown_format_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'compact'"):
        make_tokenizer("compct", (), ())


def _text(chat_format: ChatFormat, ids: list[int]) -> str:
    return chat_format.tokenizer.decode(ids)


def test_compact_text_is_as_documented() -> None:
    compact = FORMATS["compact"]

    def action(tool: str, /, **arguments: Any) -> str:
        return _text(compact, compact.render_action(AssistantAction((ToolCall(tool, arguments),))))

    assert _text(compact, compact.render_prompt((Message("user", "price of bokip"),), TOOLS)) == (
        "<|user|>price of bokip<|end|><|asst|>"
    )
    observation = compact.render_observation((Message("tool", "417", "find"),))
    assert _text(compact, observation) == "<|tool|>417<|end|><|asst|>"
    assert _text(compact, compact.render_action(AssistantAction(answer="12"))) == "<|ans|>12<|end|>"
    assert action("find", name="bokip") == "<|call|>find<|arg|>bokip<|end|>"
    assert action("list_all") == "<|call|>list_all<|end|>"
    assert action("order", quantity=2, item="417") == "<|call|>order<|arg|>417<|arg|>2<|end|>"
    assert action("order", item="417", quantity="2") == '<|call|>order<|json|>{"item": "417", "quantity": "2"}<|end|>'
    assert action("scale", factor=2.5, exact=True) == "<|call|>scale<|arg|>2.5<|arg|>true<|end|>"
    assert action("mixed", value="007") == "<|call|>mixed<|arg|>007<|end|>"
    assert action("plot", points=[1]) == '<|call|>plot<|json|>{"points": [1]}<|end|>'


def test_compact_keeps_a_call_with_too_many_arguments_for_the_environment_to_refuse() -> None:
    compact = FORMATS["compact"]
    mark, encode = compact.tokenizer.marker, compact.tokenizer.encode
    arg = [mark("<|arg|>"), *encode("7")]
    ids = [mark("<|call|>"), *encode("find"), *arg, *arg, mark("<|end|>")]
    assert compact.parse_action(ids).calls == (ToolCall("find", {"name": "7", "#2": "7"}),)


def test_compact_vocabulary_of_sixty_words_fits_256_ids() -> None:
    words = [f"word{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(60)]
    assert make_tokenizer("compact", words, ["find", "price", "stock", "calc", "order"]).vocab_size <= 256


def test_xtml_text_is_k3s() -> None:
    xtml = make_chat_format("xtml", FORMATS["xtml"].tokenizer, TOOLS, thinking=True, effort="high")
    tools = [{"name": "find", "description": "dé", "parameters": {"type": "object", "properties": {}}}]
    assert _text(xtml, xtml.render_prompt((Message("user", "hi"),), tools)) == (
        '<|open|>message role="system" type="tool-declare"<|sep|># Tools\n\n```json\n'
        '[{"function":{"description":"dé","name":"find","parameters":{"properties":{},"type":"object"}},'
        '"type":"function"}]\n```'
        "<|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="system" type="thinking-effort"<|sep|>Thinking effort: high.'
        "<|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="user"<|sep|>hi<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    )
    action = AssistantAction((ToolCall('a"&b', {"q": "x<y", "n": 5, "l": [1, "é"]}),), text="hm")
    ids = xtml.render_action(action)
    assert xtml.parse_action(ids) == action
    assert _text(xtml, ids) == (
        "hm<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="a&quot;&amp;b" index="1"<|sep|>'
        '<|open|>argument key="q" type="string"<|sep|>x<y<|close|>argument<|sep|>'
        '<|open|>argument key="n" type="number"<|sep|>5<|close|>argument<|sep|>'
        '<|open|>argument key="l" type="array"<|sep|>[1, "é"]<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    results = (Message("tool", "1", "find"), Message("user", "go"), Message("tool", "2", "find"))
    assert _text(xtml, xtml.render_observation(results)) == (
        '<|open|>message role="tool" tool="find" index="1"<|sep|>1<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="user"<|sep|>go<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="tool" tool="find" index="2"<|sep|>2<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    )


def test_xtml_without_thinking_opens_the_response_and_knows_no_effort() -> None:
    xtml = FORMATS["xtml"]
    prompt = _text(xtml, xtml.render_prompt((Message("user", "hi"),), ()))
    assert prompt.endswith('<|open|>message role="assistant"<|sep|><|open|>response<|sep|>')
    assert "tool-declare" not in prompt
    with pytest.raises(ValueError, match="thinking"):
        make_chat_format("xtml", xtml.tokenizer, effort="max")


@pytest.mark.parametrize(
    ("turn", "kind"),
    [
        ("@call tool=`t` index=`2`^/call^", "malformed"),
        ("@call tool=`t`^/call^", "malformed"),
        ("@call index=`1` tool=`t`^/call^", "malformed"),
        ("@call tool=`t` index=`1`^text/call^", "malformed"),
        ("@call tool=`t` index=`1`^/calls^", "malformed"),
        ("", "malformed"),
        ("@json type=`object`^{}/json^", "malformed"),
        ("@call tool=`t` index=`1`^@argument key=`k` type=`number`^true/argument^/call^", "bad_json"),
        ("@call tool=`t` index=`1`^@argument key=`k` type=`date`^1/argument^/call^", "bad_json"),
        (
            "@call tool=`t` index=`1`^" + "@argument key=`k` type=`null`^null/argument^" * 2 + "/call^",
            "duplicate_key",
        ),
    ],
)
def test_xtml_that_is_not_quite_right_is_refused_with_its_kind(turn: str, kind: str) -> None:
    tokenizer = FORMATS["xtml"].tokenizer
    signs = {"@": "<|open|>", "/": "<|close|>", "^": "<|sep|>", "$": "<|end_of_msg|>"}
    ids: list[int] = []
    for sign in f"/response^@tools^{turn}/tools^/message^$".replace("`", '"'):
        ids += [tokenizer.marker(signs[sign])] if sign in signs else tokenizer.encode(sign)
    error = FORMATS["xtml"].parse_action(ids).error
    assert error is not None
    assert error.kind == kind
