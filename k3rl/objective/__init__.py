"""The training objective, composed of small functions."""
