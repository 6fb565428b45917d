"""The Kimi-K3-style policy: layers, caches, tokenizers, chat formats and checkpoints."""
