"""Checks of events: start of work, end of work, and failures."""

from __future__ import annotations

import threading
import time

import numpy as np
import torch

from hetpipe.conformance.check import BrokenRule, check, expect
from hetpipe.conformance.copies import random_array, same
from hetpipe.conformance.operators import normal
from hetpipe.conformance.rig import WAIT_S, Rig, compare
from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Buffer, Event
from hetpipe.sdk.events import Signal


@check(
    "events/after the work",
    "an event happens when its work has ended, not earlier",
    "a racy event, which happens before the work has ended",
)
def _(rig: Rig) -> None:
    heavy, x, expected = rig.heavy()
    buffer = rig.put(x)
    rig.run(heavy, [buffer])
    for turn in range(4):
        outputs, event = rig.begin(heavy, [buffer])
        end_s = time.monotonic() + WAIT_S
        while not event.done():  # polls, as a scheduler does
            expect(time.monotonic() < end_s, f"the event has not happened after {WAIT_S:.0f} s")
        compare(rig.get(outputs[0]), expected, 1e-4, f"the result when done() is true, turn {turn}")
        outputs, event = rig.begin(heavy, [buffer])
        event.wait(WAIT_S)
        compare(rig.get(outputs[0]), expected, 1e-4, f"the result when wait() returns, turn {turn}")
        expect(event.done(), "done() is false after wait()")


@check(
    "events/downloads",
    "the event of a download happens when the host array is filled, not when the copy is queued",
    "a racy event, which happens before the copy has ended",
)
def _(rig: Rig) -> None:
    sent = random_array("float32", (1 << 21,))
    buffer = rig.put(sent)
    for _ in range(3):
        array = np.zeros_like(sent)
        event = rig.device.download(buffer, array)
        while not event.done():
            time.sleep(0)
        same(array, sent, "a download of 8 MiB as soon as done() is true")


@check(
    "events/order",
    "a run begins when all events in `after` have happened, on any device",
    "the device ignores `after`",
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

    # On a thread, because run() may block until all events in `after` have happened.
    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(0.05)
    if begun:
        expect(
            not begun[0][1].done(), "the run ended although an event in `after` had not happened"
        )
    gate.end()
    thread.join(WAIT_S)
    if errors:
        raise errors[0]
    expect(
        bool(begun),
        f"the run has not returned {WAIT_S:.0f} s after all events in `after` had happened",
    )
    outputs, event = begun[0]
    event.wait(WAIT_S)
    same(rig.get(outputs[0]), (x + 1.0).numpy(), "the result")


@check(
    "events/failed before",
    "if an event in `after` has failed, the run fails with the same error",
    "the device ignores an error in `after` and computes with inputs that were never made",
)
def _(rig: Rig) -> None:
    x = normal(64)
    executable = rig.compile(lambda x: x + 1.0, x)
    buffer = rig.put(x)
    for late in (False, True):
        gate = Signal("a gate")
        error = BackendError("the pass before has failed")
        timer = threading.Timer(0.02, gate.end, (error,))
        if late:
            timer.start()
        else:
            gate.end(error)
        try:
            _, event = rig.begin(executable, [buffer], [gate])
            event.wait(WAIT_S)
        except BackendError as raised:
            expect(
                "the pass before has failed" in str(raised),
                f"the run fails, but its error lacks the reason: {raised}",
            )
        else:
            when = "while the run waited" if late else "before the run"
            raise BrokenRule(f"an event in `after` failed {when}, but the run reports no error")
    same(rig.results(executable, x)[0], (x + 1.0).numpy(), "a run after one that failed")


@check(
    "events/no operators",
    "the event of a run happens, even if the graph has no calls and returns only its inputs",
    "an event that waits for work that never began",
)
def _(rig: Rig) -> None:
    a, b = normal(3), normal(4, seed=1)
    executable = rig.compile(lambda a, b: (b, a, b), a, b)
    buffers = [rig.put(a), rig.put(b)]
    outputs, event = rig.begin(executable, buffers)
    event.wait(WAIT_S)
    expect(event.done(), "done() is false after wait()")
    for place, index in enumerate((1, 0, 1)):
        expect(outputs[place] is buffers[index], f"result {place} is not input {index} itself")
    empty = torch.zeros(0, 3)
    outputs, event = rig.begin(rig.compile(lambda x: x + 1.0, empty), [rig.put(empty)])
    event.wait(WAIT_S)
    expect(outputs[0].shape == (0, 3), f"a result of shape (0, 3) has {outputs[0].shape}")


@check(
    "events/chains",
    "runs that are ordered by `after` need no wait between them",
    "the device ignores `after`, or reuses memory between two runs",
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
    "wait(timeout_s) raises BackendError if the work has not ended after that time",
    "a wait that ignores its limit, or returns without an error",
)
def _(rig: Rig) -> None:
    heavy, x, expected = rig.heavy()
    outputs, event = rig.begin(heavy, [rig.put(x)])
    try:
        event.wait(1e-6)
    except BackendError:
        pass
    else:
        expect(event.done(), "wait(1e-6) returned without an error, but done() is false")
    event.wait(WAIT_S)
    compare(rig.get(outputs[0]), expected, 1e-4, "the result after a wait that reached its limit")
