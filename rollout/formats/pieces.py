"""A sampled turn cut at its structural markers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3rl.rollout.formats.strict_json import ParseFailure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3rl.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """A marker and the text between it and the next one; ``marker`` is '' for text before the first."""

    marker: str
    text: str


def split_turn(tokenizer: Tokenizer, ids: Sequence[int], stop: str) -> list[Piece]:
    """Pieces of a turn without its stop token; ParseFailure when that is not the last token, and the only one.

    Only ids are structure: text that spells a marker stays text.
    """
    stop_id = tokenizer.marker(stop)
    if len(ids) == 0 or ids[-1] != stop_id:
        raise ParseFailure("no_stop", f"the turn does not end with {stop}")
    names = {i: name for name, i in tokenizer.markers.items()}
    pieces: list[Piece] = []
    marker, start = "", 0
    for at, token in enumerate(ids[:-1]):
        if token == stop_id:
            raise ParseFailure("malformed", f"{stop} stands before the end of the turn")
        if token in names:
            pieces.append(Piece(marker, tokenizer.decode(ids[start:at])))
            marker, start = names[token], at + 1
    pieces.append(Piece(marker, tokenizer.decode(ids[start:-1])))
    return pieces if pieces[0].text or len(pieces) == 1 else pieces[1:]
