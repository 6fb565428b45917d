"""Conformance checker for authors of environments."""

from k3rl.envs.checks import check_environment

__all__ = ["check_environment"]
