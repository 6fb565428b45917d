"""One error tree, a branch per boundary: who is at fault decides who may go on.

Every class survives pickling (Ray moves errors between processes), and a class that refines a built-in error also
inherits it, so that callers who know only Python catch it too.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class K3rlError(Exception):
    """Base of every error that k3rl raises on purpose."""


class ConfigError(K3rlError, ValueError):
    """The user's configuration is wrong; the message names the key and what would be right."""


class UnknownEnvironmentError(ConfigError):
    """An environment id that no registry knows."""


class CheckpointError(K3rlError):
    """A checkpoint is missing, damaged, or of another model."""


class EngineError(K3rlError):
    """The sampling engine failed; what it was sampling is not the policy's fault."""


class EnvError(K3rlError):
    """An environment failed outside of what the policy did."""


class RewardError(K3rlError):
    """A reward function failed; the reward is absent, never zero."""


class SandboxError(K3rlError):
    """A sandbox could not be made or kept."""


class WorkerDiedError(K3rlError):
    """An actor of the run is gone; the message names it. The run can go on with ``--resume``."""


class WeightSyncError(K3rlError):
    """An engine refused or failed to take new weights; the old ones stay active."""


class LedgerError(K3rlError):
    """A transition that the trajectory ledger does not allow."""


class TrainingError(K3rlError):
    """The learner cannot make a sound update."""


class StarvedError(K3rlError):
    """The run waits for something that will not come: the message says for what, and for how long."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the known name nearest to ``name``, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{near[0]}'?" if near else ""
