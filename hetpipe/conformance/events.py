"""Events, queues, chunks, threads: the order of work, and who may do what at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from hetpipe.conformance.buffers import random_array, same
from hetpipe.conformance.check import BrokenRule, Level, NotAsked, check, expect
from hetpipe.conformance.operators import normal
from hetpipe.conformance.rig import WAIT_S, Array, Rig, compare
from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Buffer, Event
from hetpipe.sdk.events import Signal


@check(
    "events/after the work",
    "an event has happened when its work has ended, not before",
    "a racy event: it completes before the work",
)
def _(rig: Rig) -> None:
    heavy, x, expected = rig.heavy()
    buffer = rig.put(x)
    rig.run(heavy, [buffer])
    for turn in range(4):
        outputs, event = rig.begin(heavy, [buffer])
        end_s = time.monotonic() + WAIT_S
        while not event.done():  # as a scheduler would look at it
            expect(time.monotonic() < end_s, f"the event has not happened after {WAIT_S:.0f} s")
        compare(rig.get(outputs[0]), expected, 1e-4, f"the result at the moment of done, {turn}")
        outputs, event = rig.begin(heavy, [buffer])
        event.wait(WAIT_S)
        compare(rig.get(outputs[0]), expected, 1e-4, f"the result at the end of wait, {turn}")
        expect(event.done(), "done() is false after wait()")


@check(
    "events/downloads",
    "a download is over when the host array is filled, not when the copy is queued",
    "a racy event: it completes before the copy",
)
def _(rig: Rig) -> None:
    sent = random_array("float32", (1 << 21,))
    buffer = rig.put(sent)
    for _ in range(3):
        array = np.zeros_like(sent)
        event = rig.device.download(buffer, array)
        while not event.done():
            time.sleep(0)
        same(array, sent, "a download of 8 MiB at the moment of done")


@check(
    "events/order",
    "a run begins when all of `after` have happened, whoever makes them happen",
    "`after` is not looked at",
)
def _(rig: Rig) -> None:
    x = normal(64)
    executable = rig.compile(lambda x: x + 1.0, x)
    buffer = rig.put(x)
    gate = Signal("a gate")
    begun: list[tuple[list[Buffer], Event]] = []
    errors: list[BaseException] = []

    def start() -> None:
        try:
            begun.append(rig.begin(executable, [buffer], [gate]))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=start, daemon=True)  # a device may block until it may begin
    thread.start()
    thread.join(0.05)
    if begun:
        expect(not begun[0][1].done(), "the run ended while an event of `after` was still to come")
    gate.end()
    thread.join(WAIT_S)
    if errors:
        raise errors[0]
    expect(bool(begun), f"the run has not returned {WAIT_S:.0f} s after its `after` happened")
    outputs, event = begun[0]
    event.wait(WAIT_S)
    same(rig.get(outputs[0]), (x + 1.0).numpy(), "the result")


@check(
    "events/chains",
    "runs that follow each other by `after` need no wait in between",
    "`after` is not looked at, or memory between two runs is reused",
)
def _(rig: Rig) -> None:
    x = torch.zeros(48, 48)
    executable = rig.compile(lambda x: torch.mm(x, x) * 0.0 + x + 1.0, x)
    buffer, event = rig.device.upload(x.numpy())
    for _ in range(24):
        (buffer,), event = rig.begin(executable, [buffer], [event])
    event.wait(WAIT_S)
    same(rig.get(buffer), np.full((48, 48), 24, np.float32), "the end of a chain of 24 runs")


@check(
    "events/time limits",
    "wait(timeout_s) raises BackendError when the time is over and the work is not",
    "a wait without its limit, or one that returns in silence",
)
def _(rig: Rig) -> None:
    heavy, x, expected = rig.heavy()
    outputs, event = rig.begin(heavy, [rig.put(x)])
    try:
        event.wait(1e-6)
    except BackendError:
        pass
    else:
        expect(event.done(), "wait(1e-6) returned, and done() is false")
    event.wait(WAIT_S)
    compare(rig.get(outputs[0]), expected, 1e-4, "the result after a wait that was cut short")


def at_once(*jobs: Callable[[], None]) -> None:
    """Do the jobs on threads that start together; raise the first error of any."""
    barrier, errors = threading.Barrier(len(jobs)), list[BaseException]()

    def work(job: Callable[[], None]) -> None:
        barrier.wait(WAIT_S)
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
        expect(not thread.is_alive(), f"a thread has not come back after {2 * WAIT_S:.0f} s")
    if errors:
        raise errors[0]


@check(
    "threads/copies beside passes",
    "uploads and downloads on other threads go on while a pass runs",
    "state of the device that two threads change at once",
)
def _(rig: Rig) -> None:
    heavy, x, expected = rig.heavy()
    buffer = rig.put(x)

    def passes() -> None:
        for _ in range(4):
            (result,) = rig.run(heavy, [buffer])
            compare(rig.get(result), expected, 1e-4, "a pass beside copies")

    def copies(seed: int) -> None:
        for turn in range(16):
            sent = random_array("float32", (4099,), 16 * seed + turn)
            same(rig.get(rig.put(sent)), sent, f"a copy beside a pass, thread {seed}")

    at_once(passes, lambda: copies(1), lambda: copies(2))


@check(
    "threads/two executables",
    "two executables run on two threads, each with buffers of its own",
    "scratch memory that two passes share",
)
def _(rig: Rig) -> None:
    x = normal(96, 96)
    one = rig.compile(lambda x: torch.mm(x, x) + x.sum(0), x)
    two = rig.compile(lambda x: torch.mm(x.t(), x) - x.sum(1), x)
    wide = x.double()
    products = (wide @ wide + wide.sum(0), wide.t() @ wide - wide.sum(1))

    def passes(index: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(8):
                (result,) = rig.run((one, two)[index], [rig.put(x)])
                compare(rig.get(result), products[index].numpy(), 2e-3, f"executable {index}")

        return work

    at_once(passes(0), passes(1))


@check(
    "threads/other threads",
    "an executable may be called by another thread each time",
    "state that belongs to the thread that compiled",
)
def _(rig: Rig) -> None:
    x = normal(16)
    executable = rig.compile(lambda x: x * 3.0, x)
    for turn in range(3):
        at_once(
            lambda: same(rig.results(executable, x)[0], (x * 3.0).numpy(), f"thread {turn}")  # noqa: B023
        )


@check(
    "queues/passes at once",
    "passes in different queues are right at once: they share no scratch memory",
    "queues that are declared and share scratch memory",
)
def _(rig: Rig) -> None:
    queues = rig.info.capabilities.queues
    if queues < 2:
        raise NotAsked("it declares one queue")
    x = torch.rand(128, 128, generator=torch.Generator().manual_seed(0))
    wide = x.double()
    programs = []
    for number in range(queues):
        scale = 0.1 * (number + 1) / queues

        def chain(x: torch.Tensor, scale: float = scale) -> torch.Tensor:
            for _ in range(6):
                x = torch.mm(x, x) * (1.0 / 128) + scale
            return x

        programs.append((rig.compile(chain, x), chain(wide).numpy()))

    def passes(queue: int) -> Callable[[], None]:
        def work() -> None:
            executable, expected = programs[queue]
            for _ in range(12):
                (result,) = rig.run(executable, [rig.put(x)], (), queue)
                compare(rig.get(result), expected, 1e-3, f"queue {queue}")

        return work

    at_once(*map(passes, range(queues)))
    for executable, expected in programs:  # and one executable in another queue than before
        for queue in range(queues):
            (result,) = rig.run(executable, [rig.put(x)], (), queue)
            compare(rig.get(result), expected, 1e-3, f"an executable that moves to queue {queue}")


@check(
    "chunks/parts of results",
    "a chunk is ready when its event says so, and then has the result's values",
    "chunks that are reported too early",
)
def _(rig: Rig) -> None:
    if not rig.info.capabilities.chunks:
        raise NotAsked("it declares no chunks")
    x = normal(1024, 96)
    weight = normal(96, 640, seed=1)
    executable = rig.compile(lambda x, w: torch.mm(x, w) + 1.0, x, weight)
    buffers = [rig.put(x), rig.put(weight)]
    expected = (x.double() @ weight.double() + 1.0).flatten().numpy()
    reported = 0
    for _ in range(3):
        outputs, end, chunks = executable.run(buffers)
        for output, lo, hi, event in chunks:
            expect(output == 0, f"a chunk of output {output}, and there is one output")
            expect(0 <= lo < hi <= expected.size, f"a chunk {lo}..{hi} of {expected.size} elements")
            event.wait(WAIT_S)
            part: Array = np.zeros(hi - lo, np.float32)
            rig.device.download_part(outputs[0], lo, hi, part).wait(WAIT_S)
            compare(part, expected[lo:hi], 1e-2, f"chunk {lo}..{hi} at its event")
            reported += 1
        end.wait(WAIT_S)
        compare(rig.get(outputs[0]).flatten(), expected, 1e-4, "the whole result")
    if not reported:
        raise BrokenRule("it declares chunks, and a product of 1024 x 96 x 640 has none")


@check(
    "determinism/run to run",
    "the same inputs give the same bits, from run to run and however often it is compiled",
    "a sum whose order is left to chance, memory that is read before it is written",
)
def _(rig: Rig) -> None:
    x, w = normal(65, 130), normal(130, 70, seed=1)

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.mm(x, w)
        return y, y.sum(0), y.sum(), (y * 0.01).softmax(-1)

    graph = rig.graph(fn, x, w)
    first = None
    for compiled in range(2):
        executable = rig.device.compile(graph)
        for run in range(6):
            results = rig.results(executable, x, w)
            first = first or results
            for index, (result, before) in enumerate(zip(results, first, strict=True)):
                same(result, before, f"result {index} of run {run}, compiled {compiled + 1} times")


@check(
    "determinism/stress",
    "the same inputs give the same bits, also in the middle of other work",
    "a race between passes, or with copies",
    Level.FULL,
)
def _(rig: Rig) -> None:
    heavy, x, _ = rig.heavy(96, 6)
    buffer = rig.put(x)
    (before,) = (rig.get(each) for each in rig.run(heavy, [buffer]))

    def passes() -> None:
        for turn in range(100):
            (result,) = rig.run(heavy, [buffer])
            same(rig.get(result), before, f"pass {turn} of 100")

    def copies() -> None:
        for turn in range(100):
            sent = random_array("float32", (1 + 37 * turn,), turn)
            same(rig.get(rig.put(sent)), sent, f"copy {turn} of 100")

    at_once(passes, copies)
