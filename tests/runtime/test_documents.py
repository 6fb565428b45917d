"""Long documents: the answer follows from the evidence, from all of it, and the evidence lies across the window."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any, get_args

import pyarrow.parquet as pq
import pytest

from k3rl.errors import ConfigError
from k3rl.runtime import documents
from k3rl.runtime.documents import EVIDENCE, MIN_GAP, Kind, Split, make_document, write_documents

KINDS = get_args(Kind)
LENGTH = 8192


def num_bytes(text: str) -> int:
    return len(text.encode())


def _rows(kind: Kind, count: int = 12, split: Split = "train", seed: int = 3) -> list[dict[str, Any]]:
    return [make_document(kind, LENGTH, seed, split, i, num_bytes) for i in range(count)]


def _answers(text: str, question: str) -> set[str]:
    """Every answer that ``text`` leaves possible, by someone who knows the rules and may join what a gap separates.

    The empty answer stands for one that would have to be invented.
    """
    if title := re.search(r"Chronicle of (\w+)", question):
        found = re.findall(rf"Chronicle of {title[1]}, page (\d) of {EVIDENCE}, code (\w+)", text)
        codes = {int(page): code for page, code in found}
        return {" ".join(codes.get(page, "") for page in range(1, EVIDENCE + 1)) if len(codes) == EVIDENCE else ""}
    links = dict(re.findall(r"(\w+) handed the parcel to (\w+)\.", text))
    at, left = question.split()[0], EVIDENCE
    while left and at in links:
        at, left = links[at], left - 1
    if not left:
        return {at}
    answers = {""}
    for person in set(links) - set(links.values()) - {question.split()[0]}:  # first one of a chain
        for _ in range(left - 1):
            person = links.get(person, "")
        answers.add(person)
    return answers


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_follows_from_the_evidence_and_not_from_any_part_of_it(kind: Kind) -> None:
    for row in _rows(kind):
        text, spans = row["prompt"], row["evidence"]
        question = text.splitlines()[-1]
        facts = [text[s["start"] : s["end"]] for s in spans]
        assert len(facts) == EVIDENCE
        assert _answers(text, question) == {row["completion"]} == _answers("".join(facts), question)
        for fact in facts:
            assert text.count(fact) == 1
            left = _answers(text.replace(fact, ""), question)
            assert len(left) > 1 or left == {""}


@pytest.mark.parametrize("kind", KINDS)
def test_the_evidence_lies_across_the_window_and_in_no_fixed_order(kind: Kind) -> None:
    orders = set()
    for row in _rows(kind, 24):
        starts = [s["start"] / len(row["prompt"]) for s in row["evidence"]]
        ascending = sorted(starts)
        assert ascending[0] < 1 / 4
        assert ascending[-1] > 3 / 4
        assert min(b - a for a, b in itertools.pairwise(ascending)) >= MIN_GAP
        orders.add(tuple(ascending.index(s) for s in starts))
    assert len(orders) > 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [documents.MIN_LENGTH, 3 * LENGTH])
def test_a_document_is_as_long_as_asked_for_and_never_longer(kind: Kind, length: int) -> None:
    def words(text: str) -> int:
        return len(re.findall(r"\w+|[^\w ]", text))

    for count in (num_bytes, words):
        for i in range(4):
            assert 0.97 * length <= make_document(kind, length, 0, "train", i, count)["length"] <= length


@pytest.mark.parametrize("kind", KINDS)
def test_equal_seeds_give_equal_documents_and_splits_share_no_name(kind: Kind) -> None:
    assert _rows(kind) == _rows(kind)
    assert _rows(kind)[0] != _rows(kind, seed=4)[0]
    of_split = [
        {w.lower() for row in _rows(kind, split=s) for w in re.findall(r"\b[A-Z]\w{7}\b", row["prompt"])}
        for s in get_args(Split)
    ]
    assert all(of_split)
    assert not of_split[0] & of_split[1] | of_split[0] & of_split[2] | of_split[1] & of_split[2]


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_written_in_row_groups_and_reads_back(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "ROW_GROUP_TOKENS", 5 * LENGTH)
    path = tmp_path / "new" / "documents.parquet"
    write_documents(path, kind=kind, length=LENGTH, count=12, seed=3, num_tokens=num_bytes)
    file = pq.ParquetFile(path)
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [5, 5, 2]
    assert file.read().to_pylist() == _rows(kind)
    with pytest.raises(ConfigError, match="exists"):
        write_documents(path, kind=kind, length=LENGTH, count=1, num_tokens=num_bytes)
    with pytest.raises(ConfigError, match="length"):
        write_documents(tmp_path / "b", kind=kind, length=100, count=1, num_tokens=num_bytes)
