"""The screen helpers work on a terminal and in a log file."""

from __future__ import annotations

import io

from rich.console import Console

from k3rl.observe.console import progress, table


def run(*, terminal: bool, total: int) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with progress("rollouts [a]", total, console) as bar:
        for _ in range(total):
            bar.advance(note="success [0.5]")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_progress_is_at_most_ten_plain_lines() -> None:
    lines = run(terminal=False, total=1000).splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("rollouts [a] 1000/1000")
    assert "success [0.5]" in lines[-1]
    assert "\x1b" not in "".join(lines)
    assert len(run(terminal=False, total=3).splitlines()) == 3


def test_on_a_terminal_progress_is_a_bar_with_the_note() -> None:
    text = run(terminal=True, total=3)
    assert "3/3" in text
    assert "success [0.5]" in text


def test_a_table_shows_every_column_and_leaves_absent_cells_empty() -> None:
    console = Console(file=io.StringIO(), width=80)
    table("Results [x]", [{"name": "grid", "success": 0.51234}, {"name": "maze", "turns": 3}], console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in ("Results [x]", "name", "success", "turns", "0.5123", "3"):
        assert part in text
    assert "None" not in text
