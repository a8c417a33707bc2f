"""`hetpipe kernels tune`: measures ways to divide a kernel's work, and keeps the best one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpipe.cli.options import JsonOption
from hetpipe.cli.output import Output, progress_bar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hetpipe.sdk.info import DeviceInfo

LIMIT_S = 600.0
GAIN = 1.02  # the best way replaces the way in use if its share is larger by this factor


def command(
    device: Annotated[
        list[str] | None,
        typer.Option(help="A device's id; repeatable. \\[default: the processors with kernels]"),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.001, help="Seconds of each kernel in a round.")
    ] = 0.05,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which the ways take turns.")] = 3,
    json: JsonOption = None,
) -> None:
    """Measure all ways to divide matrix products on one core, and keep the best for this user."""
    from hetpipe.bench.machine import describe
    from hetpipe.cli.kernels.bench import processors

    output = Output(json)
    output.text(describe())
    outcome = {info.id: _tune(output, info, seconds, rounds) for info in processors(device or [])}
    output.finish({"tunings": outcome})


def _tune(output: Output, info: DeviceInfo, seconds: float, rounds: int) -> dict[str, Any]:
    """Measure the ways and keep the best. Return their shares, and the ways before and after."""
    from statistics import median

    from hetpipe.errors import BackendError
    from hetpipe.report.tables import Table
    from hetpipe.sdk.host.registry import get_backend

    runner = get_backend(info.backend).kernel_runner()
    ways = runner.tunings(info.id) if runner is not None else {}
    if runner is None or not ways:
        raise BackendError(f"{info.id} has no kernels to tune; name another device: --device ID")
    shares: dict[str, list[float]] = {name: [] for name in ways}
    with progress_bar() as progress:
        for number in range(rounds):
            for at, (name, variables) in enumerate(ways.items()):
                progress(f"tuning {info.id}", number * len(ways) + at, rounds * len(ways))
                shares[name].append(_share(info, variables, seconds))
    medians = {name: median(values) for name, values in shares.items()}
    first, best = next(iter(ways)), max(medians, key=medians.__getitem__)
    chosen = best if medians[best] > GAIN * medians[first] else first
    if chosen != first:
        runner.keep_tuning(info.id, chosen)
    columns = ("way", "of the ceiling", "lowest", "highest", "")
    table = Table(f"Products on {info.id}, one core (measured)", columns, columns[1:4])
    for name, values in shares.items():
        note = "in use" if name == first else ""
        note = "kept from now on" if name == chosen != first else note
        table.add_row(
            name, f"{medians[name]:.3f}", f"{min(values):.3f}", f"{max(values):.3f}", note
        )
    output.console.print(table)
    return {"shares": shares, "before": first, "chosen": chosen}


def _share(info: DeviceInfo, variables: Mapping[str, str], seconds: float) -> float:
    """Return the geometric mean of the products' shares of the ceiling, from a new process."""
    from statistics import geometric_mean

    from hetpipe.bench.products import run_pinned

    rates = run_pinned(
        "hetpipe.bench.kernelrates", info, info.id, "tuning", seconds, 1, limit_s=LIMIT_S,
        variables=variables,
    )  # fmt: skip
    return geometric_mean(rate["share_of_ceiling"] for rate in rates)
