"""`hetpipe conform BACKEND`: runs the conformance suite on the backend's devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpipe.cli import complete
from hetpipe.cli.meet import Place, hosts_of_command, on_each_host, places
from hetpipe.cli.options import JsonOption
from hetpipe.cli.output import Output
from hetpipe.report.progress import progress_bar
from hetpipe.words import choices

if TYPE_CHECKING:
    from hetpipe.conformance.check import Level
    from hetpipe.conformance.run import Result


class LevelName(str, Enum):
    """The levels of the suite; each level includes the levels before it."""

    core = "core"
    training = "training"
    full = "full"


def command(
    backend: Annotated[
        str, typer.Argument(help="The name of a backend.", autocompletion=complete.backend)
    ],
    device: Annotated[
        str | None, typer.Option(help="The id of one device. \\[default: the backend's devices]")
    ] = None,
    level: Annotated[
        LevelName,
        typer.Option(
            help="core: memory, events, errors; training: also operators and trainings; "
            "full: everything."
        ),
    ] = LevelName.training,
    group: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this group of checks, such as operators; repeatable. \\[default: all]"
        ),
    ] = None,
    junit: Annotated[
        Path | None,
        typer.Option(help="Write JUnit XML to this file, or one file per device to this folder."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Test a backend against the contract of backends. Exit 1 if a device breaks a rule."""
    chosen = _places(Output(json), backend, device)
    conform(chosen, level, group or (), junit, json, several=device is None)


def conform(
    chosen: Sequence[Place],
    level: LevelName,
    groups: Sequence[str],
    junit: Path | None,
    json: str | None,
    several: bool,
) -> None:
    """Test these devices, print the results and write `junit` and `json`.

    With `several`, a `junit` without a suffix is a folder, and each device gets a file in it.
    Raises `HetpipeError` if a device breaks a rule, or for one file and more devices.
    """
    from hetpipe.conformance.coverage import matrix, next_steps, refused_operators, write_junit
    from hetpipe.errors import HetpipeError

    if junit is not None and junit.suffix and len(chosen) > 1:
        raise HetpipeError(
            f"--junit {junit} is 1 file for {len(chosen)} devices: name a folder without a suffix, "
            "or choose one device with --device"
        )
    output = Output(json)
    reports: dict[str, Any] = {}
    broken = []
    for place in chosen:
        results = _run(output, place, level, groups)
        steps = next_steps(results, level.value)
        _conclude(output, place.id, results, steps)
        if junit is not None:
            folder = (several or len(chosen) > 1) and junit.suffix == ""
            name = place.id.replace("/", "-").replace(":", "-")
            write_junit(junit / f"{name}.xml" if folder else junit, place.id, results)
        reports[place.id] = {
            "results": [asdict(result) for result in results],
            "families": [asdict(row) for row in matrix(results)],
            "refused": dict(refused_operators(results)),
            "next": steps,
        }
        if any(result.failed for result in results):
            broken.append(place.id)
    output.finish({"level": level.value, "devices": reports})
    if broken:
        raise HetpipeError(f"these devices break rules of the contract: {', '.join(broken)}")


def _places(output: Output, backend: str, device: str | None) -> list[Place]:
    """Return the backend's devices, or the named one, and print why a host has none."""
    from hetpipe.errors import BackendError
    from hetpipe.sdk.host.registry import discover_devices

    surveys = on_each_host(discover_devices, [backend])
    why = {host: failures[backend] for host, (_, failures) in surveys.items() if failures}
    if len(why) == len(surveys):
        raise BackendError(
            "; ".join(f"{host and f'host {host}: '}{each}" for host, each in why.items())
        )
    for host, each in why.items():
        output.text(f"host {host}: {each}")
    found = {host: infos for host, (infos, _) in surveys.items()}
    chosen = places(found, [] if device is None else [device])
    if not chosen:
        raise BackendError(f"no device of {backend}; {choices(None, [])}")
    return chosen


def _results(place: Place, level: Level, groups: Sequence[str]) -> Iterator[Result]:
    from hetpipe.conformance.run import LIMIT_S, run_suite

    if (hosts := hosts_of_command()) is None:
        return run_suite(place.info, level, groups=groups)
    return hosts.iterate(place.host, run_suite, place.info, level, LIMIT_S, tuple(groups))


def _run(output: Output, place: Place, level: LevelName, groups: Sequence[str]) -> list[Result]:
    """Run the suite on a device, and print each failure at once."""
    from rich.markup import escape

    from hetpipe.conformance.check import Level
    from hetpipe.conformance.run import checks_of

    asked = Level.named(level.value)
    total = len(checks_of(asked, groups))
    results: list[Result] = []
    with progress_bar() as progress:
        progress(f"checking {place.id}", 0, total)
        for result in _results(place, asked, groups):
            results.append(result)
            progress(f"checking {place.id}", len(results), total)
            if result.failed:
                text = escape(result.text.replace("\n", "\n  "))
                output.console.print(
                    f"[red]{result.outcome:>8}[/]  [bold]{escape(result.name)}[/]: {text}",
                    highlight=False, soft_wrap=True,
                )  # fmt: skip
    return results


def _conclude(output: Output, device: str, results: Sequence[Result], steps: Sequence[str]) -> None:
    from hetpipe.conformance.coverage import matrix, refused_operators
    from hetpipe.report.tables import Table

    rows = matrix(results)
    if rows:
        columns = ("operators", "passed", "failed", "refused")
        table = Table(f"Coverage of {device}", columns, columns[1:])
        for row in rows:
            table.add_row(row.name, str(row.passed), str(row.failed), str(row.refused))
        output.console.print(table)
    refused = refused_operators(results)
    if refused:
        shown = ", ".join(f"{name} ({count})" for name, count in refused[:20])
        output.text(f"refused operators (number of checks that need them): {shown}")
    by_outcome = {
        name: sum(result.outcome == name for result in results)
        for name in ("passed", "failed", "crashed", "skipped")
    }
    counts = ", ".join(f"{count} {name}" for name, count in by_outcome.items() if count)
    seconds = sum(result.seconds for result in results)
    output.text(f"{device}: {counts}, in {seconds:.0f} s")
    for step in steps:
        output.text(step)
