"""Muon for matrices, Adam for everything else, in one optimiser (https://arxiv.org/abs/2502.16982).

Letters: B independent matrices, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, overload

import torch

QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices_BRC: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Push every singular value towards 1 by Newton-Schulz steps (https://kellerjordan.github.io/posts/muon).

    The result lies between 0.68 and 1.14 times an orthogonal factor for singular values above about 1e-2 of the norm.
    """
    a, b, c = QUINTIC
    x = matrices_BRC.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-20)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Groups with ``algorithm`` "muon" hold matrices [R, C] or stacks [E, R, C]; groups with "adam" hold the rest.

    A muon group's ``blocks`` lists, for each parameter, into how many equal blocks of rows (heads) it is cut; each is
    orthogonalised alone. Update: ``0.2 sqrt(max(R, C))`` times the orthogonal factor, so that both share one rate.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step with the gradients that are there; a closure is not supported."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            for i, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                if group["algorithm"] == "muon":
                    self._step_matrix(parameter, group, group["blocks"][i])
                else:
                    self._step_adam(parameter, group)
        return None

    def _step_matrix(self, parameter: torch.Tensor, group: dict[str, Any], blocks: int) -> None:
        state = self.state[parameter]
        gradient = parameter.grad.float()  # type: ignore[union-attr]
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        buffer = state["momentum"].mul_(group["momentum"]).add_(gradient)
        nesterov = gradient.add(buffer, alpha=group["momentum"])
        split = nesterov.unflatten(-2, (blocks, -1)) if blocks > 1 else nesterov
        rows, columns = split.shape[-2:]
        update = orthogonalise(split).reshape(parameter.shape)
        parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * 0.2 * math.sqrt(max(rows, columns)))

    def _step_adam(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        gradient = parameter.grad.float()  # type: ignore[union-attr]
        if not state:
            state["exp_avg"] = torch.zeros_like(gradient)
            state["exp_avg_sq"] = torch.zeros_like(gradient)
            state["step"] = torch.tensor(0, dtype=torch.int64)
        state["step"] += 1
        count = int(state["step"])
        beta1, beta2 = group["betas"]
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (square / (1 - beta2**count)).sqrt_().add_(group["eps"])
        update = (mean / (1 - beta1**count)).div_(denominator)
        parameter.add_(update.to(parameter.dtype), alpha=-group["lr"])
