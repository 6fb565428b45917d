"""The controller of a run: schedule, checkpoints, events."""
