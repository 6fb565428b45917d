"""Metrics on disk and on screen."""
