"""Agent environments: gymnasium's API over messages and tools."""
