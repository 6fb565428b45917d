"""The tiny tokenizer loses nothing and never lets text become structure."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.errors import CheckpointError, ConfigError
from k3rl.model.bpe_tokenizer import load_tokenizer
from k3rl.model.tokenizer import TINY_FILE, TinyTokenizer

WORDS = ("price", "of", "stock", "find", "order_item")
MARKERS = ("<|end|>", "<|user|>", "<|call|>")
TOKENIZER = TinyTokenizer(WORDS, MARKERS)
ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()))  # lone surrogates included


@given(ANY_TEXT)
def test_every_string_comes_back_exactly(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(len(MARKERS) <= i < TOKENIZER.vocab_size for i in ids)


@given(ANY_TEXT, ANY_TEXT)
def test_pieces_encoded_apart_decode_to_the_whole(left: str, right: str) -> None:
    # Two halves of a surrogate pair, encoded apart, stay two halves.
    assert TOKENIZER.decode(TOKENIZER.encode(left) + TOKENIZER.encode(right)) == left + right


@pytest.mark.parametrize("text", ["\ud83d\ude00", "😀", "\ud83d", "\x00\x7f\r\t", "e\u0301", "\U0010ffff", ""])
def test_hard_strings_come_back_exactly(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("around", ["{}", "a{}b", " {} ", "{0}{0}", "<|{}|>"])
def test_text_that_spells_a_marker_is_only_text(marker: str, around: str) -> None:
    text = around.format(marker)
    ids = TOKENIZER.encode(text)
    assert not set(ids) & set(TOKENIZER.markers.values())
    assert TOKENIZER.decode(ids) == text


def test_a_word_is_one_token_only_when_it_stands_alone() -> None:
    assert len(TOKENIZER.encode("price")) == 1
    assert len(TOKENIZER.encode("price of stock")) == 5
    assert len(TOKENIZER.encode("prices")) == 6
    assert len(TOKENIZER.encode("stock9")) == 6
    assert TOKENIZER.encode("priceé")[:5] == TOKENIZER.encode("p r i c e")[::2]


@pytest.mark.parametrize("name", ["bokip", "stoc", "417"])
@pytest.mark.parametrize("around", [("", ""), (" ", " "), ("price of ", "\n"), ("(", ")"), ("é ", ",")])
def test_a_name_is_the_same_tokens_wherever_it_stands(name: str, around: tuple[str, str]) -> None:
    before, after = around
    ids = TOKENIZER.encode(before + name + after)
    assert ids == TOKENIZER.encode(before) + TOKENIZER.encode(name) + TOKENIZER.encode(after)
    assert len(TOKENIZER.encode(name)) == len(name)


def test_decode_accepts_any_ids() -> None:
    rng = random.Random(0)
    for _ in range(5000):
        ids = [rng.randrange(-5, TOKENIZER.vocab_size + 5) for _ in range(rng.randrange(20))]
        assert isinstance(TOKENIZER.decode(ids), str)
    assert TOKENIZER.decode([TOKENIZER.marker("<|end|>"), -1, 10**9]) == "<|end|>\ufffd\ufffd"


def test_a_saved_tokenizer_loads_with_the_same_ids_and_digest(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, TinyTokenizer)
    assert loaded.digest == TOKENIZER.digest
    assert loaded.vocab_size == TOKENIZER.vocab_size
    assert loaded.markers == TOKENIZER.markers
    assert loaded.encode("price of bokip é") == TOKENIZER.encode("price of bokip é")


def test_the_digest_depends_on_words_markers_and_their_order() -> None:
    others = [
        TinyTokenizer(WORDS[::-1], MARKERS),
        TinyTokenizer(WORDS, MARKERS[::-1]),
        TinyTokenizer(WORDS[:-1], MARKERS),
    ]
    assert len({TOKENIZER.digest, *(t.digest for t in others)}) == 4


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"type": "bpe"}', '{"type": "tiny", "words": ["a b"], "markers": []}']
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / TINY_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=TINY_FILE):
        TinyTokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("words", "markers"),
    [(("a b",), ()), (("x",), ()), (("né",), ()), (("of", "of"), ()), ((), ("end",)), ((), ("<|a|>", "<|a|>"))],
)
def test_words_and_markers_that_could_clash_are_refused(words: tuple[str, ...], markers: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        TinyTokenizer(words, markers)


def test_an_unknown_marker_is_named() -> None:
    with pytest.raises(ConfigError, match="asst"):
        TOKENIZER.marker("<|asst|>")
