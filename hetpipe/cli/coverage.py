"""`hetpipe coverage MODEL DEVICE`: lists the operators that a device lacks, by share of time."""

from __future__ import annotations

from typing import Annotated

import typer

from hetpipe.cli.options import JsonOption, MiniBatchOption, ModelArgument
from hetpipe.cli.output import Output
from hetpipe.report.progress import progress_bar


def command(
    model: ModelArgument,
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="A device's id.")],
    mini_batch: MiniBatchOption = None,
    json: JsonOption = None,
) -> None:
    """List the operators of a model that a device lacks, the largest share of time first."""
    from hetpipe.report.tables import Table
    from hetpipe.study.lacking import JUDGE, coverage
    from hetpipe.words import format_nbytes
    from hetpipe.zoo.load import check_name

    output = Output(json)
    check_name(model)
    with progress_bar("capturing"):
        answer = coverage(model, device, mini_batch)
    columns = ["operator", "calls", "share of the time", "layers", "reason"]
    table = Table(f"Operators of {answer.model} that {answer.device} lacks", columns, columns[1:3])
    for each in answer.lacking:
        shown = ", ".join(each.layers[:3]) + (", ..." if len(each.layers) > 3 else "")
        table.add_row(
            each.operator, str(each.calls), f"{100 * each.share:.1f} %", shown, each.reason
        )
    if answer.lacking:
        output.console.print(table)
    if answer.lent:
        columns = ["operator", "calls", "bytes that cross", "measured ms", "reason"]
        table = Table(f"{answer.companion} runs for {answer.device}", columns, columns[1:4])
        for cost in answer.lent:
            milliseconds = f"{1e3 * cost.measured_s:.2f}"
            nbytes = format_nbytes(cost.nbytes)
            table.add_row(cost.operator, str(cost.calls), nbytes, milliseconds, cost.reason)
        output.console.print(table)
    elif answer.lacking:
        output.text("the backend's author may let another device run these operators: see `lends`")
    output.text(
        f"{device} has operators for {100 * answer.covered:.1f} % of the time of {answer.calls} "
        f"calls (modelled, as on {JUDGE})"
    )
    output.finish(answer.to_json())
