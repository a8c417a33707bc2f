"""The seconds after a loss, and the steps after it: see `benchmarks.survived`."""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import hetpipe as hp
from benchmarks.survivalcost import (
    DEVICE,
    OPENINGS,
    batches_of,
    block_s,
    compare,
    opened,
    pinned,
)
from hetpipe.cluster.parts import without
from hetpipe.pipeline import absent, survivors
from hetpipe.pipeline.journal import Recorded
from hetpipe.pipeline.learning import WINDOW
from hetpipe.pipeline.stages import Stages
from hetpipe.pipeline.survival import Survival
from hetpipe.profile.clock import spread_of
from hetpipe.train.training import one_thread

DEVICES = [DEVICE] * 3
WARM_UP = 6
SETTLED = 3 * WINDOW + 1
"""Steps after which a recovered pipeline has moved its layers, if that pays."""
WITHIN = 4.0
"""A worker is killed within this number of steps after the warm-up."""
BLOCK, PAIRS_S = 15, 20.0
"""The steps of a block, and the seconds of all pairs of blocks of two pipelines."""
PLACES: dict[str, tuple[Any, str]] = {
    "recovery": (Survival, "_recover"),
    "close": (Survival, "_remove_lost"),
    "renew": (Survival, "_renew"),
    "plan": (survivors, "plan_for"),
    "renew training": (Recorded, "renew"),
    "trace": (Stages, "_traced"),
    "replay": (Recorded, "replay"),
}
"""The functions of a recovery; `renew` also starts the workers."""


class Spans:
    """The begins and ends of functions, by name."""

    def __init__(self) -> None:
        self.of: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that also records its span."""

        def call(*args: Any, **kwargs: Any) -> Any:
            begin_s = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                self.of[name].append((begin_s, time.monotonic()))

        return call

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the functions in `PLACES` within the context."""
        with ExitStack() as stack:
            for name, (owner, function) in PLACES.items():
                timed = self.timed(name, getattr(owner, function))
                stack.enter_context(patch.object(owner, function, timed))
            yield

    def sum_s(self, name: str) -> float:
        """Return the seconds of all calls of a function."""
        return sum(end_s - begin_s for begin_s, end_s in self.of[name])


@dataclass(frozen=True)
class Recovery:
    """A loss, and the seconds of its phases by name."""

    member: str
    phases_s: dict[str, float]
    survivors: tuple[str, ...]
    replayed: int


def pid_of(pipe: hp.Pipeline, member: str) -> int | None:
    """Return the process of a member's worker; None if it is not in the crew."""
    crew: Any = pipe._training.setup.crew
    place = crew._index.get(member)
    children = crew._fleet._children
    return None if place is None or place >= len(children) else children[place].pid


def recover(pipe: hp.Pipeline, batches: Iterator[Any], member: str, after_s: float) -> Recovery:
    """Kill a member's worker after some seconds of a run, and return the phases that follow."""
    killed, spans, pid = list[float](), Spans(), pid_of(pipe, member)
    assert pid is not None

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)
        killed.append(time.monotonic())

    timer = threading.Timer(after_s, kill)
    with spans.recorded():
        timer.start()
        results = pipe.run(batches)
        for _ in results:
            if pipe.lost:
                break
        next_s = time.monotonic()
        results.close()
    (begin_s, end_s) = spans.of["recovery"][0]
    renew_begin_s, plan_begin_s = spans.of["renew"][0][0], spans.of["plan"][0][0]
    loaded_s = spans.sum_s("renew training")
    phases_s = {
        "detection": begin_s - killed[0],
        "close": spans.sum_s("close"),
        "start": plan_begin_s - renew_begin_s,
        "plan": spans.sum_s("plan"),
        "trace": spans.sum_s("trace"),
        "compile, load": loaded_s - spans.sum_s("trace"),
        "replay": spans.sum_s("replay"),
        "next result": next_s - end_s,
        "after detection": next_s - begin_s,
    }
    lost = pipe.lost[0]
    return Recovery(member, phases_s, lost.plan.all_devices, lost.replayed)


def main(model: str, losses: int, seed: int) -> None:
    """Print the seconds after losses, and the steps after the last losses."""
    draw, batches, found = random.Random(seed), batches_of(model), []
    ratios: list[tuple[float, float]] = []
    with one_thread(), patch.object(absent, "FIRST_S", 1e9):  # a lost worker stays away
        cluster = pinned(DEVICES)
        for number in range(-len(DEVICES), losses):
            with opened(model, cluster, survive="auto") as pipe:
                if number == -len(DEVICES):
                    print(pipe.plan, flush=True)
                step_s = block_s(pipe, batches, WARM_UP)
                # The first loss of each member fills the caches, and does not count.
                member = cluster.ids[number] if number < 0 else draw.choice(cluster.ids)
                each = recover(pipe, batches, member, draw.uniform(0.0, WITHIN * step_s))
                text = ", ".join(f"{name} {s:.2f}" for name, s in each.phases_s.items())
                print(
                    f"{'first ' if number < 0 else ''}{member}: {text}; {each.replayed} mini-"
                    f"batches again, on {', '.join(each.survivors)}",
                    flush=True,
                )
                found += [each.phases_s] if number >= 0 else []
                if number >= losses - OPENINGS:
                    ratios.append(afterwards(model, pipe, batches))
    for kind, own in zip(("a recovered", "another new"), zip(*ratios, strict=True), strict=True):
        print(
            f"{model}: throughput of {kind} pipeline over that of a new one: median "
            f"{statistics.median(own):.3f} (spread {spread_of(own):.3f}, {min(own):.3f} to "
            f"{max(own):.3f}, {len(own)} pairs of pipelines; measured; bar 0.95)"
        )
    for name in found[0]:
        times_s = [each[name] for each in found]
        print(
            f"{model}: {name}: median {statistics.median(times_s):.2f} s, worst "
            f"{max(times_s):.2f} s ({len(times_s)} losses, measured)"
        )


def afterwards(model: str, pipe: hp.Pipeline, batches: Iterator[Any]) -> tuple[float, float]:
    """Compare steps of a recovered pipeline with steps of a new one on the remaining devices.

    Return the ratio of their throughputs, and the ratio of two new pipelines.
    """
    left = without(pinned(DEVICES), pipe.lost[0].members)
    with (
        opened(model, left, survive="auto") as fresh,
        opened(model, left, survive="auto") as other,
    ):
        print(f"recovered: {pipe.plan}\nnew: {fresh.plan}\nnew: {other.plan}", flush=True)
        for each in (pipe, fresh, other):
            block_s(each, batches, SETTLED)
        print(f"settled: {pipe.plan}", flush=True)
        ratios = [median_ratio(each, fresh, batches) for each in (pipe, other)]
    print(
        f"{model}: throughput of a recovered pipeline over that of a new one "
        f"{ratios[0]:.3f}, of another new one {ratios[1]:.3f} (measured)",
        flush=True,
    )
    return ratios[0], ratios[1]


def median_ratio(pipe: hp.Pipeline, fresh: hp.Pipeline, batches: Iterator[Any]) -> float:
    """Return the throughput of a pipeline over that of a new one, in alternating blocks."""
    pairs = compare((pipe, fresh), batches, BLOCK, time.monotonic() + PAIRS_S)
    return statistics.median(times_s[1] / times_s[0] for times_s, _ in pairs)
