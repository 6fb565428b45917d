"""Arithmetic problems from reasoning-gym, with a calculator."""

from gymnasium.envs.registration import register, registry

from k3rl.envs.tasks.arithmetic.environment import ArithmeticEnvironment
from k3rl.envs.tasks.arithmetic.expert import ArithmeticPlayer

if "k3rl/Arithmetic-v0" not in registry:
    register(
        id="k3rl/Arithmetic-v0",
        entry_point="k3rl.envs.tasks.arithmetic.environment:ArithmeticEnvironment",
        disable_env_checker=True,
        order_enforce=False,
    )

__all__ = ["ArithmeticEnvironment", "ArithmeticPlayer"]
