"""Buffers: copies there and back, and who may use whose memory when."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import torch

from hetpipe.conformance.check import BrokenRule, check, expect
from hetpipe.conformance.operators import normal
from hetpipe.conformance.rig import WAIT_S, Array, Rig, compare, host_dtype

SHAPES = ((), (1,), (0,), (3, 0, 2), (5, 7), (1023,), (2, 3, 4, 5), (65_537,))
MANY = 40  # results that are kept at once


def random_array(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Random bits of a dtype: every byte of a copy matters."""
    generator = np.random.default_rng(seed)
    kind = host_dtype(dtype)
    if kind == np.bool_:
        return np.asarray(generator.integers(0, 2, shape), np.bool_)
    if kind.kind == "f":
        return np.asarray(generator.standard_normal(shape), kind)
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    return np.asarray(generator.integers(low, high, shape, kind, endpoint=True), kind)


def same(actual: Array, expected: Array, where: str) -> None:
    """Raise `BrokenRule` unless both are equal bit for bit."""
    if actual.tobytes() != expected.tobytes():
        compare(actual, expected, 0.0, where)
        raise BrokenRule(f"{where} came back with other bits")


@check(
    "buffers/round trips",
    "what is uploaded comes back bit for bit, in every declared dtype and any shape",
    "a copy of the wrong size, or a dtype that is not stored as declared",
)
def _(rig: Rig) -> None:
    for dtype in rig.info.dtypes:
        if dtype == "bfloat16":  # is never uploaded
            continue
        for shape in SHAPES:
            sent = random_array(dtype, shape)
            buffer = rig.put(sent)
            form = f"{dtype}{list(shape)}"
            expect(buffer.shape == shape, f"the buffer of {form} has the shape {buffer.shape}")
            expect(buffer.dtype == dtype, f"the buffer of {form} has the dtype {buffer.dtype}")
            expect(buffer.device is rig.device, f"the buffer of {form} names another device")
            same(rig.get(buffer), sent, form)


@check(
    "buffers/any array",
    "an upload takes any host array: with strides, an odd offset, read-only",
    "wrong stride handling: memory is copied where elements are meant",
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
    "an event of an upload that comes before the copy, or a buffer that lies in the source",
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
    "buffers/no aliases",
    "every buffer has memory of its own",
    "memory that is handed out twice",
)
def _(rig: Rig) -> None:
    arrays = [random_array("float32", (256,), seed) for seed in range(MANY)]
    buffers = [rig.put(array) for array in arrays]
    for index in range(0, MANY, 2):
        buffers[index] = rig.put(arrays[index][::-1])
    for index, (buffer, array) in enumerate(zip(buffers, arrays, strict=True)):
        same(rig.get(buffer), array[::-1] if index % 2 == 0 else array, f"buffer {index}")


@check(
    "memory/results last",
    "a result keeps its values until it is dropped or donated, however many runs follow",
    "a stale buffer: results lie in memory that the next run reuses",
)
def _(rig: Rig) -> None:
    x = normal(64)
    executable = rig.compile(lambda x: (x + 1.0, x * 2.0), x)
    inputs = [normal(64, seed=seed) for seed in range(MANY)]
    results = [rig.run(executable, [rig.put(each)]) for each in inputs]
    for run, (each, (one, two)) in enumerate(zip(inputs, results, strict=True)):
        same(rig.get(one), (each + 1.0).numpy(), f"result 0 of run {run}, after {MANY} runs")
        same(rig.get(two), (each * 2.0).numpy(), f"result 1 of run {run}, after {MANY} runs")


@check(
    "memory/inputs last",
    "an input that is not donated keeps its values",
    "an input that is overwritten in place",
)
def _(rig: Rig) -> None:
    a, b = normal(6, 5), normal(6, 5, seed=1)
    executable = rig.compile(lambda a, b: ((a + b) * b - a, a * b), a, b)
    for donate in ((), (0,), (1,)):
        buffers = [rig.put(a), rig.put(b)]
        rig.run(executable, buffers, donate)
        for index, (buffer, tensor) in enumerate(zip(buffers, (a, b), strict=True)):
            if index not in donate:
                same(rig.get(buffer), tensor.numpy(), f"input {index}, {list(donate)} donated")


@check(
    "memory/results of their own",
    "no result shares memory with an input that was not donated, nor with another result",
    "a result that aliases an input: a view is returned where a copy belongs",
)
def _(rig: Rig) -> None:
    a = normal(4, 6)

    def views(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a.view(24), a.t(), a.view(4, 6) + 0.0, a.view(2, 12), (a * 1.0).view(24)

    executable = rig.compile(views, a)
    overwriting = rig.compile(lambda a: a * 0.0 - 5.0, a)
    flat = rig.compile(lambda a: a * 0.0 - 5.0, normal(24))
    source = rig.put(a)
    results = rig.run(executable, [source])
    expected = [each.contiguous().numpy() for each in views(a)]
    rig.run(overwriting, [source], [0])  # may write into the memory of the input
    for index, (result, array) in enumerate(zip(results, expected, strict=True)):
        same(rig.get(result), array, f"result {index}, after its input was donated elsewhere")
    rig.run(flat, [results[0]], [0])
    for index in range(1, len(results)):
        same(rig.get(results[index]), expected[index], f"result {index}, after 0 was donated")


@check(
    "memory/the same buffer",
    "a result that is a placeholder is that very Buffer, and a repeated result one Buffer",
    "outputs that are copied, or made anew, without a look at the graph",
)
def _(rig: Rig) -> None:
    a, b = normal(3), normal(3, seed=1)
    executable = rig.compile(lambda a, b: (b, a + b, a, b), a, b)
    buffers = [rig.put(a), rig.put(b)]
    for donate in ((), (0,)):
        results = rig.run(executable, buffers, donate)
        for place, index in ((0, 1), (2, 0), (3, 1)):
            expect(
                results[place] is buffers[index],
                f"result {place} is input {index} of the graph, and came as another Buffer",
            )


@check(
    "memory/donation",
    "a donated input may be overwritten, and only after its last use in the graph",
    "a donated input that is read later: its memory is given to a result too early",
)
def _(rig: Rig) -> None:
    a, b = normal(8, 8), normal(8, 8, seed=1)
    cases: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
        "read after the first result": lambda a, b: (a * 2.0 + b, a - b),
        "read transposed": lambda a, b: (a.t() + b, a.sum(0)),
        "read by a product": lambda a, b: (a + b, torch.mm(a, b)),
        "a chain": lambda a, b: ((a + b) * a - b, a * a, a.sum() + b),
    }
    for name, fn in cases.items():
        executable = rig.compile(fn, a, b)
        expected = [each.contiguous().numpy() for each in fn(a, b)]
        for donate in ((0,), (1,), (0, 1)):
            results = rig.run(executable, [rig.put(a), rig.put(b)], donate)
            for index, (result, array) in enumerate(zip(results, expected, strict=True)):
                where = f"{name}, {list(donate)} donated: result {index}"
                compare(rig.get(result), array, 1e-4, where)
    same_twice = rig.compile(lambda a, b: (a + 1.0, b.flip(0)), a, b)
    buffer = rig.put(a)
    results = rig.run(same_twice, [buffer, buffer], [0])
    flipped = a.flip(0).numpy()
    same(rig.get(results[1]), flipped, "one buffer as two inputs, one of them donated: result 1")


@check(
    "memory/updates",
    "donated parameters may go round for ever: each update takes the last one's results",
    "a result in memory that a later run still reads",
)
def _(rig: Rig) -> None:
    weight, gradient = normal(33, 9), normal(33, 9, seed=1)
    executable = rig.compile(lambda w, g, m: (w - g * 0.1, m * 0.9 + g), weight, gradient, weight)
    buffers = [rig.put(weight), rig.put(gradient), rig.put(weight)]
    wide, slope, momentum = weight.double(), gradient.double(), weight.double()
    for _ in range(12):
        new_weight, new_momentum = rig.run(executable, buffers, (0, 2))
        buffers = [new_weight, buffers[1], new_momentum]
        wide, momentum = wide - slope * 0.1, momentum * 0.9 + slope
    compare(rig.get(buffers[0]), wide.numpy(), 1e-4, "the parameter after 12 updates")
    compare(rig.get(buffers[2]), momentum.numpy(), 1e-4, "the momentum after 12 updates")


@check(
    "memory/steady inputs",
    "what is computed from a steady input alone may be kept only while the same Buffer comes",
    "values that are kept for a weight, and used for the next one",
)
def _(rig: Rig) -> None:
    x, weight = normal(20, 30), normal(30, 10, seed=1)
    graph = rig.graph(lambda x, w: torch.mm(x, w), x, weight)
    [node for node in graph.graph.nodes if node.op == "placeholder"][1].meta["steady"] = True
    executable = rig.device.compile(graph)
    update = rig.compile(lambda w, g: w - g, weight, weight)
    source, present = rig.put(x), rig.put(weight)
    value = weight
    for turn in range(4):
        for _ in range(2):
            (result,) = rig.run(executable, [source, present])
            expected = (x.double() @ value.double()).numpy()
            compare(rig.get(result), expected, 1e-3, f"the product after {turn} updates")
        step = normal(30, 10, seed=turn + 2)
        (present,) = rig.run(update, [present, rig.put(step)], (0,))
        value = value - step


@check(
    "memory/dropped while queued",
    "the memory of a buffer may go when all work that reads it has ended, not before",
    "memory that is freed early: with the Buffer object, not with the work",
)
def _(rig: Rig) -> None:
    heavy, x, expected = rig.heavy()
    for turn in range(3):
        buffer = rig.put(x)
        outputs, event = rig.begin(heavy, [buffer])
        del buffer
        gc.collect()
        junk = [rig.put(np.full(x.shape, np.nan, np.float32)) for _ in range(8)]
        event.wait(WAIT_S)
        compare(rig.get(outputs[0]), expected, 1e-4, f"a pass whose input was dropped, turn {turn}")
        del junk
    chained, event = rig.begin(heavy, [rig.put(x)])
    following = rig.compile(lambda x: x + 1.0, torch.from_numpy(x))
    results, last = rig.begin(following, chained, [event])
    del chained, event
    gc.collect()
    junk = [rig.put(np.full(x.shape, np.nan, np.float32)) for _ in range(8)]
    last.wait(WAIT_S)
    compare(rig.get(results[0]), expected + 1.0, 1e-4, "a pass whose input was another's result")
    del junk
