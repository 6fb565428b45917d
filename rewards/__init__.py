"""Reward functions: from a task and a trajectory to per-segment values, or an absence with its cause."""
