"""Text to token ids and back: a tiny tokenizer, lossless for every string, that needs no files and no training.

Layout of the ids, in this order:
  1. structural markers (``<|end|>``); :meth:`TinyTokenizer.encode` never yields one, whatever the text says;
  2. whole words: a maximal run of word characters that equals a known word is one token;
  3. the 95 printable ASCII characters and the newline, one token each;
  4. 16 half bytes: every other character is spelt as the hexadecimal digits of its UTF-8 bytes, two tokens a byte.

The fixed part is 112 ids, so that markers and words have 144 left in a vocabulary of 256. A word counts only when it
stands alone, and a space is always a token of its own: a name is the same tokens wherever it occurs. Byte-pair
encodings that merge a leading space do not have this property, and copying is then much slower to learn.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from k3rl.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

TINY_FILE = "tiny_tokenizer.json"
_CHARACTERS = (*(chr(c) for c in range(0x20, 0x7F)), "\n")
_HEX_DIGITS = "0123456789abcdef"
_RUN = re.compile(r"\w+|\W")
_REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """What chat formats, engines and checkpoints need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is below it."""
        ...

    @property
    def markers(self) -> Mapping[str, int]:
        """Structural markers and their ids."""
        ...

    @property
    def digest(self) -> str:
        """Names the mapping: equal digests mean equal ids for every text."""
        ...

    def marker(self, name: str) -> int:
        """Id of a structural marker; ConfigError when there is none of that name."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, none of them a marker's."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Inverse of ``encode``. Markers read as their names; ids that no text has read as U+FFFD. Never raises."""
        ...

    def save(self, folder: str | Path) -> None:
        """Write its files into a folder, where ``k3rl.model.bpe_tokenizer.load_tokenizer`` finds them."""
        ...


class TinyTokenizer:
    """Markers, whole words, characters and half bytes; see the module's docstring."""

    def __init__(self, words: Sequence[str], markers: Sequence[str]) -> None:
        _check_vocabulary(words, markers)
        self._words = tuple(words)
        self._markers = {name: i for i, name in enumerate(markers)}
        self._word_ids = {word: len(markers) + i for i, word in enumerate(words)}
        first_character = len(markers) + len(words)
        self._character_ids = {c: first_character + i for i, c in enumerate(_CHARACTERS)}
        self._first_half_byte = first_character + len(_CHARACTERS)
        self._texts = (*markers, *words, *_CHARACTERS)

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is below it."""
        return self._first_half_byte + len(_HEX_DIGITS)

    @property
    def markers(self) -> Mapping[str, int]:
        """Structural markers and their ids."""
        return self._markers

    @property
    def digest(self) -> str:
        """SHA-256 of the vocabulary: equal digests mean equal ids for every text."""
        return hashlib.sha256(self._to_json().encode()).hexdigest()

    def marker(self, name: str) -> int:
        """Id of a structural marker; ConfigError when there is none of that name."""
        if name not in self._markers:
            raise ConfigError(f"the tokenizer has no marker {name!r}; it has {', '.join(self._markers)}")
        return self._markers[name]

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, none of them a marker's; any string, lone surrogates included."""
        ids: list[int] = []
        for run in _RUN.findall(text):
            word = self._word_ids.get(run)
            if word is None:
                ids.extend(self._spell(run))
            else:
                ids.append(word)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Inverse of ``encode``. Markers read as their names; ids that no text has read as U+FFFD. Never raises."""
        parts: list[str] = []
        digits: list[str] = []
        for i in ids:
            half_byte = int(i) - self._first_half_byte
            if 0 <= half_byte < len(_HEX_DIGITS):
                digits.append(_HEX_DIGITS[half_byte])
                continue
            if digits:
                parts.append(_decode_hex("".join(digits)))
                digits.clear()
            parts.append(self._texts[i] if 0 <= i < self._first_half_byte else _REPLACEMENT)
        if digits:
            parts.append(_decode_hex("".join(digits)))
        return "".join(parts)

    def save(self, folder: str | Path) -> None:
        """Write the vocabulary as JSON into ``folder``."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / TINY_FILE).write_text(self._to_json(), encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> TinyTokenizer:
        """Read what ``save`` wrote; CheckpointError when the file is not that."""
        path = Path(folder) / TINY_FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["type"] != "tiny":
                raise CheckpointError(f"{path} holds a tokenizer of type {data['type']!r}, not 'tiny'")
            return cls(words=data["words"], markers=data["markers"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} holds no tokenizer: {error}") from error

    def _spell(self, run: str) -> Iterator[int]:
        for character in run:
            known = self._character_ids.get(character)
            if known is not None:
                yield known
                continue
            # surrogatepass: JSON from outside may hold half of a surrogate pair, which plain UTF-8 refuses.
            for byte in character.encode("utf-8", "surrogatepass"):
                yield self._first_half_byte + (byte >> 4)
                yield self._first_half_byte + (byte & 15)

    def _to_json(self) -> str:
        return json.dumps({"type": "tiny", "markers": list(self._markers), "words": self._words}, indent=1)


def _decode_hex(digits: str) -> str:
    """Text of a run of half bytes; what is no UTF-8 (a policy may sample anything) reads as U+FFFD."""
    whole = len(digits) & ~1
    data = bytes.fromhex(digits[:whole])
    try:
        text = data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")
    return text + _REPLACEMENT * (len(digits) - whole)


def _check_vocabulary(words: Sequence[str], markers: Sequence[str]) -> None:
    if isinstance(words, str) or isinstance(markers, str):
        raise ConfigError("words and markers are sequences of strings, not one string")
    for word in words:
        if not re.fullmatch(r"[A-Za-z0-9_]{2,}", word):
            raise ConfigError(f"{word!r} is no word token: at least two ASCII letters, digits or underscores")
    for name in markers:
        if not re.fullmatch(r"<\|\w+\|>", name):
            raise ConfigError(f"{name!r} is no marker: write it as '<|name|>'")
    for kind, names in (("word", words), ("marker", markers)):
        if len(set(names)) != len(names):
            raise ConfigError(f"a {kind} token is given twice in {list(names)}")
