"""Run code that may raise or hang (an environment's) without letting it take anything else down."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MAX_THREADS = 32
_T = TypeVar("_T")


def call_all(calls: Sequence[Callable[[], _T]], timeout_s: float) -> list[_T | BaseException]:
    """Run every call in a thread, at most 32 at once, and return what each returned or what it raised.

    A call has ``timeout_s`` from its own start; past it its result is a TimeoutError. Its thread cannot be killed: it
    is left behind and replaced, so that hung calls do not starve the others, and does not keep the process alive.
    """
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    finished: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    started: dict[int, float] = {}
    results: dict[int, Any] = {}
    for i in range(len(calls)):
        todo.put(i)

    def work() -> None:
        while True:
            try:
                i = todo.get_nowait()
            except queue.Empty:
                return
            started[i] = time.monotonic()
            try:
                result: Any = calls[i]()
            except BaseException as error:
                # SystemExit too: code under test may call sys.exit, and that is its own affair.
                result = error
            finished.put((i, result))

    def add_thread() -> None:
        threading.Thread(target=work, name="k3rl-env", daemon=True).start()

    for _ in range(min(len(calls), _MAX_THREADS)):
        add_thread()
    while len(results) < len(calls):
        now = time.monotonic()
        try:
            i, result = finished.get(timeout=max(min(started.copy().values(), default=now) + timeout_s - now, 0.0))
            started.pop(i, None)
            results.setdefault(i, result)
        except queue.Empty:
            now = time.monotonic()
            for i, begin in started.copy().items():
                if now >= begin + timeout_s:
                    del started[i]
                    results[i] = TimeoutError(f"no answer within {timeout_s} s")
                    add_thread()
    return [results[i] for i in range(len(calls))]
