"""Sums over the devices of two processes: each process knows the terms of both."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetpipe.check.difference import Array, sum_tolerance
from hetpipe.conformance.check import NotAsked
from hetpipe.conformance.copies import random_array
from hetpipe.conformance.rig import Rig, compare, expect_form, finish
from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Buffer, Event, Group
from hetpipe.sdk.host.validation import check_summed, join_group


def join(rig: Rig, folder: Path, rank: int, alone: bool) -> Group | None:
    """Join a group of two devices; with `alone`, both are the backend's only device.

    Raises `NotAsked` if an only device refuses, because devices of a group have separate memories.
    """
    try:
        return join_group(rig.device, folder, rank, 2)
    except BackendError as error:
        if alone:
            raise NotAsked(f"the backend's only device joins no group: {error}") from error
        raise


@dataclass(frozen=True)
class Sum:
    """A call of `Group.sum` by two devices; both processes make all terms from `seed`."""

    forms: tuple[tuple[str, tuple[int, ...]], ...]
    """The dtype and the shape of each tensor."""
    scales: tuple[float, float] = (1.0, 1.0)
    """The factor of each device's terms."""
    seed: int = 0

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Sum:
        forms = tuple((dtype, tuple(shape)) for dtype, shape in data["forms"])
        return cls(forms, tuple(data["scales"]), data["seed"])

    def terms(self, rank: int) -> list[Array]:
        """Return the terms of a device."""
        return [
            random_array(dtype, shape, 1000 * self.seed + 2 * n + rank)
            for n, (dtype, shape) in enumerate(self.forms)
        ]

    def start(self, rig: Rig, group: Group, rank: int) -> tuple[Sequence[Buffer], Event]:
        buffers = [rig.put(term) for term in self.terms(rank)]
        return check_summed(rig.device, group.sum(buffers, self.scales[rank]), len(buffers))

    def check(self, rig: Rig, results: Sequence[Buffer], event: Event) -> list[Array]:
        """Return the sums. Raises `BrokenRule` if one is wrong."""
        finish(event, "a sum over two devices")
        sums = [rig.get(buffer) for buffer in results]  # at once, so that an early event shows
        terms = zip(self.terms(0), self.terms(1), strict=True)
        for n, ((dtype, shape), pair) in enumerate(zip(self.forms, terms, strict=True)):
            where = f"sum {n + 1} of {len(sums)}, {dtype}{list(shape)}"
            expect_form(results[n], dtype, shape, where)
            scaled = [
                scale * term.astype(np.float64)
                for scale, term in zip(self.scales, pair, strict=True)
            ]
            compare(sums[n], np.add(*scaled), sum_tolerance(scaled, sums[n].dtype), where)
        return sums


def sum_all(rig: Rig, group: Group, rank: int, sums: Sequence[Sum]) -> list[str]:
    """Start all sums in this order, then check them; return a digest of each result's bits."""
    started = [each.start(rig, group, rank) for each in sums]
    arrays = [
        array
        for each, (results, event) in zip(sums, started, strict=True)
        for array in each.check(rig, results, event)
    ]
    return [hashlib.sha256(array.tobytes()).hexdigest() for array in arrays]
