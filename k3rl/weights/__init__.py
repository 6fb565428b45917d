"""Versioned weights and the ways they travel."""
