"""The environments that come with k3rl, one folder each; importing this registers them with gymnasium."""

from k3rl.envs.tasks import arithmetic, shop

__all__ = ["arithmetic", "shop"]
