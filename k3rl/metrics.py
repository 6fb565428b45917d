"""Metrics that survive being cut up: every mean travels as (numerator, denominator) and is divided once, at the end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean in two parts. ``count`` 0 means that nothing was observed: the metric is absent, not zero."""

    total: float
    count: float

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else math.nan


@dataclass(frozen=True, slots=True)
class Max:
    """A maximum; NaN wins, so that a fault is never hidden by a larger number."""

    value: float

    def __add__(self, other: Max) -> Max:
        if math.isnan(self.value) or math.isnan(other.value):
            return Max(math.nan)
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Sum:
    """A count or a duration that adds up over workers."""

    value: float

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


Metric = Mean | Max | Sum


class Metrics:
    """A bag of named metrics. Names are paths such as ``rollout/stop/length_frac``.

    Example:
        >>> shards = [Metrics({"loss": Mean(3.0, 12)}), Metrics({"loss": Mean(3.0, 4)})]
        >>> Metrics.merge(shards).scalars()
        {'loss': 0.375}
    """

    def __init__(self, values: Mapping[str, Metric] | None = None) -> None:
        self._values: dict[str, Metric] = dict(values or {})

    def add(self, name: str, metric: Metric) -> None:
        """Combine ``metric`` with what is stored under ``name``; kinds must agree."""
        old = self._values.get(name)
        if old is None:
            self._values[name] = metric
        elif type(old) is not type(metric):
            raise TypeError(f"metric {name!r} is a {type(old).__name__}, not a {type(metric).__name__}")
        else:
            self._values[name] = old + metric  # type: ignore[operator]

    def mean(self, name: str, total: float, count: float = 1.0) -> None:
        """Add ``total`` over ``count`` observations to the mean ``name``."""
        self.add(name, Mean(float(total), float(count)))

    def max(self, name: str, value: float) -> None:
        """Raise the maximum ``name`` to ``value`` if that is larger."""
        self.add(name, Max(float(value)))

    def sum(self, name: str, value: float) -> None:
        """Add ``value`` to the total ``name``."""
        self.add(name, Sum(float(value)))

    def __iter__(self) -> Iterator[tuple[str, Metric]]:
        return iter(self._values.items())

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> float:
        return self._values[name].value

    def scalars(self) -> dict[str, float]:
        """Return the final numbers, in order of name; a mean over nothing is left out."""
        return {
            name: metric.value
            for name, metric in sorted(self._values.items())
            if not (isinstance(metric, Mean) and metric.count == 0)
        }

    @staticmethod
    def merge(parts: Iterable[Metrics]) -> Metrics:
        """Reduce shards: sums add, means add both parts, maxima take the larger."""
        merged = Metrics()
        for part in parts:
            for name, metric in part:
                merged.add(name, metric)
        return merged
