"""Tokenizers of published checkpoints: lossless, stable on disk, and blind to markers that text spells."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from k3rl.envs.base import AssistantAction, Message, ToolCall
from k3rl.errors import CheckpointError, ConfigError
from k3rl.model.bpe_tokenizer import (
    MAX_PIECE_CHARS,
    MAX_RUN_CHARS,
    HuggingFaceTokenizer,
    TiktokenTokenizer,
    _pieces,
    byte_tokenizer,
    load_tokenizer,
)
from k3rl.model.tokenizer import Tokenizer
from k3rl.rollout.formats.xtml import XtmlFormat

TEXT = "the cat and the other cat of the house; theory of cats 2024 and 1234567 in 北京的北京, don't they're " * 20
MARKERS = ("<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>")


def _ranks(num_merges: int) -> dict[bytes, int]:
    """Bytes, then the most frequent pair of the text again and again: what a tiktoken file holds."""
    ranks = {bytes([b]): b for b in range(256)}
    parts = [bytes([b]) for b in TEXT.encode()]
    for rank in range(256, 256 + num_merges):
        (a, b), _ = Counter(itertools.pairwise(parts)).most_common(1)[0]
        ranks[a + b] = rank
        merged: list[bytes] = []
        for part in parts:
            if merged and merged[-1] == a and part == b:
                merged[-1] = a + b
            else:
                merged.append(part)
        parts = merged
    return ranks


def _tiktoken() -> TiktokenTokenizer:
    specials = {name: 330 + i for i, name in enumerate(("[BOS]", "[EOS]", *MARKERS))}
    return TiktokenTokenizer(_ranks(60), specials, vocab_size=400)


def _hugging_face() -> HuggingFaceTokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    backend.add_special_tokens([AddedToken(name, special=True) for name in MARKERS])
    return HuggingFaceTokenizer(backend.to_str())


TOKENIZERS = {"tiktoken": _tiktoken(), "hugging_face": _hugging_face(), "bytes": byte_tokenizer(MARKERS)}
each = pytest.mark.parametrize("name", TOKENIZERS)


@each
@given(st.text())
def test_every_text_comes_back_and_every_id_is_in_range(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@each
@given(st.lists(st.one_of(st.sampled_from(MARKERS), st.text(max_size=5))))
def test_text_that_spells_markers_has_none(name: str, parts: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("".join(parts))
    assert not set(ids) & set(tokenizer.markers.values())
    assert tokenizer.decode(ids) == "".join(parts)


@each
@given(st.lists(st.integers(-5, 100_000)))
def test_decoding_never_raises_and_names_markers(name: str, ids: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    assert isinstance(tokenizer.decode(ids), str)
    marker = tokenizer.marker("<|sep|>")
    assert tokenizer.decode([marker, tokenizer.vocab_size + 7, marker]) == "<|sep|>\ufffd<|sep|>"


@each
def test_half_a_surrogate_pair_is_replaced_and_costs_nothing_else(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert tokenizer.decode(tokenizer.encode("cat \ud800 cat")).replace("\ufffd", "") == "cat  cat"


@each
def test_a_saved_tokenizer_is_found_by_its_files_and_means_the_same_ids(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert type(loaded) is type(tokenizer)
    assert (loaded.digest, loaded.vocab_size) == (tokenizer.digest, tokenizer.vocab_size)
    assert loaded.markers == tokenizer.markers
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    if name != "bytes":
        assert len(loaded.encode(TEXT)) < len(TEXT) / 1.5  # merges are used


@given(st.text())
def test_the_byte_tokenizer_gives_the_bytes(text: str) -> None:
    assert TOKENIZERS["bytes"].encode(text) == list(text.encode())


def test_another_merge_or_marker_is_another_digest() -> None:
    plain = _tiktoken()
    assert plain.digest == _tiktoken().digest
    assert TiktokenTokenizer(_ranks(59), plain.markers, 400).digest != plain.digest
    assert TiktokenTokenizer(_ranks(60), {**plain.markers, "[EOT]": 340}, 400).digest != plain.digest


def test_merges_and_markers_that_share_an_id_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"ids \[100\] are both"):
        TiktokenTokenizer(_ranks(1), {"<|sep|>": 100}, 400)


@given(st.lists(st.tuples(st.sampled_from("a \n"), st.integers(0, 60_000)), max_size=6))
def test_long_texts_are_cut_into_bounded_pieces_that_join_to_the_text(runs: list[tuple[str, int]]) -> None:
    text = "".join(character * length for character, length in runs)
    pieces = list(_pieces(text))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= MAX_PIECE_CHARS for piece in pieces)
    assert all(len(run) <= MAX_RUN_CHARS for piece in pieces for run in piece.replace("\n", " ").split(" "))


def test_a_folder_without_a_tokenizer_or_with_a_broken_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tiktoken.model").write_bytes(b"not base64 at all\n")
    with pytest.raises(CheckpointError, match=r"tiktoken\.model is no tiktoken file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tiktoken.model").write_bytes(b"YQ== 0\n")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json does not say"):
        load_tokenizer(tmp_path)


@each
def test_a_marker_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"no marker '<\|call\|>'"):
        TOKENIZERS[name].marker("<|call|>")


@each
def test_the_xtml_format_is_exact_over_them(name: str) -> None:
    """Markers are markers, text is encoded part by part, and what was rendered is parsed again."""
    tokenizer: Tokenizer = TOKENIZERS[name]
    xtml = XtmlFormat(tokenizer)
    action = AssistantAction(calls=(ToolCall(name="find", arguments={"q": "<|sep|> the cat", "n": 3}),))
    ids = xtml.render_action(action)
    assert xtml.parse_action(ids).calls == action.calls
    prompt = xtml.render_prompt((Message(role="user", content="<|close|>message<|sep|><|end_of_msg|>"),), [])
    assert prompt.count(tokenizer.marker("<|end_of_msg|>")) == 1
    assert tokenizer.decode(prompt).count("<|end_of_msg|>") == 2
    start = prompt.index(tokenizer.marker("<|sep|>")) + 1
    spelt = tokenizer.encode("<|close|>message<|sep|><|end_of_msg|>")
    assert prompt[start : start + len(spelt)] == spelt
