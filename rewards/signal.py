"""When a group teaches nothing: the one definition, for the buffer's filter and for the advantages."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

NoSignal = Literal["all_absent", "too_small", "all_same"]

EQUAL_REL = 1e-6
"""Values that differ by less than this fraction of the largest are equal: what is left is rounding, not signal."""


def no_signal_reason(values: Sequence[float | None]) -> NoSignal | None:
    """Why these values of one group teach nothing, or None when they do; None and NaN among them are absent."""
    present = [v for v in values if v is not None and not math.isnan(v)]
    if not present:
        return "all_absent"
    if len(present) < 2:
        return "too_small"
    spread = max(present) - min(present)
    return "all_same" if spread <= EQUAL_REL * max(abs(v) for v in present) else None
