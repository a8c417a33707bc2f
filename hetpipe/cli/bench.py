"""`hetpipe bench`: compares the rate of all devices together with the rates of single devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpipe.cli import complete
from hetpipe.cli.options import (
    ClusterOptions,
    JsonOption,
    MicrobatchesOption,
    MiniBatchOption,
    ScheduleOption,
    SeedOption,
    check_picture,
    check_synchronous,
    make_cluster,
)
from hetpipe.cli.output import Output
from hetpipe.errors import ClusterError
from hetpipe.report.progress import progress_bar

if TYPE_CHECKING:
    from hetpipe.bench.outcome import Outcome, Setting
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.cluster.topology import Link

SHORT = ("digits", "gpt")
FULL = ("digits", "gpt", "lstm")
REHEARSED = "pytorch:cpu:0"
LINK = "1 Gb/s, 1 ms"
SHORT_ROUNDS, FULL_ROUNDS = 3, 4


def command(
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            metavar="MODEL",
            autocompletion=complete.model,
            help="Zoo name or package.module:factory; may be repeated. "
            "\\[default: digits, gpt; with --full also lstm]",
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="The long form, with more rows and torch's own pipeline."),
    ] = False,
    matmul: Annotated[
        bool | None,
        typer.Option(help="First compare the processors' matrix products with torch's."),
    ] = None,
    rehearse: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Add a table with two workers of this device, one at half speed; '' for none. "
            f"\\[default with --full: {REHEARSED}]",
        ),
    ] = None,
    twice: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Add rows with two workers of this device; '' for none. "
            "\\[default with --full: the first device]",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="LINK",
            help="Add rows with this emulated link between devices; '' for none. "
            f"\\[default with --full: {LINK}]",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            min=1,
            help="Measurements of each row. "
            f"\\[default: {SHORT_ROUNDS}, with --full {FULL_ROUNDS}]",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            help="Timed steps per measurement. \\[default: about a second, at most 4 steps]",
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture", metavar="FILE", help="Draw measured and predicted steps: .png, .svg, .pdf."
        ),
    ] = None,
    *,
    where: ClusterOptions,
    microbatches: MicrobatchesOption = None,
    mini_batch: MiniBatchOption = None,
    schedule: ScheduleOption = "auto",
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Measure workloads on each device alone, and on all devices together.

    The short form takes some minutes. The long form has more workloads and rows. Unless you name a
    cluster, backends, devices or speeds, it also has rows with two workers of one device: at equal
    speeds, and with one worker at half speed (emulated).
    """
    from hetpipe.cluster.units import parse_link
    from hetpipe.zoo.load import check_name

    output = Output(json)
    models = workload or (FULL if full else SHORT)
    for model in models:
        check_name(model)
    check_synchronous(schedule)
    check_picture(picture)
    link = LINK if link is None and full else link
    slow = parse_link(link) if link else None
    here = where.make()
    if here.described:
        raise ClusterError(
            f"bench measures, but {', '.join(m.id for m in here.described)} are boards, whose "
            "times are modelled; use `hetpipe train` or `hetpipe compare`"
        )
    if full and not any(astuple(where)):
        own = "" if here.connections is None else f"{here.connections.own.name}/"
        rehearse = f"{own}{REHEARSED}" if rehearse is None else rehearse
        twice = here.ids[0] if twice is None else twice
    common = {
        "mini_batch": mini_batch, "microbatches": microbatches, "schedule": schedule,
        "rounds": rounds or (FULL_ROUNDS if full else SHORT_ROUNDS), "steps": steps, "seed": seed,
        "peer": full,
    }  # fmt: skip
    from hetpipe.bench.bench import run
    from hetpipe.bench.machine import describe, machine, versions
    from hetpipe.bench.show import closing, outcome_lines, outcome_table, summary_table
    from hetpipe.report.picture import draw_workloads

    settings = _settings(here, models, twice or None, slow, rehearse or "", common)
    _check_models(models, microbatches, mini_batch)
    hosts = [] if here.connections is None else here.connections.facts
    output.text("\n".join(map(str, hosts)) or describe())
    products = _matmul(output) if (full and matmul is None) or matmul else []
    outcomes: list[Outcome] = []
    for setting in settings:
        with progress_bar() as progress:
            outcomes.append(run(setting, progress))
        output.console.print(outcome_table(outcomes[-1]))
        output.text("\n".join(outcome_lines(outcomes[-1])))
    output.console.print(summary_table(outcomes))
    output.text("\n".join(closing(outcomes)))
    if picture is not None:
        draw_workloads(picture, [outcome.timelines for outcome in outcomes], "One mini-batch")
        output.text(f"timelines drawn in {picture}")
    output.finish(
        {
            "machine": machine(),
            "versions": versions(),
            **({"hosts": [asdict(facts) for facts in hosts]} if hosts else {}),
            "seed": seed,
            "matmul": products,
            "workloads": [outcome.to_json() for outcome in outcomes],
        }
    )


def _settings(
    here: Cluster,
    models: Sequence[str],
    twice: str | None,
    link: Link | None,
    rehearse: str,
    common: dict[str, Any],
) -> list[Setting]:
    """Return a setting for each model, and one for two unequal workers of device `rehearse`."""
    from hetpipe.bench.outcome import Setting

    if twice is not None:
        here.member(twice)
    where = f"on {', '.join(here.ids)}"
    settings = [
        Setting(f"{model} {where}", model, here, twice=twice, link=link, **common)
        for model in models
    ]
    if rehearse:
        uneven = make_cluster(None, f"{rehearse},{rehearse}", None, [f"{rehearse}#1=0.5"])
        name = f"{models[0]} on two workers, one at half speed"
        settings.append(Setting(name, models[0], uneven, **common))
    return settings


def _check_models(models: Sequence[str], count: int | None, mini_batch: int | None) -> None:
    """Load all workloads, so that a wrong name raises an error before minutes of measuring."""
    from hetpipe.pipeline.fit import check_count
    from hetpipe.zoo.load import load_workload

    for model in models:
        workload = load_workload(model)
        if count is not None:
            check_count(count, mini_batch or workload.mini_batch)


def _matmul(output: Output) -> list[dict[str, Any]]:
    from hetpipe.bench.products import products
    from hetpipe.bench.show import product_table

    with progress_bar("matrix products"):
        figures = products()
    if figures:
        output.console.print(product_table(figures))
    return figures
