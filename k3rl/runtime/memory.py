"""How much memory a piece of work takes at its peak, on Linux."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_EVERY_S = 0.01


@dataclass(slots=True)
class Peak:
    """Bytes above what was held at the start."""

    num_bytes: int = 0


@contextmanager
def watch_memory(mapped: str) -> Iterator[Peak]:
    """Sample this process while the block runs: its own memory, and pages of files whose names end in ``mapped``.

    Pages of other files, of the libraries say, are not counted: the work is not what they are held for.
    """
    start, peak, done = _held(mapped), Peak(), threading.Event()

    def sample() -> None:
        while not done.wait(_EVERY_S):
            peak.num_bytes = max(peak.num_bytes, _held(mapped) - start)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def _held(mapped: str) -> int:
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key = line.split(maxsplit=1)[0]
        if not key.endswith(":"):  # the head of a mapping: its addresses first, the file's name last
            name = line.split(maxsplit=5)[5:]
            counts = not name or name[0].startswith("[") or name[0].endswith(mapped)
        elif key == "Rss:" and counts:
            total += int(line.split()[1]) * 1024
    return total
