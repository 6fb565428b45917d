"""``k3rl documents``: long synthetic documents whose questions need evidence from across the window.

Two kinds, both of them ``EVIDENCE`` facts among distractors of the same form:

  multi_hop  a parcel passes from person to person; who holds it in the end? Every hand-over is needed, and other
             chains of every shorter length make a missing one impossible to guess by exclusion;
  permuted   the pages of several chronicles, shuffled; what are the codes of one chronicle's pages, in order?

A fact lies in the middle half of its own ``EVIDENCE``-th of the window, so that the first and the last quarter are
always needed. Names of one split never occur in another. No model is asked, so that any tokenizer will do.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from k3rl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Kind = Literal["multi_hop", "permuted"]
Split = Literal["train", "validation", "test"]

EVIDENCE = 4
"""Facts that a question needs."""
MIN_GAP = 1 / 16
"""Least distance between the starts of two facts of one question, as a fraction of the text."""
CHRONICLES = 8
MIN_LENGTH = 4096
"""Fewest tokens of a document: below, pages and hand-overs are too coarse for ``MIN_GAP``."""
ROW_GROUP_TOKENS = 2**22
"""Tokens after which a row group is written: memory does not grow with the number of documents."""

SCHEMA = pa.schema(
    [
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("evidence", pa.list_(pa.struct([("start", pa.int64()), ("end", pa.int64())]))),
        ("kind", pa.string()),
        ("length", pa.int64()),
    ]
)
"""``prompt``: text and question; ``completion``: the answer. ``evidence``: characters of ``prompt`` [start, end), in
the order in which they are needed. ``length``: tokens of both, and the one that ends the completion."""

_SYLLABLES = [c + v for c in "bdfghjklmnprstvwxyzc" for v in "aeiou"]
_WEATHER = ("Rain fell", "Snow lay", "Fog hung", "The sun rose", "A storm passed", "Frost settled")
_PLACES = ("the harbour", "the old mill", "the northern road", "the market", "the orchard", "the bridge")


def write_documents(
    path: Path,
    *,
    kind: Kind,
    length: int,
    count: int,
    seed: int = 0,
    split: Split = "train",
    num_tokens: Callable[[str], int],
) -> None:
    """Write ``count`` documents of about ``length`` tokens, never more, as the new Parquet file ``path``.

    ``num_tokens`` counts a text's tokens. Document i depends on i and the other arguments only.

    Raises:
        ConfigError: an argument is out of its range, or ``path`` exists.
    """
    if length < MIN_LENGTH:
        raise ConfigError(f"length: must be at least {MIN_LENGTH} tokens, got {length}")
    if count < 1:
        raise ConfigError(f"count: must be at least 1, got {count}")
    if path.exists():
        raise ConfigError(f"{path} exists; name a new file")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    rows_per_group = max(1, ROW_GROUP_TOKENS // length)
    with pq.ParquetWriter(unfinished, SCHEMA) as writer:
        for start in range(0, count, rows_per_group):
            group = range(start, min(start + rows_per_group, count))
            rows = [make_document(kind, length, seed, split, i, num_tokens) for i in group]
            writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
    unfinished.rename(path)


def make_document(
    kind: Kind, length: int, seed: int, split: Split, index: int, count: Callable[[str], int]
) -> dict[str, Any]:
    """One row of the file; see :func:`write_documents`. ``count`` counts a text's tokens."""
    digest = hashlib.sha256(f"{seed}/{split}/{kind}/{length}/{index}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    names = _names(rng, split)
    make = _multi_hop if kind == "multi_hop" else _permuted
    facts, distractors, question, answer = make(rng, names, length, count)
    room = length - count(question) - count(answer) - 1
    # The facts stay in the order in which they are needed; where in the window each one lies is drawn.
    order = rng.permutation(EVIDENCE)
    starts = (np.arange(EVIDENCE) + rng.uniform(0.25, 0.75, EVIDENCE)) / EVIDENCE * room
    room -= sum(map(count, facts))
    parts: list[str] = []
    spans: dict[int, dict[str, int]] = {}
    tokens = characters = 0

    def add(part: str) -> None:
        nonlocal tokens, characters
        parts.append(part)
        tokens, characters = tokens + count(part), characters + len(part)

    spent = 0
    for part in distractors:
        if (spent := spent + count(part)) > room:
            break
        while len(spans) < EVIDENCE and tokens + count(part) / 2 >= starts[len(spans)]:
            fact = int(order[len(spans)])
            spans[fact] = {"start": characters, "end": characters + len(facts[fact])}
            add(facts[fact])
        add(part)
    prompt = "".join([*parts, question])
    return {
        "prompt": prompt,
        "completion": answer,
        "evidence": [spans[fact] for fact in range(EVIDENCE)],
        "kind": kind,
        "length": count(prompt) + count(answer) + 1,
    }


Parts = tuple[list[str], "Iterator[str]", str, str]
"""Facts, distractors, question and answer."""


def _multi_hop(rng: np.random.Generator, names: Iterator[str], length: int, count: Callable[[str], int]) -> Parts:
    def chain(hops: int) -> tuple[list[str], list[str]]:
        people = [next(names) for _ in range(hops + 1)]
        return people, [f"{a} handed the parcel to {b}.\n" for a, b in itertools.pairwise(people)]

    def distractors() -> Iterator[str]:
        while True:
            # Some of every length, and in pieces: what looks like a chain's end may be the middle of another.
            links = [link for hops in range(1, EVIDENCE + 1) for link in chain(hops)[1]]
            lines = [*links, *(_filler(rng, next(names)) for _ in range(EVIDENCE))]
            yield from (lines[i] for i in rng.permutation(len(lines)))

    people, facts = chain(EVIDENCE)
    question = f"{people[0]} held a parcel at first. Who holds it after {EVIDENCE} hand-overs?\n"
    return facts, distractors(), question, people[-1]


def _permuted(rng: np.random.Generator, names: Iterator[str], length: int, count: Callable[[str], int]) -> Parts:
    share = length / (CHRONICLES * EVIDENCE + 2)

    def pages(title: str) -> Iterator[tuple[str, str]]:
        for number in range(1, EVIDENCE + 1):
            code = next(names).upper()
            page = f"[Chronicle of {title}, page {number} of {EVIDENCE}, code {code}]\n"
            size = count(page)
            while (size := size + count(line := _filler(rng, title))) <= share:
                page += line
            yield page, code

    def distractors() -> Iterator[str]:
        others = [page for _ in range(CHRONICLES - 1) for page, _ in pages(next(names))]
        yield from (others[i] for i in rng.permutation(len(others)))
        while True:  # what the pages left free
            yield _filler(rng, next(names))

    title = next(names)
    facts, codes = zip(*pages(title), strict=True)
    question = f"What are the codes of the {EVIDENCE} pages of the Chronicle of {title}, in the order of the pages?\n"
    return list(facts), distractors(), question, " ".join(codes)


def _filler(rng: np.random.Generator, name: str) -> str:
    weather, place = _WEATHER[rng.integers(len(_WEATHER))], _PLACES[rng.integers(len(_PLACES))]
    return f"{weather} over {place} of {name} for {rng.integers(2, 100)} days.\n"


def _names(rng: np.random.Generator, split: Split) -> Iterator[str]:
    """Names of four syllables, each once; the number of a name, modulo the splits, is the number of its split."""
    splits = get_args(Split)
    seen: set[int] = set()
    while True:
        number = int(rng.integers(len(_SYLLABLES) ** 4 // len(splits))) * len(splits) + splits.index(split)
        if number in seen:
            continue
        seen.add(number)
        name = ""
        for _ in range(4):
            number, syllable = divmod(number, len(_SYLLABLES))
            name += _SYLLABLES[syllable]
        yield name.capitalize()
