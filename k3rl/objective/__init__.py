"""The training objective, composed of small functions."""

from k3rl.objective.batch import ObjectiveBatch, Sample, TokenVectors, build_batch
from k3rl.objective.objective import Objective
from k3rl.objective.presets import PRESETS, resolve

__all__ = ["PRESETS", "Objective", "ObjectiveBatch", "Sample", "TokenVectors", "build_batch", "resolve"]
