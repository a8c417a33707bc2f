"""`hetpipe kernels bench`: compares kernels on a core with the core's ceilings and with torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpipe.cli.options import check_picture, split_names
from hetpipe.cli.output import Output
from hetpipe.report.progress import progress_bar
from hetpipe.words import choices

if TYPE_CHECKING:
    from hetpipe.sdk.info import DeviceInfo

LIMIT_S = 3600.0


def command(
    device: Annotated[
        list[str] | None,
        typer.Option(help="A device's id; repeatable. \\[default: the processors with kernels]"),
    ] = None,
    sets: Annotated[
        str,
        typer.Option(
            "--set", help="Sets of kernels, separated by commas: products, memory, resnet50, vgg16."
        ),
    ] = "products,memory",
    seconds: Annotated[
        float, typer.Option(min=0.001, help="Seconds that a kernel or torch runs in a round.")
    ] = 0.1,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds; the kernel, its ceilings and torch run in each.")
    ] = 5,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the first device's roofline: .png, .svg or .pdf.")
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the figures as JSON; - is standard output."),
    ] = None,
) -> None:
    """Measure kernels on one core: time, share of the core's ceilings, and torch's time."""
    from hetpipe.bench.machine import describe
    from hetpipe.bench.products import run_pinned

    names = ",".join(_sets(sets))
    output = Output(json)
    check_picture(picture)
    output.text(describe())
    rows: list[dict[str, Any]] = []
    with progress_bar() as progress:
        for number, info in enumerate(chosen := processors(device or [])):
            progress(f"kernels of {info.id}", number, len(chosen))
            rates = run_pinned(
                "hetpipe.bench.kernelrates", info, info.id, names, seconds, rounds, limit_s=LIMIT_S
            )
            output.console.print(_table(info, rates))
            _conclude(output, info, rates)
            rows += rates
    if picture is not None:
        _draw(picture, chosen[0], [row for row in rows if row["device"] == chosen[0].id])
    output.finish_list(rows)


def _sets(sets: str) -> list[str]:
    """Split the names of sets. Raises `HetpipeError` if there is none, or an unknown one."""
    from hetpipe.bench.kernelcases import SETS
    from hetpipe.errors import HetpipeError

    names = split_names(sets) or [sets]
    if unknown := [name for name in names if name not in SETS]:
        raise HetpipeError(f"no set of kernels {unknown[0]!r}; {choices(unknown[0], SETS)}")
    return names


def processors(named: list[str]) -> list[DeviceInfo]:
    """Return the devices with these ids; without ids, the processors of backends with kernels.

    Emulators count only if they are named.
    """
    from hetpipe.errors import BackendError
    from hetpipe.sdk.host.registry import devices_of
    from hetpipe.workbench.runners import runners

    if named:
        found = {
            info.id: info
            for name in {each.partition(":")[0] for each in named}
            for info in devices_of(name)
        }
        if unknown := [each for each in named if each not in found]:
            raise BackendError(f"no device {unknown[0]!r}; {choices(unknown[0], found)}")
        return [found[each] for each in named]
    infos = [info for name, _ in runners() for info in devices_of(name)]
    infos = [info for info in infos if info.kind == "cpu" and not info.capabilities.emulated]
    if not infos:
        raise BackendError("found no processor with kernels; name a device: --device ID")
    return infos


def _table(info: DeviceInfo, rates: list[dict[str, Any]]) -> Any:
    from hetpipe.report.tables import Table
    from hetpipe.words import format_s

    columns = ("kernel", "shape", "time", "GFLOP/s", "GB/s", "of the ceiling", "x torch", "spread")
    emulated = ", emulated" if info.capabilities.emulated else ""
    table = Table(f"{info.id}, one core (measured{emulated})", columns, columns[2:], 2)
    for row in rates:
        table.add_row(
            row["kernel"], row["shape"], format_s(row["time_s"]), f"{row['gflops']:.1f}",
            f"{row['gbytes_per_s']:.1f}", f"{row['share_of_ceiling']:.2f}",
            f"{row['torch_time_s'] / row['time_s']:.2f}", f"{row['spread']:.1%}",
        )  # fmt: skip
    return table


def _conclude(output: Output, info: DeviceInfo, rates: list[dict[str, Any]]) -> None:
    """Print the geometric mean of torch's time over ours, by group and kernel."""
    from statistics import geometric_mean

    for key in dict.fromkeys((row["group"], row["kernel"]) for row in rates):
        mine = [row for row in rates if (row["group"], row["kernel"]) == key]
        ratios = [row["torch_time_s"] / row["time_s"] for row in mine]
        if len(mine) > 1:
            output.text(
                f"{info.id}, {key[0]}, {key[1]}: {geometric_mean(ratios):.2f} times torch's speed "
                f"(geometric mean of {len(mine)}), at least {min(ratios):.2f}"
            )


def _draw(path: Path, info: DeviceInfo, rates: list[dict[str, Any]]) -> None:
    from statistics import median

    from hetpipe.report.picture import Point, draw_roofline

    points = [
        Point(
            f"{row['kernel']} {row['shape']}", row["group"], row["gflops"] / row["gbytes_per_s"],
            row["gflops"],
        )
        for row in rates
    ]  # fmt: skip
    peak = median(row["ceiling_gflops"] for row in rates)
    copy = median(row["copy_gbytes_per_s"] for row in rates)
    draw_roofline(path, points, peak, copy, f"Kernels of {info.id} on one core, measured")
