"""Checks of threads, queues and chunks, and of equal bits from run to run."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch

from hetpipe.check.difference import Array
from hetpipe.conformance.check import BrokenRule, Level, NotAsked, check, expect
from hetpipe.conformance.copies import random_array, same
from hetpipe.conformance.operators import normal
from hetpipe.conformance.rig import WAIT_S, Rig, compare


def at_once(*jobs: Callable[[], None]) -> None:
    """Run the jobs on threads that start together; raise the first error."""
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
        expect(not thread.is_alive(), f"a thread has not returned after {2 * WAIT_S:.0f} s")
    if errors:
        raise errors[0]


@check(
    "threads/copies beside passes",
    "uploads and downloads on other threads work while a pass runs",
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
    "two executables run on two threads, each with separate buffers",
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
    "different threads may run the same executable, one after another",
    "state that belongs to the compiling thread",
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
    "passes in different queues may run at the same time: they share no scratch memory",
    "queues that share scratch memory",
)
def _(rig: Rig) -> None:
    queues = rig.info.capabilities.queues
    if queues < 2:
        raise NotAsked("the device declares only one queue")
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
    for executable, expected in programs:  # then each executable in every queue
        for queue in range(queues):
            (result,) = rig.run(executable, [rig.put(x)], (), queue)
            compare(rig.get(result), expected, 1e-3, f"an executable that moves to queue {queue}")


@check(
    "chunks/parts of results",
    "when the event of a chunk has happened, the chunk has the result's values",
    "chunks that are reported too early",
)
def _(rig: Rig) -> None:
    if not rig.info.capabilities.chunks:
        raise NotAsked("the device declares no chunks")
    x = normal(1024, 96)
    weight = normal(96, 640, seed=1)
    executable = rig.compile(lambda x, w: torch.mm(x, w) + 1.0, x, weight)
    buffers = [rig.put(x), rig.put(weight)]
    expected = (x.double() @ weight.double() + 1.0).flatten().numpy()
    reported = 0
    for _ in range(3):
        outputs, end, chunks = executable.run(buffers)
        for output, lo, hi, event in chunks:
            expect(
                output == 0,
                f"the run reports a chunk of output {output}, but it has only one output",
            )
            expect(
                0 <= lo < hi <= expected.size,
                f"the run reports a chunk {lo}..{hi}, which is empty or not within the output's "
                f"{expected.size} elements",
            )
            event.wait(WAIT_S)
            part: Array = np.zeros(hi - lo, np.float32)
            rig.device.download_part(outputs[0], lo, hi, part).wait(WAIT_S)
            compare(part, expected[lo:hi], 1e-2, f"chunk {lo}..{hi} at its event")
            reported += 1
        end.wait(WAIT_S)
        compare(rig.get(outputs[0]).flatten(), expected, 1e-4, "the whole result")
    if not reported:
        raise BrokenRule(
            "the device declares chunks, but reports none for a product of 1024 x 96 x 640"
        )


@check(
    "determinism/run to run",
    "the same inputs give the same bits in every run and after every compilation",
    "a sum in random order, or a read of memory that was never written",
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
    "the same inputs give the same bits, even while the device does other work",
    "a race between two passes, or between a pass and a copy",
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
