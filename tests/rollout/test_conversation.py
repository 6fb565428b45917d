"""Conversations recorded elsewhere: whole or in pieces, as ids or as a template's text, they are the same."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from k3rl.envs.base import AssistantAction, Message, ToolCall
from k3rl.errors import ConfigError
from k3rl.model.bpe_tokenizer import byte_tokenizer
from k3rl.rollout.chat_format import make_chat_format, make_tokenizer
from k3rl.rollout.conversation import read_conversation, render_conversation
from k3rl.rollout.formats.xtml import XtmlFormat

TOOLS = [
    {
        "name": "find",
        "description": 'Find "it" & more',
        "parameters": {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}},
    },
    {"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": {}}}},
]
TEXTS = (
    *("", " ", "\t", "price of bokip", "a\n", "\n b", "é 北京 😀", "007", "null"),
    *("<|end_of_msg|>", '<|open|>message role="system"<|sep|>', "<|close|>think<|sep|>"),
    *('"&quot;&amp;', "{{ x }} {% if %} {# #}", "{json}", "\\u0022 \\n"),
)
FORMATS = {
    "xtml": make_chat_format("xtml", make_tokenizer("xtml", TEXTS, ["find", "write"])),
    "xtml_thinking": make_chat_format("xtml", byte_tokenizer(XtmlFormat.MARKERS), thinking=True, effort="high"),
}
each = pytest.mark.parametrize("name", FORMATS)


def _template(chat_format: XtmlFormat) -> Any:
    """Compiled as Hugging Face's tokenizers do it."""

    def tojson(value: Any, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=False, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(chat_format.chat_template())


def _format(name: str) -> XtmlFormat:
    chat_format = FORMATS[name]
    assert isinstance(chat_format, XtmlFormat)
    return chat_format


def _random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 2 else 6)
    if kind == 6:
        return [_random_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 7:
        return {rng.choice(TEXTS): _random_value(rng, depth + 1) for _ in range(rng.randrange(3))}
    return (None, rng.random() < 0.5, rng.randrange(-99, 10**6), rng.gauss(0, 9), *rng.choices(TEXTS, k=2))[kind]


def _random_conversation(rng: random.Random) -> list[dict[str, Any]]:
    """Messages in OpenAI's form: any order of roles, results shuffled, ids missing now and then."""
    messages: list[dict[str, Any]] = []
    for _ in range(rng.randrange(7)):
        role = rng.choice(("user", "assistant", "assistant", "system"))
        message: dict[str, Any] = {"role": role, "content": rng.choice((*TEXTS, None))}
        messages.append(message)
        if role == "system" and rng.random() < 0.3:
            message |= {"content": None, "tools": rng.sample(TOOLS, k=1)}
        elif role != "assistant":
            message |= {"name": rng.choice(TEXTS[2:])} if rng.random() < 0.2 else {}
            if rng.random() < 0.2:
                message["content"] = [{"type": "text", "text": rng.choice(TEXTS)} for _ in range(rng.randrange(3))]
        else:
            if rng.random() < 0.5:
                message["reasoning_content"] = rng.choice(TEXTS)
            calls = [
                {
                    "id": f"c{i}",
                    "type": "function",
                    "function": {
                        "name": rng.choice(("find", "write", *TEXTS)),
                        "arguments": {rng.choice(TEXTS): _random_value(rng) for _ in range(rng.randrange(3))},
                    },
                }
                for i in range(rng.randrange(4))
            ]
            if calls:
                message["tool_calls"] = calls
            has_ids = rng.random() < 0.7
            results = [
                {"role": "tool", "content": rng.choice(TEXTS)}
                | ({"tool_call_id": call["id"]} if has_ids else {})
                | ({"name": rng.choice(TEXTS[2:])} if rng.random() < 0.2 else {})
                for call in calls
            ]
            rng.shuffle(results)
            messages += results
    return messages


def _pieces(name: str, rng: random.Random) -> tuple[list[dict[str, Any]], tuple[Message, ...], list[dict[str, Any]]]:
    conversation = _random_conversation(rng)
    return conversation, read_conversation(conversation), rng.choice(([], TOOLS))


@each
def test_ten_thousand_conversations_in_pieces_whole_and_by_the_template_are_the_same(name: str) -> None:
    rng, chat_format = random.Random(3), _format(name)
    template, tokenizer = _template(chat_format), chat_format.tokenizer
    marker_ids = set(tokenizer.markers.values())
    for _ in range(10_000):
        conversation, messages, tools = _pieces(name, rng)
        whole = chat_format.render_prompt(messages, tools)
        ids, mask = render_conversation(chat_format, messages, tools)
        if not messages or messages[-1].role != "assistant":
            assert ids == whole
        else:
            assert ids == whole[: len(ids)]
            assert tokenizer.decode(whole[len(ids) :]) == tokenizer.decode(chat_format.render_observation(()))
        text = template.render(messages=conversation, tools=tools, add_generation_prompt=True)
        assert text == tokenizer.decode(whole)
        # What is learnt is what the policy would have sampled: turn by turn, it reads as the messages say.
        turns = [message for message in messages if message.role == "assistant"]
        learnt = [i for i, is_learnt in zip(ids, mask, strict=True) if is_learnt]
        for turn in turns:
            end = next(at for at, i in enumerate(learnt) if i in chat_format.stop_ids) + 1
            said = AssistantAction.of(turn)
            if name == "xtml":
                said = AssistantAction(said.calls, said.answer)
            assert chat_format.parse_action(learnt[:end]) == said
            learnt = learnt[end:]
        assert not learnt
        # However hostile the texts, structure is as many markers as the messages ask for.
        assert sum(i in marker_ids for i in whole) == _count_markers(chat_format, messages, tools, name)


def _count_markers(chat_format: XtmlFormat, messages: tuple[Message, ...], tools: Any, name: str) -> int:
    tag, thinking = 2, name == "xtml_thinking"
    message = 2 * tag + 1  # opened, closed, ended
    count = message * (bool(tools) + thinking) + 2 * tag  # declaration, effort, generation prefix
    for m in messages:
        count += message
        if m.role == "assistant":
            count += 2 * tag * (1 + thinking + bool(m.calls) + sum(1 + len(call.arguments) for call in m.calls))
    return count


def test_results_are_put_into_the_order_of_the_calls_when_every_one_says_whose_it_is() -> None:
    calls = [{"id": i, "function": {"name": n, "arguments": "{}"}} for i, n in (("x", "find"), ("y", "write"))]
    turn = {"role": "assistant", "tool_calls": calls}
    late = {"role": "tool", "tool_call_id": "y", "content": "2", "name": "stale"}
    first = {"role": "tool", "tool_call_id": "x", "content": "1"}
    ordered = read_conversation([turn, late, first])[1:]
    assert [(m.tool, m.content) for m in ordered] == [("find", "1"), ("write", "2")]
    stranger = first | {"tool_call_id": "z"}
    kept = read_conversation([turn, late, stranger])[1:]
    assert [(m.tool, m.content) for m in kept] == [("stale", "2"), ("write", "1")]


def test_arguments_that_are_no_json_are_shown_and_not_learnt() -> None:
    chat_format = _format("xtml")
    call = {"function": {"name": "find", "arguments": '{"a": '}}
    messages = read_conversation(
        [{"role": "assistant", "tool_calls": [call]}, {"role": "assistant", "content": "sorry"}]
    )
    assert messages[0].calls == (ToolCall("find", invalid_json='{"a": '),)
    ids, mask = render_conversation(chat_format, messages, [])
    text = chat_format.tokenizer.decode(ids)
    assert '<|open|>json type="object"<|sep|>{"a": <|close|>json<|sep|><|close|>call<|sep|>' in text
    learnt = chat_format.tokenizer.decode([i for i, is_learnt in zip(ids, mask, strict=True) if is_learnt])
    assert learnt == "sorry<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    turn = chat_format.render_action(AssistantAction.of(messages[0]))
    error = chat_format.parse_action(turn).error
    assert error is not None
    assert error.kind == "malformed"


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "robot"}, "role must be"),
        ({"role": "tool", "content": "1"}, "must name its tool"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "only parts of type text"),
        ({"role": "system", "content": "x", "tools": TOOLS}, "says nothing else"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "are an object"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "name"),
    ],
)
def test_a_message_that_cannot_be_read_is_named(message: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=f"message 1: .*{complaint}"):
        read_conversation([{"role": "user", "content": "hi"}, message])


@each
@pytest.mark.parametrize("response_format", [None, "json_object", {"b": 1, "a": {"d": 2, "c": 3}}])
@pytest.mark.parametrize("tool_choice", [None, "required", "none"])
def test_options_for_one_turn_stand_behind_everything_so_that_the_prefix_stays(
    name: str, tool_choice: Any, response_format: Any
) -> None:
    chat_format = _format(name)
    messages = (Message("user", "hi"),)
    plain = chat_format.render_prompt(messages, TOOLS)
    prefix = chat_format.render_observation(())
    ids = chat_format.render_prompt(messages, TOOLS, tool_choice=tool_choice, response_format=response_format)
    head = plain[: -len(prefix)]
    assert ids[: len(head)] == head
    assert ids[-len(prefix) :] == prefix
    added = chat_format.tokenizer.decode(ids[len(head) : -len(prefix)])
    assert ('type="tool-choice"' in added) == (tool_choice is not None)
    assert ('type="response-format"' in added) == (response_format is not None)
    assert ('{"a":{"c":3,"d":2},"b":1}' in added) == isinstance(response_format, dict)
    openai = response_format
    if isinstance(response_format, dict):
        openai = {"type": "json_schema", "json_schema": {"name": "x", "schema": response_format}}
    elif response_format is not None:
        openai = {"type": response_format}
    text = _template(chat_format).render(
        messages=[{"role": "user", "content": "hi"}],
        tools=TOOLS,
        add_generation_prompt=True,
        tool_choice=tool_choice,
        response_format=openai,
    )
    assert text == chat_format.tokenizer.decode(ids)


def test_a_declaration_does_not_depend_on_the_order_of_keys() -> None:
    chat_format = _format("xtml")
    turned = json.loads(json.dumps(TOOLS), object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    assert list(turned[0]) != list(TOOLS[0])
    assert chat_format.render_prompt((), turned) == chat_format.render_prompt((), TOOLS)


def test_the_template_refuses_arguments_as_a_string_since_it_cannot_read_json() -> None:
    conversation = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
    with pytest.raises(TemplateError, match="as an object"):
        _template(_format("xtml")).render(messages=conversation)


def test_a_template_takes_thinking_and_effort_at_each_call() -> None:
    tokenizer = _format("xtml").tokenizer
    conversation = [{"role": "user", "content": "hi"}]
    text = _template(_format("xtml")).render(
        messages=conversation, add_generation_prompt=True, thinking=True, thinking_effort="low"
    )
    thinking = make_chat_format("xtml", tokenizer, thinking=True, effort="low")
    assert text == tokenizer.decode(thinking.render_prompt(read_conversation(conversation), []))


def test_the_sentences_of_another_encoder_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "wording.json"
    path.write_text(json.dumps({"tools": "TOOLS {json}!", "effort": "think {effort}"}))
    tokenizer = _format("xtml").tokenizer
    chat_format = make_chat_format("xtml", tokenizer, thinking=True, effort="max", wording=str(path))
    assert isinstance(chat_format, XtmlFormat)
    text = tokenizer.decode(chat_format.render_prompt((), [{"name": "f"}]))
    assert '<|sep|>TOOLS [{"function":{"name":"f"},"type":"function"}]!<|close|>' in text
    assert "<|sep|>think max<|close|>" in text
    assert text == _template(chat_format).render(messages=[], tools=[{"name": "f"}], add_generation_prompt=True)
    for wrong, complaint in (({"tool": "x"}, "mean 'tools'"), ({"tools": 1}, "object of strings"), ([], "object of")):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match=complaint):
            make_chat_format("xtml", tokenizer, wording=str(path))
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        make_chat_format("xtml", tokenizer, wording=str(tmp_path / "nowhere.json"))


def test_options_of_a_format_are_checked_by_name() -> None:
    tokenizer = _format("xtml").tokenizer
    with pytest.raises(ConfigError, match=r"no option of chat format 'xtml'.*mean 'effort'"):
        make_chat_format("xtml", tokenizer, efforts="low")
    with pytest.raises(ConfigError, match=r"'compact'; it has none"):
        make_chat_format("compact", make_tokenizer("compact", (), ()), effort="low")
    with pytest.raises(ConfigError, match="one of low, medium, high, max"):
        make_chat_format("xtml", tokenizer, thinking=True, effort="higher")
    with pytest.raises(ConfigError, match="set thinking: true"):
        make_chat_format("xtml", tokenizer, effort="low")


def test_reading_a_conversation_changes_nothing_in_it() -> None:
    rng = random.Random(5)
    for _ in range(200):
        conversation = _random_conversation(rng)
        before = copy.deepcopy(conversation)
        read_conversation(conversation)
        assert conversation == before
