"""Calls that raise or hang cost themselves only."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from k3rl.rollout.deadline import call_all


def _raise(error: BaseException) -> int:
    raise error


def _late() -> int:
    time.sleep(0.5)
    return -1


def test_results_and_errors_come_in_the_order_of_the_calls() -> None:
    own = TimeoutError("its own")
    exiting = SystemExit(1)
    results = call_all([lambda: 1, lambda: _raise(own), lambda: 3, lambda: _raise(exiting)], 5.0)
    assert results == [1, own, 3, exiting]
    assert call_all([], 5.0) == []


def test_a_call_has_its_time_from_its_own_start_and_not_from_the_queues() -> None:
    calls = [lambda: time.sleep(0.1)] * 96  # three rounds of 32 threads
    assert call_all(calls, 0.25) == [None] * 96


def test_b59_a_late_result_does_not_replace_the_timeout() -> None:
    results = call_all([_late, lambda: time.sleep(0.3), lambda: 7], 0.4)
    assert isinstance(results[0], TimeoutError)
    assert results[1:] == [None, 7]


def test_b59_deadlines_hold_in_a_thread_that_is_not_the_main_one_and_the_next_calls_work() -> None:
    """A deadline by ``signal.alarm`` raises outside of the main thread."""
    found: list[object] = []

    def work() -> None:
        begin = time.monotonic()
        found.extend(call_all([lambda: time.sleep(3.0), lambda: 1], 0.2))
        found.append(time.monotonic() - begin < 0.2 + 0.5)
        found.extend(call_all([lambda: 2], 0.2))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10.0)
    assert isinstance(found[0], TimeoutError)
    assert found[1:] == [1, True, 2]


def test_b59_a_hung_call_does_not_keep_the_process_alive() -> None:
    code = "import time; from k3rl.rollout.deadline import call_all; call_all([lambda: time.sleep(60)], 0.1)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)
