"""How the replicas of a stage share micro-batches: whole rows, in the ratio of their weights."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.errors import HetpipeError


def divide(samples: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Rows of a micro-batch for each replica, in their order, by the largest remainders.

    Raises `HetpipeError` where one would get none.
    """
    total = sum(weights)
    exact = [samples * weight / total for weight in weights]
    rows = [int(share) for share in exact]
    by_rest = sorted(range(len(rows)), key=lambda r: (rows[r] - exact[r], r))
    for replica in by_rest[: samples - sum(rows)]:
        rows[replica] += 1
    if min(rows) == 0:
        raise HetpipeError(
            f"{len(weights)} replicas with shares {', '.join(f'{w:g}' for w in weights)} cannot "
            f"split a micro-batch of {samples} samples: one would get none; use fewer "
            "micro-batches or fewer replicas"
        )
    return tuple(rows)
