"""Find items, read prices and stock, place orders: a small database behind five tools."""

from gymnasium.envs.registration import register, registry

from k3rl.envs.tasks.shop.environment import ShopEnvironment
from k3rl.envs.tasks.shop.expert import ShopPlayer

if "k3rl/Shop-v0" not in registry:
    register(
        id="k3rl/Shop-v0",
        entry_point="k3rl.envs.tasks.shop.environment:ShopEnvironment",
        disable_env_checker=True,
        order_enforce=False,
    )

__all__ = ["ShopEnvironment", "ShopPlayer"]
