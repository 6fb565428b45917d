"""What a run says on the screen: bars on a terminal, plain lines in a log file."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

PLAIN_LINES = 10
"""Lines that a whole run of :func:`progress` prints when the output is not a terminal."""


class Bar(Protocol):
    """Handle of a running :func:`progress`."""

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Count ``amount`` more as done and show ``note`` beside it."""
        ...


@contextmanager
def progress(description: str, total: int, console: Console | None = None) -> Iterator[Bar]:
    """Show how far a loop of ``total`` iterations has come.

    Example:
        >>> with progress("rollouts", total=3) as bar:  # doctest: +SKIP
        ...     bar.advance(note="success 0.5")
    """
    screen = console or Console()
    if not screen.is_terminal:
        yield _PlainLines(screen, description, total)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=screen) as bars:
        yield _Bar(bars, description, total)


def table(title: str, rows: Sequence[Mapping[str, object]], console: Console | None = None) -> None:
    """Print ``rows`` under the names of their columns, in order of first appearance; an absent cell stays empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    drawn = Table(title=Text(title), title_justify="left")
    for name in names:
        numeric = all(isinstance(row.get(name, 0), int | float) for row in rows)
        drawn.add_column(Text(name), justify="right" if numeric else "left")
    for row in rows:
        drawn.add_row(*(Text(_format(row.get(name))) for name in names))
    (console or Console()).print(drawn)


class _Bar:
    def __init__(self, bars: Progress, description: str, total: int) -> None:
        self._bars = bars
        self._task = bars.add_task(description, total=total, note="")

    def advance(self, amount: int = 1, note: str = "") -> None:
        self._bars.update(self._task, advance=amount, note=note)


class _PlainLines:
    def __init__(self, console: Console, description: str, total: int) -> None:
        self._console, self._description, self._total = console, description, total
        self._done = self._printed = 0
        self._start_s = time.monotonic()

    def advance(self, amount: int = 1, note: str = "") -> None:
        self._done += amount
        share = PLAIN_LINES * self._done // max(self._total, 1)
        if share > self._printed:
            self._printed = share
            passed_s = time.monotonic() - self._start_s
            line = f"{self._description} {self._done}/{self._total} {passed_s:.0f}s {note}".rstrip()
            self._console.print(line, markup=False, highlight=False)


def _format(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
