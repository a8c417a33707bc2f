"""Lets groups of devices sum a worker's gradients (station 12 of docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np

from hetpipe.check.difference import difference, sum_tolerance
from hetpipe.errors import BackendError
from hetpipe.schedule.action import Action
from hetpipe.sdk.backend import Group
from hetpipe.wire.wire import Array, Layout
from hetpipe.worker.stage import Stage


class GroupSums:
    """The groups of devices that sum a worker's gradients, by stage.

    The first sum of each group is also made on the host, and compared.
    """

    def __init__(self, groups: Mapping[int, Group]) -> None:
        self._groups = groups
        self._first: dict[int, Action | None] = {}  # by stage; None once that sum is compared

    def group(self, stage: int) -> Group | None:
        """Return the group of a stage's replicas, if they are one."""
        return self._groups.get(stage)

    def is_on_host(self, action: Action) -> bool:
        """Return whether the host makes this sum. The first question about a stage is about its
        first sum."""
        n = action.stage
        return n not in self._groups or self._first.setdefault(n, action) == action

    def sum(
        self, action: Action, stage: Stage, layout: Layout, scale: float,
        addends: Sequence[Sequence[Array]],
    ) -> None:  # fmt: skip
        """Sum the gradients, after multiplying this replica's by `scale`.

        `addends` has the replicas' terms of each gradient if the host makes the sum as well. Raises
        `BackendError` if rounding does not explain the difference between both sums.
        """
        keys = [slot.key for slot in layout]
        stage.store.sum_gradients(self._groups[action.stage], keys, scale)
        for slot, terms in zip(layout, addends, strict=False):
            found = difference(stage.get(slot.key), *_sum(terms))
            if found.is_wrong:
                info = stage.device.info
                raise BackendError(
                    f"{info.id}: the sum of gradient {slot.name!r} over {len(terms)} devices is "
                    f"wrong: {found.text}; turn off sums over devices of backend {info.backend!r}, "
                    "and report this to their vendor"
                )
        self._first[action.stage] = None


def _sum(terms: Sequence[Array]) -> tuple[Array, Array]:
    """Return the sum of the terms, and the error that another order of additions may have.

    Both sums have an error; where magnitudes overflow, nothing is compared.
    """
    with np.errstate(all="ignore"):
        total = np.asarray(reduce(np.add, terms))
    return total, sum_tolerance(terms, total.dtype)
