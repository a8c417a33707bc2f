"""`hetpipe kernels tune`: measures ways to divide a kernel's work, of hetpipe or of the user."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpipe.cli.options import JsonOption
from hetpipe.cli.output import Output
from hetpipe.report.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hetpipe.sdk.info import DeviceInfo

LIMIT_S = 600.0
GAIN = 1.02  # the best way replaces the way in use if its share is larger by this factor


def command(
    source: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="The file of a kernel of your own, such as my.cl."),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="With FILE: values of a macro, such as TILE=8,16; repeatable. \\[default: the "
            "specification's]",
        ),
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option(
            help="With FILE: the specification, TOML.", show_default="the same name with .toml"
        ),
    ] = None,
    function: Annotated[
        str | None, typer.Option(help="With FILE: the kernel's name, if it has several.")
    ] = None,
    case: Annotated[
        int | None, typer.Option(help="With FILE: the case to measure. \\[default: the largest]")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="With FILE: write the best values into \\[define].")
    ] = False,
    device: Annotated[
        list[str] | None,
        typer.Option(
            help="A device's id; repeatable. \\[default: the processors with kernels; with FILE, "
            "all devices that are not emulated]"
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.001, help="Seconds of each kernel in a round.")
    ] = 0.05,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which the ways take turns.")] = 3,
    json: JsonOption = None,
) -> None:
    """Measure all ways to divide matrix products on one core, and keep the best for this user.

    With a file, measure a kernel of your own with each combination of its macros' values.
    """
    from hetpipe.bench.machine import describe

    output = Output(json)
    if source is None:
        from hetpipe.cli.kernels.bench import processors

        _check_no_file(grid=grid, spec=spec, function=function, case=case, keep=keep)
        output.text(describe())
        outcome = {
            info.id: _tune(output, info, seconds, rounds) for info in processors(device or [])
        }
        return output.finish({"tunings": outcome})
    from hetpipe.cli.kernels.tune_own import Effort, tune_own
    from hetpipe.workbench.trial import devices_for, trial_of
    from hetpipe.workbench.tuning import with_grid

    trial = trial_of(source, spec or source.with_suffix(".toml"), function or "")
    trial = with_grid(trial, grid or ())
    named = devices_for(source, device) if device else []
    output.text(describe())
    return tune_own(output, trial, named, Effort(case, seconds, rounds), keep)


def _check_no_file(**options: object) -> None:
    """Raise `HetpipeError` for an option that needs the file of a kernel."""
    from hetpipe.errors import HetpipeError

    for name, value in options.items():
        if value:
            raise HetpipeError(
                f"--{name} is for a kernel of your own: hetpipe kernels tune FILE --{name} ..."
            )


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
    first, chosen = next(iter(ways)), chosen_way(shares)
    if chosen != first:
        runner.keep_tuning(info.id, chosen)
    columns = ("way", "of the ceiling", "lowest", "highest", "")
    table = Table(f"Products on {info.id}, one core (measured)", columns, columns[1:4])
    for name, values in shares.items():
        note = "in use" if name == first else ""
        note = "kept from now on" if name == chosen != first else note
        table.add_row(
            name, f"{median(values):.3f}", f"{min(values):.3f}", f"{max(values):.3f}", note
        )
    output.console.print(table)
    return {"shares": shares, "before": first, "chosen": chosen}


def chosen_way(shares: Mapping[str, Sequence[float]]) -> str:
    """Return the way with the largest median of its shares of the ceiling.

    If it gains too little (`GAIN`), or rounds of the two overlap, return the first way: it is in
    use.
    """
    from statistics import median

    first, best = next(iter(shares)), max(shares, key=lambda name: median(shares[name]))
    gains = median(shares[best]) > GAIN * median(shares[first])
    return best if gains and min(shares[best]) > max(shares[first]) else first


def _share(info: DeviceInfo, variables: Mapping[str, str], seconds: float) -> float:
    """Return the geometric mean of the products' shares of the ceiling, from a new process."""
    from statistics import geometric_mean

    from hetpipe.bench.products import run_pinned

    rates = run_pinned(
        "hetpipe.bench.kernelrates", info, info.id, "tuning", seconds, 1, limit_s=LIMIT_S,
        variables=variables,
    )  # fmt: skip
    return geometric_mean(rate["share_of_ceiling"] for rate in rates)
