"""Tokenizers with files: tiktoken's, as Kimi ships them, Hugging Face's ``tokenizer.json``, and the tiny one's own.

All obey the rule of every tokenizer here: text never becomes a marker, whatever it says.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3rl.errors import CheckpointError, ConfigError
from k3rl.model.tokenizer import TINY_FILE, TinyTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from k3rl.model.tokenizer import Tokenizer

TIKTOKEN_FILE, SETTINGS_FILE, HUGGING_FACE_FILE = "tiktoken.model", "tokenizer_config.json", "tokenizer.json"
KIMI_SPECIALS = 256
"""Slots for special tokens behind the merges of a Kimi vocabulary."""
# Kimi's cut of text into words: Han runs apart; words with their contraction, by case; digits in threes; punctuation
# with the newlines behind it; newlines; spaces.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
MAX_PIECE_CHARS, MAX_RUN_CHARS = 400_000, 25_000
"""Longer texts, and longer runs without a change between space and not space, are cut before the merges see them."""
_REPLACEMENT = "\ufffd"


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder; CheckpointError when it holds none that is known here."""
    folder = Path(folder)
    if (folder / TIKTOKEN_FILE).is_file():
        return TiktokenTokenizer.load(folder)
    if (folder / HUGGING_FACE_FILE).is_file():
        return HuggingFaceTokenizer.load(folder)
    if (folder / TINY_FILE).is_file():
        return TinyTokenizer.load(folder)
    raise CheckpointError(f"{folder} holds no tokenizer: none of {TIKTOKEN_FILE}, {HUGGING_FACE_FILE} and {TINY_FILE}")


def byte_tokenizer(markers: Sequence[str]) -> TiktokenTokenizer:
    """One id a byte, the markers behind them: no merges, so that it needs no training and knows every language."""
    specials = {name: 256 + i for i, name in enumerate(markers)}
    return TiktokenTokenizer({bytes([b]): b for b in range(256)}, specials, 256 + len(markers))


class _Published:
    """Special tokens by name, and how many ids there are."""

    def __init__(self, specials: Mapping[str, int], vocab_size: int) -> None:
        self._specials, self._vocab_size = dict(specials), vocab_size
        self._names = {i: name for name, i in specials.items()}

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is below it."""
        return self._vocab_size

    @property
    def markers(self) -> Mapping[str, int]:
        """Special tokens and their ids."""
        return self._specials

    def marker(self, name: str) -> int:
        """Id of a special token; ConfigError when there is none of that name."""
        if name not in self._specials:
            raise ConfigError(f"the tokenizer has no marker {name!r}; it has {', '.join(list(self._specials)[:20])}")
        return self._specials[name]


class TiktokenTokenizer(_Published):
    """Byte-pair merges from a tiktoken file, and special tokens that only structure uses."""

    def __init__(self, ranks: Mapping[bytes, int], specials: Mapping[str, int], vocab_size: int) -> None:
        import tiktoken

        overlap = set(ranks.values()) & set(specials.values())
        if overlap:
            raise CheckpointError(f"ids {sorted(overlap)[:5]} are both merges and special tokens")
        super().__init__(specials, vocab_size)
        self._ranks = dict(ranks)
        self._bytes = {i: token for token, i in ranks.items()}
        self._encoding = tiktoken.Encoding(
            name="k3rl", pat_str=KIMI_PATTERN, mergeable_ranks=self._ranks, special_tokens={}
        )

    @property
    def digest(self) -> str:
        """SHA-256 of merges and special tokens: equal digests mean equal ids for every text."""
        digest = hashlib.sha256(_to_tiktoken(self._ranks))
        digest.update(json.dumps(sorted(self._specials.items())).encode())
        return digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, none of them special; half a surrogate pair becomes U+FFFD."""
        return [i for piece in _pieces(text) for i in self._encoding.encode_ordinary(piece)]

    def decode(self, ids: Iterable[int]) -> str:
        """Inverse of ``encode``. Special tokens read as their names, unused ids as U+FFFD. Never raises."""
        parts: list[str] = []
        for is_text, run in itertools.groupby(ids, key=lambda i: int(i) in self._bytes):
            if is_text:
                parts.append(b"".join(self._bytes[int(i)] for i in run).decode("utf-8", "replace"))
            else:
                parts += [self._names.get(int(i), _REPLACEMENT) for i in run]
        return "".join(parts)

    def save(self, folder: str | Path) -> None:
        """Write ``tiktoken.model`` and the special tokens into ``folder``."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TIKTOKEN_FILE).write_bytes(_to_tiktoken(self._ranks))
        added = {
            str(i): {"content": name, "special": True}
            for name, i in sorted(self._specials.items(), key=lambda item: item[1])
        }
        settings = {"added_tokens_decoder": added, "vocab_size": self._vocab_size}
        (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")

    @staticmethod
    def load(folder: str | Path) -> TiktokenTokenizer:
        """Read a folder; CheckpointError names the file that is wrong."""
        path = Path(folder) / TIKTOKEN_FILE
        try:
            lines = [line.split() for line in path.read_bytes().splitlines() if line]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is no tiktoken file: {error}") from error
        settings = _read_settings(Path(folder))
        added = settings.get("added_tokens_decoder", {})
        specials = {entry["content"]: int(i) for i, entry in added.items()}
        return TiktokenTokenizer(ranks, specials, settings.get("vocab_size", len(ranks) + KIMI_SPECIALS))


class HuggingFaceTokenizer(_Published):
    """A ``tokenizer.json``, run by Hugging Face's ``tokenizers``."""

    def __init__(self, definition: str) -> None:
        from tokenizers import Tokenizer as Backend

        self._backend: Any = Backend.from_str(definition)
        self._backend.encode_special_tokens = True  # in text they are text
        added = self._backend.get_added_tokens_decoder()
        specials = {token.content: i for i, token in added.items() if token.special}
        super().__init__(specials, max(self._backend.get_vocab(with_added_tokens=True).values()) + 1)

    @property
    def digest(self) -> str:
        """SHA-256 of the definition: equal digests mean equal ids for every text."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, none of them special; half a surrogate pair becomes U+FFFD."""
        clean = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        return self._backend.encode(clean, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Inverse of ``encode``. Special tokens read as their names, unused ids as U+FFFD. Never raises."""
        parts: list[str] = []
        for kind, run in itertools.groupby(map(int, ids), key=self._kind):
            if kind == "text":
                parts.append(self._backend.decode(list(run), skip_special_tokens=False))
            else:
                parts += [self._names.get(i, _REPLACEMENT) for i in run]
        return "".join(parts)

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.json`` into ``folder``."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / HUGGING_FACE_FILE).write_text(self._backend.to_str(pretty=True), encoding="utf-8")

    @staticmethod
    def load(folder: str | Path) -> HuggingFaceTokenizer:
        """Read a folder; CheckpointError names the file that is wrong."""
        path = Path(folder) / HUGGING_FACE_FILE
        try:
            return HuggingFaceTokenizer(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises plain Exception for what it cannot read
            raise CheckpointError(f"{path} is no tokenizer: {error}") from error

    def _kind(self, i: int) -> str:
        if i in self._names:
            return "special"
        return "text" if 0 <= i < self._vocab_size and self._backend.id_to_token(i) is not None else "unused"


def _to_tiktoken(ranks: Mapping[bytes, int]) -> bytes:
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ordered)


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS_FILE
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} does not say the special tokens: {error}") from error


def _pieces(text: str) -> Iterator[str]:
    """Cuts of a long text: at most MAX_PIECE_CHARS, and no run of spaces or of other characters over MAX_RUN_CHARS."""
    for start in range(0, len(text), MAX_PIECE_CHARS):
        piece = text[start : start + MAX_PIECE_CHARS]
        if len(piece) <= MAX_RUN_CHARS:  # as good as always
            yield piece
            continue
        begin = 0
        for run in re.finditer(r"\s+|\S+", piece):
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield piece[begin:cut]
                begin = cut
        if begin < len(piece):
            yield piece[begin:]
