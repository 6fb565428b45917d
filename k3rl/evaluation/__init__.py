"""Held-out evaluation of policies."""
