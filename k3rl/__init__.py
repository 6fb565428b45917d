"""k3rl: agentic RL post-training for Kimi-K3-style models, on Ray."""

__version__ = "0.1.0"
