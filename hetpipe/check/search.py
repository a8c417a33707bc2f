"""Search for the operators at which a device fails or computes wrong values.

The function `probe` runs units of a graph and returns their fault, or None. A unit is an operator's
call with the `getitem` nodes of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from hetpipe.sdk.graph import operator_name
from hetpipe.sdk.host.parts import Unit

Fault = TypeVar("Fault")
Item = TypeVar("Item")

OTHERS = 4
"""The device counts as lost if this many other operators, or all if there are fewer, also fail."""


def first_fault(items: Iterable[Item], probe: Callable[[Item], Fault | None]) -> Fault | None:
    """Probe each item alone; return the first fault, or None."""
    return next((fault for item in items if (fault := probe(item)) is not None), None)


def shortest_fault(
    units: Sequence[Unit], probe: Callable[[Sequence[Unit]], Fault | None]
) -> Fault | None:
    """Return the fault of the shortest faulty sequence of units, or None if all pass together."""
    if (fault := probe(units)) is None:
        return None
    end, fault = _bisect(len(units), lambda count: probe(units[:count]), fault)
    return _bisect(end, lambda count: probe(units[end - count : end]), fault)[1]


def _bisect(count: int, probe: Callable[[int], Fault | None], fault: Fault) -> tuple[int, Fault]:
    """Return the smallest count that fails, and its fault; `count` itself fails with `fault`."""
    right, wrong = 0, count
    while wrong - right > 1:
        middle = (right + wrong) // 2
        if (found := probe(middle)) is None:
            right = middle
        else:
            wrong, fault = middle, found
    return wrong, fault


def others_fail(
    units: Sequence[Unit], failed: Collection[str], fails: Callable[[Unit], bool]
) -> bool:
    """Return whether operators that are not in `failed` fail as well, as on a lost device."""
    kinds = {operator_name(unit[0]): unit for unit in units}
    others = [unit for name, unit in kinds.items() if name not in failed]
    return bool(others) and all(map(fails, others[:OTHERS]))
