"""What every row of every table of the objective says of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from k3rl.objective.objective import Objective

F = TypeVar("F", bound=Callable[..., Any])

Need = Literal["value", "reference", "rollout", "horizon", "group", "ratio", "uncorrected", "critic", "returns"]
"""A value head, log-probabilities of a reference policy or a teacher, those of the policy that sampled, the longest
episode, samples of one task whose rewards differ, a ratio of two policies, that off-policy sampling is not yet
corrected by that ratio, a value head that is trained, and what to train it on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece(Generic[F]):
    """One row: a function, and all that the objective and its configuration must know of it.

    A row is whole in itself: the objective asks it, and never for its name.
    """

    compute: F
    text: Callable[[Objective], str]
    """Its part of the printed formula."""
    keys: tuple[str, ...] = ()
    """Configuration keys that it reads; their defaults are those of the fields of ``Objective``."""
    needs: tuple[Need, ...] = ()
    gives: tuple[Need, ...] = ()
    """What other rows may need of it."""
    linear: bool = False
    """The loss is linear in what the policy says, as far as this piece goes, and it needs none of that beforehand."""
