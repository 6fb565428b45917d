"""Ray, kept small: start or join a cluster, make actors, and wait for answers with a deadline and a name."""

from __future__ import annotations

import logging
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from k3rl.errors import K3rlError, StarvedError, WorkerDiedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k3rl.config import RunConfig


@contextmanager
def ray_session(config: RunConfig) -> Iterator[None]:
    """Join the cluster named by ``RAY_ADDRESS``, or start one inside this process tree; shut down what was started."""
    import ray

    # Without this Ray would hide accelerators from actors that ask for none, and the choice belongs to the worker.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    else:
        # Actors of a small machine share its cores by turns, so each counts as one whatever the number of cores.
        workers = config.rollout.num_workers + 1
        ray.init(
            num_cpus=max(os.cpu_count() or 1, workers),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    try:
        yield
    finally:
        ray.shutdown()


def make_actor(cls: type, *args: Any, name: str) -> Any:
    """Start one actor of ``cls``; it dies with the driver."""
    import ray

    return ray.remote(num_cpus=1)(cls).options(name=name).remote(*args)


def wait_for(refs: Sequence[Any], names: Sequence[str], timeout_s: float, what: str, key: str = "") -> list[Any]:
    """Results of all ``refs``; the first that fails ends the waiting.

    Raises StarvedError that says who is late and which configuration ``key`` is the deadline, WorkerDiedError that says
    who is gone, or what an actor itself raised.
    """
    import ray

    owners = dict(zip(refs, names, strict=True))
    deadline = time.monotonic() + timeout_s
    results: dict[Any, Any] = {}
    waiting = list(refs)
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(owners[ref] for ref in waiting)
            raise StarvedError(f"{what}: no answer from {late} within {timeout_s:g} s{key and f' ({key})'}")
        for ref in ready:
            results[ref] = _result(ref, owners[ref], what)
    return [results[ref] for ref in refs]


def _result(ref: Any, name: str, what: str) -> Any:
    import ray
    from ray.exceptions import RayActorError, RayError, RayTaskError

    try:
        return ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, K3rlError):
            raise error.cause from error  # it says all in one line; where it was raised is in ``__cause__``
        raise error.as_instanceof_cause() from error
    except RayActorError as error:
        raise WorkerDiedError(f"{what}: {name} died: {_first_line(error)}; go on with --resume") from error
    except RayError as error:
        raise WorkerDiedError(f"{what}: the answer of {name} is lost: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
