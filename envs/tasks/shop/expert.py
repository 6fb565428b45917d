"""Who plays the shop: an expert, and the same with slips."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3rl.envs.base import AssistantAction, Message, ToolCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

SLIPS: dict[str, float] = {"guess": 0.45, "nocalc": 0.65, "nostock": 0.4, "noreport": 0.5}
"""Probability of each slip of the demonstrator: answer a random number after find; answer the unit price for the total;
order without looking at the stock; answer ``done`` where the total was asked."""
PARAMETERS = {"find": "name", "price": "item", "stock": "item", "calc": "expression", "order": "line"}


class ShopPlayer:
    """Plays one episode from messages alone. Without ``slips`` it solves every task."""

    def __init__(self, rng: np.random.Generator | None = None, slips: Mapping[str, float] | None = None) -> None:
        unknown = set(slips or {}) - set(SLIPS)
        if unknown:
            raise ValueError(f"no slips {sorted(unknown)}; there are {', '.join(SLIPS)}")
        # All drawn at the start, so that a policy asked twice about the same history says the same.
        draws = {} if rng is None else {name: float(rng.random()) for name in SLIPS}
        self._slips = {name: draws.get(name, 1.0) < (slips or {}).get(name, 0.0) for name in SLIPS}
        self._guess = 0 if rng is None else int(rng.integers(2, 100))

    def act(self, history: Sequence[Message]) -> AssistantAction:
        """Choose the next call or the answer."""
        words = next(m.content for m in history if m.role == "user").split()
        results = {m.tool: m.content for m in history if m.role == "tool"}
        ordering, reporting = words[0] == "order", "report" in words
        name = words[2] if ordering else words[-1]
        quantity = words[1] if ordering else words[2]
        if "find" not in results:
            return _call("find", name)
        item = results["find"]
        if ordering and "order" not in results:
            return self._place_order(item, quantity, results)
        if ordering and (not reporting or self._slips["noreport"]):
            return AssistantAction(answer="done")
        if not ordering and self._slips["guess"]:
            return AssistantAction(answer=str(self._guess))
        if "price" not in results:
            return _call("price", item)
        if words[0] == "price" or self._slips["nocalc"]:
            return AssistantAction(answer=results["price"])
        if "calc" not in results:
            return _call("calc", f"{quantity}*{results['price']}")
        return AssistantAction(answer=results["calc"])

    def _place_order(self, item: str, quantity: str, results: Mapping[str | None, str]) -> AssistantAction:
        if "stock" in results:
            if int(results["stock"]) < int(quantity):
                return AssistantAction(answer="short")
        elif not self._slips["nostock"]:
            return _call("stock", item)
        return _call("order", f"{item}*{quantity}")


def _call(tool: str, value: str) -> AssistantAction:
    return AssistantAction(calls=(ToolCall(name=tool, arguments={PARAMETERS[tool]: value}),))
