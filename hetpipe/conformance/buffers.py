"""Checks of buffer memory: lifetime of results and inputs, aliasing, donation, reuse."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from typing import Any

import numpy as np
import torch

from hetpipe.conformance.check import NotAsked, check, expect
from hetpipe.conformance.copies import MANY, same
from hetpipe.conformance.operators import normal
from hetpipe.conformance.rig import WAIT_S, Rig, compare


@check(
    "memory/results last",
    "a result keeps its values until it is dropped or donated, however many runs follow",
    "a stale buffer: the next run reuses the memory of the results",
)
def _(rig: Rig) -> None:
    x = normal(64)
    executable = rig.compile(lambda x: (x + 1.0, x * 2.0), x)
    inputs = [normal(64, seed=seed) for seed in range(MANY)]
    results = [rig.run(executable, [rig.put(each)]) for each in inputs]
    for run, (each, (one, two)) in enumerate(zip(inputs, results, strict=True)):
        same(rig.get(one), (each + 1.0).numpy(), f"result 0 of run {run}, after {MANY} runs")
        same(rig.get(two), (each * 2.0).numpy(), f"result 1 of run {run}, after {MANY} runs")


def _folded(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the updates of several parameters, from two inputs each, and the sum of all inputs."""
    sums = [a + b * 0.5 for a, b in zip(tensors[::2], tensors[1::2], strict=True)]
    return *sums, reduce(torch.add, tensors)


@check(
    "memory/inputs last",
    "a run does not change an input that is not donated",
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
    for count in (6, 40):
        many = [normal(6, 5, seed=seed) for seed in range(count)]
        executable = rig.compile(_folded, *many)
        for donated in ([], [0, count - 1]):
            buffers = [rig.put(tensor) for tensor in many]
            rig.run(executable, buffers, donated)
            for index in set(range(count)) - set(donated):
                where = f"input {index} of {count}, {donated} donated"
                same(rig.get(buffers[index]), many[index].numpy(), where)


@check(
    "memory/results of their own",
    "no result shares memory with an input that was not donated, nor with another result",
    "a result that aliases an input: the device returns a view instead of a copy",
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
    rig.run(overwriting, [source], [0])  # may overwrite the memory of the donated input
    for index, (result, array) in enumerate(zip(results, expected, strict=True)):
        same(rig.get(result), array, f"result {index}, after a later run overwrote its input")
    rig.run(flat, [results[0]], [0])
    for index in range(1, len(results)):
        same(rig.get(results[index]), expected[index], f"result {index} after result 0 was donated")


@check(
    "memory/the same buffer",
    "a result that is a placeholder is the same Buffer object, and a repeated result is one Buffer",
    "the device copies or makes every output without looking at the graph",
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
                f"result {place} is input {index} of the graph, but the run "
                "returned another Buffer",
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
    "an update may receive the results of the last update as donated inputs, any number of times",
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
    "memory/scalars",
    "every run reads all of its inputs, even inputs without dimensions",
    "a learning rate or a step number that is kept from the first run",
)
def _(rig: Rig) -> None:
    weight, slope = normal(7, 5), normal(7, 5, seed=1)

    def update(w: torch.Tensor, g: torch.Tensor, lr: torch.Tensor, t: torch.Tensor) -> Any:
        return w - g * lr, w * (1.0 - lr / t), t + 1.0

    lr = torch.tensor(0.5)
    executable = rig.compile(update, weight, slope, lr, lr)
    buffers = [rig.put(weight), rig.put(slope)]
    step = rig.put(torch.tensor(1.0))
    for turn in range(4):
        rate, t = torch.tensor(0.5 / (turn + 1)), torch.tensor(turn + 1.0)
        results = rig.run(executable, [*buffers, rig.put(rate), step])
        step = results[-1]
        for index, (result, expected) in enumerate(
            zip(results, update(weight, slope, rate, t), strict=True)
        ):
            where = f"result {index} of run {turn}, with the rate {float(rate):.4g} and step {t:g}"
            compare(rig.get(result), expected.numpy(), 1e-5, where)
    with suppress(NotAsked):  # a device may lack integer scalars
        counting = rig.compile(lambda t: (t + 1, t * 3), torch.tensor(1))
        for number in (1, 2, 70_000):
            results = rig.run(counting, [rig.put(torch.tensor(number))])
            for result, right in zip(results, (number + 1, number * 3), strict=True):
                where = f"a result of the whole number {number}"
                compare(rig.get(result), np.asarray(right, np.int64), 0.0, where)


@check(
    "memory/steady inputs",
    "a device may keep a value that it computed from steady inputs while the Buffers are the same",
    "values that the device keeps for one weight and uses for the next weight",
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
    "the memory of a buffer stays until all work that reads it has ended",
    "memory that is freed with the Buffer object, before the work has ended",
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
    compare(rig.get(results[0]), expected + 1.0, 1e-4, "a pass on the result of another pass")
    del junk
