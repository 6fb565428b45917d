"""Which trajectories exist, where they lie, and what became of each."""
