"""Sampling engines and the agent loop that turns episodes into trajectories."""
