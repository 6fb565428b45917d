"""A shop: four items in a SQLite file, five tools, four kinds of task.

===== ================================== ===================================================
kind  question                           solved by
===== ================================== ===================================================
P     ``price of kalor``                 find, price, answer
T     ``total for 3 kalor``              find, price, calc, answer
O     ``order 3 kalor``                  find, stock, then order and ``done``, or ``short``
R     ``order 3 kalor and report total`` find, stock, order, price, calc, answer, or ``short``
===== ================================== ===================================================

The outcome is 1 when the answer *and* the order table are right: the shop lets one order what is not in stock, so
only a look at the stock tells. Names of a split's items hash to that split: no name is in two splits.
"""

from __future__ import annotations

import re
import sqlite3
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3rl.envs.base import Message, Observation, split_of
from k3rl.envs.calculator import CalculatorError, calculate
from k3rl.envs.tasks.shop.expert import SLIPS, ShopPlayer
from k3rl.envs.tools import ToolEnvironment, ToolError, tool

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import numpy as np

    from k3rl.trajectory import Task

KINDS = ("P", "T", "O", "R")
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_QUESTIONS = {
    "P": "price of {name}",
    "T": "total for {n} {name}",
    "O": "order {n} {name}",
    "R": "order {n} {name} and report total",
}
_ORDER = re.compile(r"([0-9]{1,6})\*([0-9]{1,6})", re.ASCII)
_SCHEMA = """PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;
CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, price INTEGER, stock INTEGER);
CREATE TABLE orders (item INTEGER, quantity INTEGER);"""


def _vocabulary_words() -> tuple[str, ...]:
    """Words of questions, tools, results and answers."""
    return ("find", "price", "stock", "calc", "order", "of", "total", "for", "and", "report", "done", "short", "none")


@dataclass(frozen=True, slots=True)
class _Goal:
    kind: str
    item: int
    answer: str
    orders: tuple[tuple[int, int], ...]
    milestones: tuple[str, ...]


class ShopEnvironment(ToolEnvironment):
    """The shop. One database file per instance, removed by ``close`` (or with the instance)."""

    name = "shop"
    template_words = _vocabulary_words()

    def __init__(self, *, slips: Mapping[str, float] | None = None, kinds: str = "PTOR", **options: Any) -> None:
        super().__init__(**options)
        if not kinds or set(kinds) - set(KINDS):
            raise ValueError(f"kinds is {kinds!r}; it is made of the letters {''.join(KINDS)}")
        self._slips = {**SLIPS, **(slips or {})}
        ShopPlayer(slips=self._slips)  # refuses unknown slips now, not in the first demonstration
        self._kinds = kinds
        self._db: sqlite3.Connection | None = None
        self._goal = _Goal("P", 0, "", (), ())
        self._seen: list[str] = []

    def start(self, task: Task, rng: np.random.Generator) -> Observation:
        """Fill the shop and ask."""
        names: list[str] = []
        while len(names) < 4:
            name = _draw_name(rng)
            if split_of(name) == task.split and name not in names:
                names.append(name)
        ids = [int(i) + 100 for i in rng.choice(900, size=4, replace=False)]
        prices = [int(p) for p in rng.integers(2, 100, size=4)]
        stocks = [int(s) for s in rng.integers(0, 10, size=4)]
        db = self._open()
        db.execute("DELETE FROM items")
        db.execute("DELETE FROM orders")
        db.executemany("INSERT INTO items VALUES (?, ?, ?, ?)", list(zip(ids, names, prices, stocks, strict=True)))
        which, n = int(rng.integers(4)), int(rng.integers(2, 10))
        kind = self._kinds[int(rng.integers(len(self._kinds)))]
        self._goal = _make_goal(kind, ids[which], n, prices[which], stocks[which])
        self._seen = []
        return (Message(role="user", content=_QUESTIONS[kind].format(name=names[which], n=n)),)

    def grade(self, answer: str) -> float:
        """1 when both the answer and the order table are right."""
        orders = tuple(self._open().execute("SELECT item, quantity FROM orders").fetchall())
        return float(answer.strip() == self._goal.answer and orders == self._goal.orders)

    def milestone_names(self) -> Collection[str]:
        """``found``, then ``priced``, ``stock_checked``, ``ordered`` as far as the task needs them."""
        return self._goal.milestones

    def milestones(self) -> Collection[str]:
        """Milestones reached so far."""
        return [m for m in self._goal.milestones if m in self._seen]

    def expert(self) -> ShopPlayer:
        """Solve every task."""
        return ShopPlayer()

    def demonstrator(self, rng: np.random.Generator, slips: Mapping[str, float] | None = None) -> ShopPlayer:
        """Succeed about half of the time with the default slips."""
        return ShopPlayer(rng, self._slips if slips is None else slips)

    @tool
    def find(self, name: str) -> str:
        """Give the id of the item called name, or none."""
        item = self._column("SELECT id FROM items WHERE name = ?", name)
        self._reach("found", item)
        return item

    @tool
    def price(self, item: str) -> str:
        """Give the unit price of the item with this id, or none."""
        self._reach("priced", item)
        return self._column("SELECT price FROM items WHERE id = ?", item)

    @tool
    def stock(self, item: str) -> str:
        """Give how many of the item with this id are there, or none."""
        if self._open().execute("SELECT 1 FROM orders").fetchone() is None:
            self._reach("stock_checked", item)
        return self._column("SELECT stock FROM items WHERE id = ?", item)

    @tool
    def calc(self, expression: str) -> str:
        """Evaluate an arithmetic expression such as 3*45."""
        try:
            return calculate(expression)
        except CalculatorError:
            raise ToolError("none") from None

    @tool
    def order(self, line: str) -> str:
        """Order a quantity of an item, written id*quantity such as 312*3."""
        match = _ORDER.fullmatch(line)
        if match is None or self._column("SELECT id FROM items WHERE id = ?", match[1]) == "none":
            raise ToolError("none")
        db = self._open()
        db.execute("INSERT INTO orders VALUES (?, ?)", (int(match[1]), int(match[2])))
        if tuple(db.execute("SELECT item, quantity FROM orders").fetchall()) == self._goal.orders:
            self._reach("ordered", str(self._goal.item))
        return "done"

    def close(self) -> None:
        """Close the database, which ends its file; may be called again."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _reach(self, milestone: str, item: str) -> None:
        if item == str(self._goal.item) and milestone not in self._seen:
            self._seen.append(milestone)

    def _column(self, query: str, key: str) -> str:
        row = self._open().execute(query, (key,)).fetchone()
        return "none" if row is None else str(row[0])

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            # The name goes once the file is open: a worker that is killed leaves nothing on the disk.
            with tempfile.NamedTemporaryFile(prefix="k3rl-shop-", suffix=".db") as file:
                # One episode's steps may run in different threads, one at a time.
                self._db = sqlite3.connect(file.name, isolation_level=None, check_same_thread=False)
                self._db.executescript(_SCHEMA)
        return self._db


def _draw_name(rng: np.random.Generator) -> str:
    letters = (_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS, _CONSONANTS)
    draws = rng.integers(0, [len(part) for part in letters])
    return "".join(part[int(i)] for part, i in zip(letters, draws, strict=True))


def _make_goal(kind: str, item: int, n: int, price: int, stock: int) -> _Goal:
    if kind in ("P", "T"):
        return _Goal(kind, item, str(price if kind == "P" else n * price), (), ("found", "priced"))
    if stock < n:
        return _Goal(kind, item, "short", (), ("found", "stock_checked"))
    names = ("found", "stock_checked", "ordered")
    if kind == "O":
        return _Goal(kind, item, "done", ((item, n),), names)
    return _Goal(kind, item, str(n * price), ((item, n),), (*names, "priced"))
