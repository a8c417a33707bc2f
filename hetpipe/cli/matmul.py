"""`hetpipe matmul`: measures matrix products of this machine's processors and of torch."""

from __future__ import annotations

from typing import Annotated

import typer

from hetpipe.cli.options import JsonOption
from hetpipe.cli.output import Output
from hetpipe.report.progress import progress_bar


def command(
    devices: Annotated[
        list[str] | None,
        typer.Argument(metavar="DEVICE", help="Device ids. \\[default: all processors]"),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Compare matrix products on one core of each processor with the core's ceiling and torch."""
    from hetpipe.bench.machine import describe, machine
    from hetpipe.bench.products import products
    from hetpipe.bench.show import product_table

    output = Output(json)
    output.text(describe())
    with progress_bar("matrix products"):
        figures = products(devices)
    output.console.print(product_table(figures))
    output.finish({"machine": machine(), "matmul": figures})
