"""Checks of copies to the device and back, for every dtype, shape and size."""

from __future__ import annotations

import time

import numpy as np

from hetpipe.check.difference import Array
from hetpipe.conformance.check import BrokenRule, check, expect
from hetpipe.conformance.rig import WAIT_S, Rig, compare, expect_form, host_dtype

SHAPES = ((), (1,), (0,), (3, 0, 2), (5, 7), (1023,), (2, 3, 4, 5), (65_537,))
LARGE = ((1 << 21) + 5, (1 << 22) + 3, (10 << 20) + 1)
"""Numbers of float32 elements: copies of 8, 16 and 40 MiB."""
MANY = 40  # buffers alive at the same time


def random_array(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Return random values; integers have the whole range of the dtype, so every byte varies."""
    generator = np.random.default_rng(seed)
    kind = host_dtype(dtype)
    if kind == np.bool_:
        return np.asarray(generator.integers(0, 2, shape), np.bool_)
    if kind.kind == "f":
        return np.asarray(generator.standard_normal(shape), kind)
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    return np.asarray(generator.integers(low, high, shape, kind, endpoint=True), kind)


def same(actual: Array, expected: Array, where: str) -> None:
    """Raise `BrokenRule` unless both arrays are equal bit for bit."""
    if actual.tobytes() != expected.tobytes():
        compare(actual, expected, 0.0, where)
        raise BrokenRule(f"{where}: the download's bits differ from the upload's")


@check(
    "buffers/round trips",
    "a download returns exactly the uploaded bits, for every declared dtype and any shape",
    "a copy of the wrong size, or a dtype that the device stores as another one",
)
def _(rig: Rig) -> None:
    for dtype in rig.info.dtypes:
        if dtype == "bfloat16":  # bfloat16 arrays are never uploaded
            continue
        for shape in SHAPES:
            sent = random_array(dtype, shape)
            buffer = rig.put(sent)
            form = f"{dtype}{list(shape)}"
            expect_form(buffer, dtype, shape, form)
            expect(buffer.device is rig.device, f"the buffer of {form} names another device")
            same(rig.get(buffer), sent, form)


@check(
    "buffers/any array",
    "an upload takes any host array: with strides, an odd offset, read-only",
    "wrong stride handling: the device copies memory instead of elements",
)
def _(rig: Rig) -> None:
    base = np.arange(60, dtype=np.float32).reshape(6, 10)
    frozen = base.copy()
    frozen.flags.writeable = False
    row = base[0]
    odd = np.frombuffer(bytes(4 * 7 + 1), np.uint8)[1:].view(np.float32)
    for name, array in {
        "transposed": base.T, "sliced": base[1::2, ::3], "reversed": base[::-1],
        "read-only": frozen, "at an odd address": odd, "repeated": np.broadcast_to(row, (3, 10)),
    }.items():  # fmt: skip
        same(rig.get(rig.put(array)), np.array(array, order="C"), name)


@check(
    "buffers/source reused",
    "the source of an upload may be overwritten once its event has happened",
    "an event that happens before the copy, or a buffer that shares memory with the source",
)
def _(rig: Rig) -> None:
    for size in (5, 1 << 20):
        source = random_array("float32", (size,))
        kept = source.copy()
        buffer, event = rig.device.upload(source)
        event.wait(WAIT_S)
        source[...] = -1
        same(rig.get(buffer), kept, f"a buffer of {size} elements")


@check(
    "buffers/large copies",
    "a copy of any size copies all bytes, and its event happens after the copy",
    "a fast path for large copies that keeps the source, or whose event happens early",
)
def _(rig: Rig) -> None:
    for elements in LARGE:
        if elements * 4 > rig.info.memory_nbytes // 4:
            continue
        sent = np.arange(elements, dtype=np.float32)
        source = sent.copy()
        buffer, event = rig.device.upload(source)
        while not event.done():  # polls, because wait() could hide a wrong answer of done()
            time.sleep(0)
        source[...] = -1
        where = f"a copy of {elements * 4 / 2**20:.1f} MiB"
        array = np.full(elements, -2, np.float32)
        event = rig.device.download(buffer, array)
        while not event.done():
            time.sleep(0)
        taken = array.copy()
        expect(
            not (taken == -1).any(),
            f"{where} reads its source after its event, when the caller has already "
            "changed the source",
        )
        same(taken, sent, f"{where}, as soon as done() is true")


@check(
    "buffers/no aliases",
    "every buffer has separate memory",
    "memory that the device gives to two buffers",
)
def _(rig: Rig) -> None:
    arrays = [random_array("float32", (256,), seed) for seed in range(MANY)]
    buffers = [rig.put(array) for array in arrays]
    for index in range(0, MANY, 2):
        buffers[index] = rig.put(arrays[index][::-1])
    for index, (buffer, array) in enumerate(zip(buffers, arrays, strict=True)):
        same(rig.get(buffer), array[::-1] if index % 2 == 0 else array, f"buffer {index}")
