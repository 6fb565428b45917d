"""Conversations that were recorded elsewhere: read from OpenAI's form, rendered whole, with the part to learn from.

An episode never needs this: it appends ids (see ``agent_loop``). What is rendered here in one go has the same ids.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from k3rl.envs.base import AssistantAction, Message, ToolCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k3rl.rollout.chat_format import ChatFormat


def read_conversation(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Messages in OpenAI's form (``role``, ``content``, ``tool_calls``, ``tool_call_id``, ``reasoning_content``).

    Tool results are put into the order of the calls where each of a run says by its id which call it answers; as they
    stand otherwise. Arguments that are no JSON are kept as they are (``ToolCall.invalid_json``).

    Raises:
        ValueError: names the message and what is wrong with it.
    """
    out: list[Message] = []
    calls: list[_Call] = []  # of the last turn
    answered = at = 0
    while at < len(messages):
        message = messages[at]
        role = message.get("role")
        try:
            if role == "assistant":
                calls, answered = [_Call(call) for call in message.get("tool_calls") or ()], 0
                reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
                parsed = tuple(call.parsed for call in calls)
                out.append(Message("assistant", _text(message.get("content")), calls=parsed, text=str(reasoning)))
            elif role == "tool":
                end = at
                while end < len(messages) and messages[end].get("role") == "tool":
                    end += 1
                out += _results(messages[at:end], calls, answered)
                answered += end - at
                at = end - 1
            elif role in ("system", "user"):
                added = tuple(message.get("tools") or ())
                content = _text(message.get("content"))
                if added and (content or role != "system"):
                    raise ValueError("only a system message adds tools, and it says nothing else")
                out.append(Message(role, content, name=message.get("name"), tools=added))
            else:
                raise ValueError(f"role must be system, user, assistant or tool, got {role!r}")
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"message {at}: {error}") from error
        at += 1
    return tuple(out)


def render_conversation(
    chat_format: ChatFormat, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[int], list[bool]]:
    """Ids of a whole conversation, and which of them an assistant says: True is what to learn from.

    The generation prefix is given at inference and so never learnt, and neither is a turn with a call that no parser
    could read. A conversation that ends with another's message ends with a generation prefix.
    """
    ids: list[int] = []
    mask: list[bool] = []
    start = 0
    for at, message in enumerate((*messages, None)):
        if message is not None and message.role != "assistant":
            continue
        new = messages[start:at]
        if message is None and not new and start:
            break
        context = chat_format.render_prompt(new, tools) if start == 0 else chat_format.render_observation(new)
        turn = [] if message is None else chat_format.render_action(AssistantAction.of(message))
        is_learnt = message is not None and all(call.invalid_json is None for call in message.calls)
        ids += context + turn
        mask += [False] * len(context) + [is_learnt] * len(turn)
        start = at + 1
    return ids, mask


class _Call:
    """A call with the id that its result refers to."""

    def __init__(self, call: Mapping[str, Any]) -> None:
        function = call.get("function", call)
        self.id = call.get("id")
        arguments, invalid = _arguments(function.get("arguments"))
        self.parsed = ToolCall(name=function["name"], arguments=arguments, invalid_json=invalid)


def _results(run: Sequence[Mapping[str, Any]], calls: Sequence[_Call], answered: int) -> list[Message]:
    """Messages of consecutive results; ``answered`` of the turn's results came before them."""
    ids = [call.id for call in calls if call.id is not None]
    whose = [result.get("tool_call_id") for result in run]
    if all(i in ids for i in whose):
        order = sorted(range(len(run)), key=lambda i: ids.index(whose[i]))
        names = {call.id: call.parsed.name for call in reversed(calls)}
        return [Message("tool", _text(run[i].get("content")), tool=names[whose[i]]) for i in order]
    out = []
    for index, result in enumerate(run, answered):
        name = result.get("tool") or result.get("name") or (calls[index].parsed.name if index < len(calls) else None)
        if name is None:
            raise ValueError("a tool message must name its tool or follow a call")
        out.append(Message("tool", _text(result.get("content")), tool=name))
    return out


def _arguments(arguments: Any) -> tuple[dict[str, Any], str | None]:
    """Arguments as an object, or the text that is none."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}, None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return {}, arguments
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments of a call are an object, got {type(arguments).__name__}")
    return arguments, None


def _text(content: Any) -> str:
    """Text of a string, or of a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type") != "text":
            raise ValueError(f"only parts of type text can be rendered, got {part.get('type')!r}")
    return "".join(part["text"] for part in content)
