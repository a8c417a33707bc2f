"""Seconds of the planners at scale: `python -m hetpipe.bench.planners`.

Process seconds on one core, medians, without those for making the cases. The exponents of growth
are slopes of least squares through the logarithms of sizes and seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from rich.console import Console

from hetpipe.plan.bisection import Stage, fixed_order
from hetpipe.plan.costs import Objective
from hetpipe.plan.device_types import DeviceType, free_order
from hetpipe.report.tables import make_table

ROUNDS = 5
OBJECTIVES: tuple[Objective, ...] = ("sum", "max")


def main() -> None:
    """Print the seconds of each planner and case."""
    table = make_table("Planners, process seconds", ["case", "seconds", "spread"], ["seconds"])
    for name, case in cases():
        seconds = timed(case)
        spread = f"{min(seconds):.3f} .. {max(seconds):.3f}"
        table.add_row(name, f"{statistics.median(seconds):.3f}", spread)
    sizes = (500, 1_000, 2_000, 4_000)
    by_layers = [statistics.median(timed(fixed(n, 64))) for n in sizes]
    table.add_row("growth with layers, 64 devices", f"L^{exponent(sizes, by_layers):.2f}", "")
    counts = (32, 64, 128, 256)
    by_devices = [statistics.median(timed(fixed(2_000, n))) for n in counts]
    table.add_row("growth with devices, 2,000 layers", f"D^{exponent(counts, by_devices):.2f}", "")
    Console().print(table)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """The cases, each made when it is asked for."""
    yield "fixed order, 1,000 x 128", fixed(1_000, 128)
    yield "fixed order, 1,000 x 128, memory", fixed(1_000, 128, room=2.2)
    for objective in OBJECTIVES:
        name = f"fixed order, 1,000 x 128, memory, replicas, {objective}"
        yield name, fixed(1_000, 128, objective, 2.2, (1, 2, 4))
    for objective in OBJECTIVES:
        yield f"fixed order, 10,000 x 1,024, {objective}", fixed(10_000, 1_024, objective)
    yield "free order, 1,000 x (512 + 512)", partial(free_order, two_types(1_000, 512))


def fixed(
    layers: int,
    devices: int,
    objective: Objective = "sum",
    room: float = np.inf,
    replicas: Sequence[int] = (1,),
) -> Callable[[], object]:
    """The partition of a drawn chain."""
    return partial(fixed_order, chain(layers, devices, room, replicas), objective)


def timed(case: Callable[[], object]) -> list[float]:
    """Process seconds of some rounds."""
    seconds = []
    for _ in range(ROUNDS):
        begin_s = time.process_time()
        case()
        seconds.append(time.process_time() - begin_s)
    return seconds


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of log seconds over log sizes."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def chain(
    layers: int, devices: int, room: float = np.inf, replicas: Sequence[int] = (1,)
) -> list[Stage]:
    """Devices of eight speeds in a drawn order, with transfers, and `room` times an even share of
    all bytes as memory; stages of as many devices of one speed as `replicas` say."""
    draw = np.random.default_rng(0)
    base_s, speeds = draw.uniform(0.5, 2, layers), (0.5, 0.7, 1, 1.5, 2, 3, 4, 5)
    cut_s = np.concatenate(([0.0], draw.uniform(0, 0.3, layers - 1), [0.0]))
    nbytes = np.concatenate(([0.0], np.cumsum(draw.uniform(0.5, 2, layers))))
    own_s = [
        np.concatenate(([0.0], np.cumsum(base_s * draw.uniform(0.8, 1.2, layers) / speed)))
        for speed in speeds
    ]
    kinds = np.repeat(draw.integers(len(speeds), size=-(-devices // 4)), 4)[:devices]
    able = np.full(layers + 1, layers)
    return [
        Stage(
            first, first + count, own_s[kinds[first]] / count + (count - 1) * 1e-3 * nbytes, 0.01,
            cut_s * (first > 0), cut_s * (first + count < devices), able, nbytes, 0.1 * cut_s,
            room * nbytes[-1] / devices,
        )
        for first in range(devices)
        for count in replicas
        if first + count <= devices and len(set(kinds[first : first + count])) == 1
    ]  # fmt: skip


def two_types(layers: int, count: int) -> list[DeviceType]:
    """Two types whose times differ by layer."""
    draw = np.random.default_rng(0)
    base_s = draw.uniform(0.5, 2, layers)
    return [
        DeviceType("slow", count, base_s * draw.uniform(0.8, 1.2, layers)),
        DeviceType("fast", count, base_s / 3 * draw.uniform(0.8, 1.2, layers)),
    ]


if __name__ == "__main__":
    main()
