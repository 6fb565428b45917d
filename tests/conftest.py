"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import settings

# Two shared cores stall now and then: a slow example is no fault. What takes too long is caught by the suite's timeout.
settings.register_profile("k3rl", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("k3rl")
