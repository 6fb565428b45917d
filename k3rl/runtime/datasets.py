"""Rows of a dataset, by Hugging Face's ``datasets``, as sequences of token ids with what is to be learnt from them.

Three kinds of rows, told apart by their columns (the names that TRL uses):

  text                    all of it is learnt; a text that is too long is cut into pieces
  prompt, completion      the completion is learnt; both are text, or both are messages
  messages (and tools)    what the assistant says is learnt; OpenAI's form, arguments as JSON text in a table

The format's end marker closes a text and a completion, and is learnt with it.
"""

from __future__ import annotations

import glob
import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from k3rl.buffer.corpus import Sequence
from k3rl.errors import ConfigError
from k3rl.rollout.conversation import read_conversation, render_conversation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from k3rl.rollout.chat_format import ChatFormat

LINES, TABLES = (".jsonl", ".json"), (".parquet",)
"""Ends of names of files with a JSON object a line, and of files that ``datasets`` reads."""
KINDS = ("text", "prompt and completion", "messages")
EMPTY = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Rows:
    """An open dataset, to be read once."""

    key: str
    """Where the configuration names it."""
    dataset: str
    rows: Iterable[Mapping[str, Any]]

    def first(self, count: int) -> Rows:
        """The first rows alone."""
        return replace(self, rows=itertools.islice(self.rows, count))


def open_rows(dataset: str, key: str) -> Rows:
    """Open files (``*`` stands for anything), a folder of ``save_to_disk``, or ``name[:split]`` on the Hub.

    Raises:
        ConfigError: names ``key`` and why there is no such dataset.
    """
    import datasets

    suffix = Path(dataset).suffix
    files: list[str] = []
    if suffix in (*LINES, *TABLES) and "://" not in dataset:
        files = sorted(glob.glob(dataset, recursive=True))
        if not files:
            raise ConfigError(f"{key}: there is no file {dataset}")
    if suffix in LINES and files:
        return Rows(key, dataset, _lines(files, key))
    try:
        if suffix in TABLES:
            rows: Any = datasets.load_dataset("parquet", data_files=files or dataset, split="train", streaming=True)
        elif Path(dataset).is_dir():
            rows = datasets.load_from_disk(dataset)
        else:
            name, _, split = dataset.partition(":")
            rows = datasets.load_dataset(name, split=split or "train", streaming=True)
    except Exception as error:  # the library's own, the Hub's and the system's have nothing in common
        raise ConfigError(f"{key}: {dataset} cannot be read: {type(error).__name__}: {error}") from error
    return Rows(key, dataset, rows)


def _lines(files: list[str], key: str) -> Iterator[Mapping[str, Any]]:
    """Objects of JSON-lines files. A table would give every object the keys of all others, with null in them."""
    for name in files:
        with open(name, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"an object is wanted in each line, not a {type(row).__name__}")
                    yield row
                except ValueError as error:
                    raise ConfigError(f"{key}: {name}, line {number} is no row: {error}") from error


def encode_dataset(rows: Rows, chat_format: ChatFormat, length: int) -> Iterator[Sequence]:
    """Sequences of at most ``length`` tokens; one of none for each row that is too long, or has nothing to learn.

    Raises:
        ConfigError: names the row that cannot be read or rendered, and why.
    """
    for number, row in enumerate(rows.rows):
        try:
            found = list(_encode(row, chat_format, length))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{rows.key}: {rows.dataset}, row {number}: {error}") from error
        for ids, learnt in found or [(EMPTY, EMPTY.astype(bool))]:
            yield Sequence(number, ids, learnt)


def _encode(row: Mapping[str, Any], chat_format: ChatFormat, length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ids and what is learnt of each sequence that a row gives."""
    encode, end = chat_format.tokenizer.encode, min(chat_format.stop_ids)
    if row.get("messages") is not None:
        ids, learnt = render_conversation(chat_format, read_conversation(row["messages"]), _tools(row.get("tools")))
    elif isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list):
        tools = _tools(row.get("tools"))
        given, _ = render_conversation(chat_format, read_conversation(row["prompt"]), tools)
        ids, learnt = render_conversation(chat_format, read_conversation([*row["prompt"], *row["completion"]]), tools)
        learnt[: len(given)] = [False] * len(given)
    elif isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        prompt, completion = encode(row["prompt"]), [*encode(row["completion"]), end]
        ids, learnt = prompt + completion, [False] * len(prompt) + [True] * len(completion)
    elif isinstance(row.get("text"), str):
        ids = [*encode(row["text"]), end]
        for start in range(0, len(ids), length):
            if len(piece := np.asarray(ids[start : start + length], np.int32)) > 1:
                yield piece, np.ones(len(piece), bool)
        return
    else:
        raise ValueError(f"has {', '.join(row)}; a row has {', or '.join(KINDS)}")
    if len(ids) <= length and any(learnt[1:]):  # nothing predicts the first token
        yield np.asarray(ids, np.int32), np.asarray(learnt, bool)


def _tools(tools: Any) -> list[Mapping[str, Any]]:
    """Declarations in OpenAI's form, or without its wrapper; JSON text of them where a table holds it."""
    if isinstance(tools, str):
        tools = json.loads(tools)
    return [tool.get("function", tool) for tool in tools or ()]
