"""Devices that are sound except for their groups."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sound import DONE, Array, SoundDevice, SoundGroup

from hetpipe.sdk import BackendError, Buffer, Event, Group


class FirstTensorOnly(SoundDevice):
    """Only the first tensor of a call is summed."""

    def group(self, folder: Path, rank: int, size: int) -> SoundGroup:
        return _FirstTensorOnly(self, folder, rank, size)


class _FirstTensorOnly(SoundGroup):
    def work(self, call: int, arrays: Sequence[Array], scale: float) -> None:
        super().work(call, arrays[:1], scale)


class ScaleForgotten(SoundDevice):
    """The terms are summed without their factor."""

    def group(self, folder: Path, rank: int, size: int) -> SoundGroup:
        return _ScaleForgotten(self, folder, rank, size)


class _ScaleForgotten(SoundGroup):
    def work(self, call: int, arrays: Sequence[Array], scale: float) -> None:
        super().work(call, arrays, 1.0)


class ScaledSum(SoundDevice):
    """The factor multiplies the sum instead of the terms."""

    def group(self, folder: Path, rank: int, size: int) -> SoundGroup:
        return _ScaledSum(self, folder, rank, size)


class _ScaledSum(SoundGroup):
    def work(self, call: int, arrays: Sequence[Array], scale: float) -> None:
        super().work(call, arrays, 1.0)
        for array in arrays:
            array *= array.dtype.type(scale)


class UnroundedProduct(SoundDevice):
    """A device adds its product to the other term before it rounds, as a fused multiply-add does.

    The other device gets the rounded product.
    """

    def group(self, folder: Path, rank: int, size: int) -> SoundGroup:
        return _UnroundedProduct(self, folder, rank, size)


class _UnroundedProduct(SoundGroup):
    def work(self, call: int, arrays: Sequence[Array], scale: float) -> None:
        products = [scale * array.astype(np.float64) for array in arrays]
        self.give(
            call,
            [product.astype(array.dtype) for product, array in zip(products, arrays, strict=True)],
        )
        for array, product, addends in zip(arrays, products, self.taken(call), strict=True):
            array[...] = product + addends[1 - self.rank]


class EarlySums(SoundDevice):
    """The event of a sum has happened before the sum begins."""

    def group(self, folder: Path, rank: int, size: int) -> SoundGroup:
        return _EarlySums(self, folder, rank, size)


class _EarlySums(SoundGroup):
    def sum(self, terms: Sequence[Buffer], scale: float) -> tuple[list[Buffer], Event]:
        self.device.sums.submit(lambda: time.sleep(0.05))
        results, _ = super().sum(terms, scale)
        return results, DONE


class ReusedSums(SoundDevice):
    """The results of a sum are in memory of the group, which the next sum uses."""

    def group(self, folder: Path, rank: int, size: int) -> SoundGroup:
        return _ReusedSums(self, folder, rank, size)


class _ReusedSums(SoundGroup):
    memory: Sequence[Array] = ()

    def sum(self, terms: Sequence[Buffer], scale: float) -> tuple[list[Buffer], Event]:
        arrays = [self.device.own(term).array for term in terms]
        self.memory = memory = self.memory or [np.empty_like(array) for array in arrays]
        super().sum(terms, scale)

        def keep() -> None:
            for kept, array in zip(memory, arrays, strict=True):
                kept[...] = array

        return [self.device.buffer(kept) for kept in memory], self.device.sums.submit(keep)


class OneFails(SoundDevice):
    """The second device of a group fails, so that the first waits in vain."""

    def group(self, folder: Path, rank: int, size: int) -> SoundGroup:
        return _OneFails(self, folder, rank, size)


class _OneFails(SoundGroup):
    def give(self, call: int, arrays: Sequence[Array]) -> None:
        if self.rank == 1:
            raise BackendError("no memory")
        super().give(call, arrays)


class Unsummable(SoundDevice):
    """A device that refuses groups, as NCCL refuses two ranks on a card; no fault."""

    def join_group(self, folder: Path, rank: int, size: int) -> Group | None:
        raise BackendError("two ranks on one card")
