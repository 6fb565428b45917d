"""Ray, kept small: start or join a cluster, make actors, and wait for answers with a deadline and a name."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from k3rl.errors import StarvedError

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


def wait_for(refs: Sequence[Any], names: Sequence[str], timeout_s: float, what: str) -> list[Any]:
    """Results of all ``refs``, or a StarvedError that says who is late; an actor's own error is raised as it is."""
    import ray
    from ray.exceptions import RayTaskError

    _, late = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    if late:
        missing = [name for name, ref in zip(names, refs, strict=True) if ref in late]
        raise StarvedError(f"{what}: no answer from {', '.join(missing)} within {timeout_s:g} s")
    try:
        return ray.get(list(refs), timeout=timeout_s)
    except RayTaskError as error:
        raise error.as_instanceof_cause() from error
