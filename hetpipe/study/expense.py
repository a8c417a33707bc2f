"""The power and the price of a cluster whose members are boards."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.board import board


@dataclass(frozen=True)
class Expense:
    """The sums over all members of a cluster, used or not; None if one does not state its own."""

    power_w: float | None = None
    price: float | None = None
    currency: str = ""  # of the price; prices in two currencies have no sum


UNSTATED = Expense()


def expense_of(cluster: Cluster) -> Expense:
    """Return the power and the price of a cluster. Raises `CostError` for an unknown board."""
    boards = [board(member.board) for member in cluster.members if member.board]
    powers = [each.power_w for each in boards if each.power_w is not None]
    prices = [each.price for each in boards if each.price is not None]
    currencies = {price.currency for price in prices}
    count = len(cluster.members)
    power_w = sum(powers) if len(powers) == count else None
    if len(prices) < count or len(currencies) > 1:
        return Expense(power_w)
    return Expense(power_w, sum(price.amount for price in prices), currencies.pop())
