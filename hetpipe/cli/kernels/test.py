"""`hetpipe kernels test`: tests a user's kernel, or the operators of backends with kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpipe.cli.meet import Place, hosts_of_command, on_each_host, places
from hetpipe.cli.options import JsonOption
from hetpipe.cli.output import Output
from hetpipe.report.progress import progress_bar
from hetpipe.words import words

if TYPE_CHECKING:
    from hetpipe.workbench.trial import Outcome, Trial

GROUPS = ("operators", "lengths", "strides", "dtypes", "values")  # of the conformance suite


def command(
    source: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The file of the kernel, such as my.cl.")
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option(
            help="The kernel's specification, TOML.", show_default="the same name with .toml"
        ),
    ] = None,
    function: Annotated[
        str, typer.Option(help="The kernel's name, if the file has several.", show_default=False)
    ] = "",
    device: Annotated[
        list[str] | None,
        typer.Option(help="A device's id; repeatable. \\[default: all that run such files]"),
    ] = None,
    case: Annotated[
        list[int] | None, typer.Option(help="A case's number, from 0; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the random inputs.")] = 0,
    init: Annotated[
        bool, typer.Option("--init", help="Write a draft of the specification, and test nothing.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Test a kernel of your own by its specification: values, races, bounds, uninitialised reads.

    Without a file, test the operators of backends with kernels against torch in float64. Exit 1 if
    a kernel has a fault.
    """
    from hetpipe.errors import HetpipeError

    if source is None:
        if init:
            raise HetpipeError("--init drafts for a kernel: hetpipe kernels test FILE --init")
        return _operators(device or [], json)
    if init:
        return _draft(source, spec or source.with_suffix(".toml"), function, json)
    from hetpipe.workbench.trial import check_sizes, trial_of

    output = Output(json)
    trial = trial_of(source, spec or source.with_suffix(".toml"), function, seed)
    check_sizes(trial)
    chosen = _places(trial, device or ())
    results: list[Outcome] = []
    shown: set[tuple[object, ...]] = set()
    with progress_bar(f"testing {trial.function}"):
        for outcome in _outcomes(trial, chosen, case or ()):
            results.append(outcome)
            _show_flaws(output, trial, outcome, shown)
    _summary(output, trial, results)
    _show_notes(output, results)
    output.finish({"kernel": trial.function, "outcomes": [_plain(each, trial) for each in results]})
    at_fault = list(dict.fromkeys(flaw.kind for each in results for flaw in each.flaws))
    if at_fault:
        raise HetpipeError(
            f"kernel {trial.function} of {source} is at fault: {', '.join(at_fault)}"
        )
    if all(each.skipped for each in results):
        raise HetpipeError(
            f"kernel {trial.function} of {source} has run on no device; the reasons are above"
        )
    return None


def _places(trial: Trial, named: Sequence[str]) -> list[Place]:
    """Return the devices that run the kernel's file, or the named ones.

    Each host needs the same files at the same paths. Raises `BackendError`.
    """
    from hetpipe.errors import BackendError
    from hetpipe.workbench.runners import devices_with_kernels
    from hetpipe.workbench.trial import digest

    suffix = trial.source.suffix
    chosen = places(on_each_host(devices_with_kernels, suffix), named, f" runs {suffix} files")
    digests, own = on_each_host(digest, trial), digest(trial)
    if unlike := [host for host, each in digests.items() if each != own]:
        raise BackendError(
            f"{trial.source} and its specification differ on {words(unlike)}: copy them there"
        )
    return chosen


def _outcomes(trial: Trial, chosen: Sequence[Place], cases: Sequence[int]) -> Iterator[Outcome]:
    """Yield the outcomes, host by host. Their device ids name the host."""
    from hetpipe.workbench.trial import outcomes

    hosts = hosts_of_command()
    if hosts is None:
        yield from outcomes(trial, [place.id for place in chosen], cases)
        return
    for host in dict.fromkeys(place.host for place in chosen):
        ids = [place.info.id for place in chosen if place.host == host]
        for outcome in hosts.iterate(host, outcomes, trial, ids, cases):
            yield replace(outcome, device_id=f"{host}/{outcome.device_id}")


def _draft(source: Path, spec: Path, function: str, json: str | None) -> None:
    """Write a draft of a specification, and say what to do with it."""
    from hetpipe.sdk.formats.kernelspec import UNFILLED
    from hetpipe.workbench.missing import write_draft

    output = Output(json)
    name = write_draft(source, spec, function)
    output.text(
        f"wrote {spec}, a draft for kernel {name}: replace each {UNFILLED}, check the guesses, "
        f"and then run hetpipe kernels test {source} --spec {spec}"
    )
    output.finish({"kernel": name, "specification": str(spec)})


def _operators(device_ids: list[str], json: str | None) -> None:
    """Check the operators of these devices; without ids, of all devices with kernels."""
    from hetpipe.cli.conform import LevelName, conform
    from hetpipe.workbench.runners import devices_with_kernels

    chosen = places(on_each_host(devices_with_kernels), device_ids, " with kernels")
    conform(chosen, LevelName.training, GROUPS, None, json, several=True)


def _show_flaws(
    output: Output, trial: Trial, outcome: Outcome, shown: set[tuple[object, ...]]
) -> None:
    """Print each flaw of a case, in one line if an earlier case or device had the same flaw."""
    where = f"{outcome.device_id}, case {outcome.case}"
    for flaw, text in zip(outcome.flaws, trial.texts(outcome), strict=True):
        if (flaw.kind, flaw.line) in shown:
            output.text(f"{flaw.kind}  also on {where}: {flaw.text}")
        else:
            shown.add((flaw.kind, flaw.line))
            output.text(text)


def _summary(output: Output, trial: Trial, results: list[Outcome]) -> None:
    from hetpipe.report.tables import Table

    columns = (
        "device", "cases", "at fault", "skipped", "largest error, ulp", "of the allowed error"
    )  # fmt: skip
    table = Table(f"Kernel {trial.function}", columns, columns[1:])
    for device_id in dict.fromkeys(each.device_id for each in results):
        mine = [each for each in results if each.device_id == device_id]
        faults = sum(bool(each.flaws) for each in mine)
        skipped = sum(bool(each.skipped) for each in mine)
        ulp = max((ulp for each in mine for ulp in each.ulp.values()), default=None)
        share = max((share for each in mine for share in each.share.values()), default=None)
        table.add_row(
            device_id, str(len(mine)), str(faults), str(skipped),
            "" if ulp is None else f"{ulp:.3g}", "" if share is None else f"{share:.2g}",
        )  # fmt: skip
    output.console.print(table)


MANY_ULP = 1000.0  # if a case passes with an error of this size, the table needs a note


def _show_notes(output: Output, results: list[Outcome]) -> None:
    """Print each reason to skip a device and each warning once; explain a large error in ulp."""
    lines: dict[str, None] = {}
    for each in results:
        if each.skipped:
            lines[f"skipped  {each.device_id}: {each.skipped}"] = None
        for note in each.notes:
            lines[f"warning  case {each.case}: {note}"] = None
    for line in lines:
        output.text(line)
    passed = [each for each in results if not each.flaws]
    large = [(ulp, name) for each in passed for name, ulp in each.ulp.items() if ulp >= MANY_ULP]
    if large:
        ulp, name = max(large)
        output.text(
            f"an element of {name} near 0 is off by {ulp:.3g} units of its last place. This is "
            "no fault: the limit is relative to the largest element"
        )


def _plain(outcome: Outcome, trial: Trial) -> dict[str, Any]:
    return {
        "device": outcome.device_id,
        "case": outcome.case,
        "sizes": dict(outcome.sizes),
        "ulp": dict(outcome.ulp),
        "share": dict(outcome.share),
        "notes": list(outcome.notes),
        "skipped": outcome.skipped,
        "flaws": [asdict(flaw) for flaw in outcome.flaws],
        "again": trial.again(outcome.device_id, outcome.case),
    }
