"""`hetpipe capacity`: finds the largest model or micro-batch that a cluster holds."""

from __future__ import annotations

from typing import Annotated

import typer

from hetpipe.cli.options import JsonOption, MicrobatchesOption
from hetpipe.cli.output import Output
from hetpipe.cli.study import ClusterNameOption, GlobalBatchOption, SubjectOptions, cluster_from
from hetpipe.errors import PlanError
from hetpipe.report.progress import progress_bar


def command(
    about: SubjectOptions,
    cluster: ClusterNameOption = None,
    repeat: Annotated[
        str | None,
        typer.Option(
            "--repeat",
            metavar="FIRST:LAST",
            help="Repeat these layers as often as fits. \\[default: enlarge the micro-batch]",
        ),
    ] = None,
    global_batch: GlobalBatchOption = None,
    microbatches: MicrobatchesOption = None,
    json: JsonOption = None,
) -> None:
    """Find the largest model or micro-batch that 1, 2, 4, ... and all devices of a cluster hold."""
    from hetpipe.report.tables import Table
    from hetpipe.study.largest import MOST, capacity

    output = Output(json)
    block = None if repeat is None else parse_block(repeat)
    members = cluster_from(cluster)
    subject = about.subject(global_batch)
    with progress_bar("planning"):
        answer = capacity(subject, members, microbatches, block)
    columns = ["method", *(f"{count} devices" for count in answer.devices)]
    table = Table(f"{answer.subject}: {answer.counted}, at most", columns, columns[1:])
    for method, counts in answer.largest.items():
        table.add_row(str(method), *(f"{n} or more" if n == MOST else str(n) for n in counts))
    output.console.print(table)
    output.finish(answer.to_json())


def parse_block(text: str) -> tuple[int, int]:
    """Parse a block of layers: `"2:9"` -> `(2, 9)`. Raises `PlanError`."""
    first, colon, last = text.partition(":")
    numbers = first.strip(), last.strip()
    if not colon or not all(map(str.isdecimal, numbers)) or int(first) > int(last):
        raise PlanError(f"--repeat {text!r}: write the first and last layer, for instance 2:9")
    return int(first), int(last)
