"""The k3rl command."""
