"""Messages to token ids and sampled ids to actions. A format renders and parses; the agent loop only appends.

What every format promises:
  * append-only: no call looks at earlier turns, so that the ids of the turns joined are the model's input;
  * ``parse_action(render_action(action)) == action`` for every action that ``render_action`` accepts and that has no
    ``invalid_json`` (``text`` is the reasoning where the format has a place for it, and is not rendered where not);
  * ``parse_action`` never raises: what is not an action is data (:class:`~k3rl.envs.base.ParseError`) for the episode;
  * text is encoded apart from the markers, so that no text, whatever it says, becomes structure.

Formats know messages, which belong to ``k3rl.envs``; tokenizers know strings only, and live in ``k3rl.model``.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, Protocol

from k3rl.config import RunConfig
from k3rl.errors import ConfigError, suggest
from k3rl.model.bpe_tokenizer import byte_tokenizer, load_tokenizer
from k3rl.model.tokenizer import TinyTokenizer, Tokenizer
from k3rl.rollout.formats.compact import CompactFormat
from k3rl.rollout.formats.xtml import XtmlFormat

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from k3rl.config import JobConfig
    from k3rl.envs.base import AssistantAction, Message

_FORMATS: dict[str, type[CompactFormat] | type[XtmlFormat]] = {"compact": CompactFormat, "xtml": XtmlFormat}


class ChatFormat(Protocol):
    """How a conversation looks in tokens."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text between the markers."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an assistant turn; the one sampled belongs to the turn."""
        ...

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of the start of a conversation, up to and including the generation prefix of the assistant's turn."""
        ...

    def render_observation(self, messages: Sequence[Message]) -> list[int]:
        """Ids of *new* messages and the next generation prefix."""
        ...

    def render_action(self, action: AssistantAction) -> list[int]:
        """Ids that the assistant's turn consists of, stop token included, generation prefix not.

        ValueError when the format cannot say it: an action with an error, or a value that no parser gives back.
        """
        ...

    def parse_action(self, ids: Sequence[int]) -> AssistantAction:
        """Calls, an answer, or an error. Accepts any ids and never raises; argument types are for the environment."""
        ...


def make_chat_format(
    name: str, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = (), **options: Any
) -> ChatFormat:
    """The format called ``name``. ``tools`` are the schemas of the environment; ``options`` are the format's own.

    Raises:
        ConfigError: there is no such format, or it has no such option; names the near ones.
    """
    kind = _format_type(name)
    parameters = inspect.signature(kind).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for option in options.keys() - set(known):
        there_are = f"there are {', '.join(known)}" if known else "it has none"
        raise ConfigError(
            f"chat_options: {option!r} is no option of chat format {name!r}; {there_are}.{suggest(option, known)}"
        )
    return kind(tokenizer, tools, **options)


def make_tokenizer(name: str, words: Iterable[str], tool_names: Iterable[str]) -> TinyTokenizer:
    """A tiny tokenizer with the markers of format ``name`` and a token for each word of ``words`` and ``tool_names``.

    Both may be whole texts: they are cut into words, and what the alphabet has already (single characters) or cannot
    have as a word (non-ASCII) is left out. The same texts in the same order give the same ids.
    """
    kind = _format_type(name)
    found: dict[str, None] = dict.fromkeys(kind.WORDS)
    for text in (*tool_names, *words):
        found.update(dict.fromkeys(word for word in re.findall(r"\w+", text) if len(word) > 1 and word.isascii()))
    return TinyTokenizer(words=tuple(found), markers=kind.MARKERS)


def vocabulary_of(config: JobConfig) -> str:
    """What the token ids of a job mean: equal texts mean equal ids for everything that is ever rendered."""
    return f"{config.chat_format} {build_chat_format(config).tokenizer.digest[:16]}"


def build_chat_format(config: JobConfig) -> ChatFormat:
    """The format of a job. An environment gives the tools and, as ``template_words``, the words worth a token."""
    if not isinstance(config, RunConfig):
        return make_chat_format(config.chat_format, _load_tokenizer(config), **config.chat_options)
    from k3rl.envs.registry import make

    env: Any = make(config.environment.id, **config.environment.options).unwrapped
    if config.tokenizer == "tiny":
        names = [tool["name"] for tool in env.tool_schemas]
        tokenizer: Tokenizer = make_tokenizer(config.chat_format, env.template_words, names)
    else:
        tokenizer = _load_tokenizer(config)
    return make_chat_format(config.chat_format, tokenizer, env.tool_schemas, **config.chat_options)


def _load_tokenizer(config: JobConfig) -> Tokenizer:
    if config.tokenizer == "bytes":
        return byte_tokenizer(_format_type(config.chat_format).MARKERS)
    return load_tokenizer(config.tokenizer)


def _format_type(name: str) -> type[CompactFormat] | type[XtmlFormat]:
    if name not in _FORMATS:
        raise ConfigError(f"no chat format {name!r}; there are {', '.join(_FORMATS)}.{suggest(name, _FORMATS)}")
    return _FORMATS[name]
