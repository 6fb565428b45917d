"""From trajectories to policy updates."""
