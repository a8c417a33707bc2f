"""Times of the planners for large cases: `python -m benchmarks.planners [--picture FILE]`.

The times are medians of process seconds on one core; making a case is not timed. The exponents of
growth are least-squares slopes of log seconds over log sizes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.links import link_costs
from hetpipe.cluster.member import Member
from hetpipe.cluster.topology import Server, Topology
from hetpipe.cost.board import board
from hetpipe.cost.pipedream_profile import ChainCosts
from hetpipe.cost.placed import scale_to_boards
from hetpipe.plan.bisection import Stage, fixed_order
from hetpipe.plan.costs import Objective
from hetpipe.plan.dapple import candidates
from hetpipe.plan.planners.choice import plan
from hetpipe.plan.planners.exact import DeviceType, free_order
from hetpipe.plan.proposal import PlannerOptions
from hetpipe.plan.server_groups import Machines, Wire
from hetpipe.report.tables import Table

ROUNDS = 5
MINI_BATCH = 2048
BOARDS = (
    "v100-sxm-32", "a100-40", "t4", "rtx-2080-ti", "gtx-1080-ti", "v100-pcie-16", "a100-80",
    "agilex-agf027",
)  # fmt: skip
OBJECTIVES: tuple[Objective, ...] = ("sum", "max")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the seconds of each case, and draw their growth if a picture is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planners", description=__doc__)
    parser.add_argument("--picture", type=Path, help="draw the growth to this file")
    picture: Path | None = parser.parse_args(arguments).picture
    table = Table("Planners, process seconds", ["case", "seconds", "spread"], ["seconds"])
    for name, case in cases():
        seconds = timed(case)
        spread = f"{min(seconds):.3f} .. {max(seconds):.3f}"
        table.add_row(name, f"{statistics.median(seconds):.3f}", spread)
    growths = {
        "layers, fixed order on 64 devices": growth(
            (500, 1_000, 2_000, 4_000), partial(fixed, devices=64)
        ),
        "devices, fixed order of 2,000 layers": growth((32, 64, 128, 256), partial(fixed, 2_000)),
        "layers, auto on 32 devices": growth((25, 50, 100, 200), partial(auto, devices=32)),
        "devices, auto on 100 layers": growth((8, 16, 32, 64), partial(auto, 100)),
        "layers, dapple on 4 x 4": growth((24, 48, 96), partial(dapple, servers=4, each=4)),
    }
    for name, curve in growths.items():
        table.add_row(f"growth with {name}", f"n^{exponent(*curve):.2f}", "")
    Console().print(table)
    if picture is not None:
        draw(growths, picture)


Growth = tuple[Sequence[int], Sequence[float]]
"""Sizes, and the median seconds at each size."""


def growth(sizes: Sequence[int], case: Callable[[int], Callable[[], object]]) -> Growth:
    """Return the sizes, and at each size the median seconds of the case that `case` makes."""
    return sizes, [statistics.median(timed(case(size))) for size in sizes]


def draw(growths: Mapping[str, Growth], path: Path) -> None:
    """Draw seconds over sizes on logarithmic axes, with the exponents in the legend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="size", ylabel="process seconds")
    for name, curve in growths.items():
        axes.plot(*curve, marker="o", label=f"{name}: n^{exponent(*curve):.2f}")
    axes.legend()
    figure.savefig(path)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of each case, and a call to time."""
    yield "fixed order, 1,000 x 128", fixed(1_000, 128)
    for objective in OBJECTIVES:
        name = f"fixed order, 1,000 x 128, memory, {objective}"
        yield name, fixed(1_000, 128, objective, 2.2)
    for objective in OBJECTIVES:
        yield f"fixed order, 10,000 x 1,024, {objective}", fixed(10_000, 1_024, objective)
    yield "free order, 1,000 x (512 + 512)", partial(free_order, two_types(1_000, 512))
    yield "dapple, 50 layers on 2 x 8", dapple(50, 2, 8)
    yield "dapple, 50 layers on 16 x 1", dapple(50, 16, 1)
    yield "dapple, 50 layers on 8 x 8", dapple(50, 8, 8)
    yield "auto, 200 layers on 64 devices of 8 kinds", auto(200, 64)


def fixed(
    layers: int,
    devices: int,
    objective: Objective = "sum",
    room: float = np.inf,
) -> Callable[[], object]:
    """Return a call that partitions a random chain over devices in fixed order."""
    return partial(fixed_order, chain(layers, devices, room), objective)


def dapple(layers: int, servers: int, each: int) -> Callable[[], object]:
    """Return a call of DAPPLE's search on `servers` servers of `each` devices."""
    machines = Machines((each,) * servers, Wire(25e9, 25e9), Wire(1e9, 3e9))
    return partial(
        candidates, drawn_layers(layers), machines, samples=2, global_batch=64,
        capacity_nbytes=16e9,
    )  # fmt: skip


def auto(layers: int, devices: int) -> Callable[[], object]:
    """Return a call of the planner `auto` on servers of 8 devices.

    The devices of a server have one type of board, and servers have different types.
    """
    members = tuple(
        Member(f"{number}", "", board=BOARDS[number // 8 % len(BOARDS)], server=f"{number // 8}")
        for number in range(devices)
    )
    servers = tuple(Server(f"{n}", Topology(5e-6, 12e9)) for n in range(-(-devices // 8)))
    cluster = Cluster(members, servers=servers, network=Topology(2e-5, 3e9, "switch"))
    boards, links = {each.id: board(each.board) for each in members}, link_costs(cluster)
    profiled = board(BOARDS[0]), 8
    costs = {
        size: scale_to_boards("drawn", drawn_layers(layers), profiled, boards, links, size)
        for size in (2**power for power in range(MINI_BATCH.bit_length()))
    }
    return partial(plan, costs, cluster, PlannerOptions(MINI_BATCH), "auto")


def drawn_layers(count: int) -> ChainCosts:
    """Return `count` layers with random times and bytes."""
    draw = np.random.default_rng(0)
    forward_s = draw.uniform(1e-3, 4e-3, count)
    most_nbytes = 2 * 10**7, 2 * 10**8, 8 * 10**5  # of activations, of parameters, across a cut
    nbytes = (draw.integers(most // 20, most, count).tolist() for most in most_nbytes)
    return ChainCosts(
        tuple(map(str, range(count))),
        tuple(forward_s.tolist()),
        tuple((2 * forward_s).tolist()),
        *map(tuple, nbytes),
    )


def timed(case: Callable[[], object]) -> list[float]:
    """Return the process seconds of `ROUNDS` calls."""
    seconds = []
    for _ in range(ROUNDS):
        begin_s = time.process_time()
        case()
        seconds.append(time.process_time() - begin_s)
    return seconds


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the slope of log seconds over log sizes."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def chain(layers: int, devices: int, room: float = np.inf) -> list[Stage]:
    """Return a stage of a random chain for each device.

    The devices have eight speeds, in random order. The memory of a device is `room` times an even
    share of all bytes.
    """
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
            own_s[kind], 0.01, cut_s * (n > 0), cut_s * (n + 1 < devices), able, nbytes,
            0.1 * cut_s, room * nbytes[-1] / devices,
        )
        for n, kind in enumerate(kinds)
    ]  # fmt: skip


def two_types(layers: int, count: int) -> list[DeviceType]:
    """Return two types of `count` devices each; the ratio of their times varies by layer."""
    draw = np.random.default_rng(0)
    base_s = draw.uniform(0.5, 2, layers)
    return [
        DeviceType("slow", count, base_s * draw.uniform(0.8, 1.2, layers)),
        DeviceType("fast", count, base_s / 3 * draw.uniform(0.8, 1.2, layers)),
    ]


if __name__ == "__main__":
    main()
