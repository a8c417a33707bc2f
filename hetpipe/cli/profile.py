"""`hetpipe profile MODEL`: measures every layer on every device, and every link."""

from __future__ import annotations

from typing import Annotated

import typer

from hetpipe.cli.options import (
    ClusterOptions,
    JsonOption,
    MicrobatchesOption,
    MiniBatchOption,
    ModelArgument,
)
from hetpipe.cli.output import Output
from hetpipe.report.progress import progress_bar

MOST_MICROBATCHES = 64  # `--again` renews stored costs up to this number of micro-batches


def command(
    model: ModelArgument,
    where: ClusterOptions,
    microbatches: MicrobatchesOption = 8,
    mini_batch: MiniBatchOption = None,
    again: Annotated[
        bool,
        typer.Option(
            "--again", help="Measure stored costs again, for all numbers of micro-batches."
        ),
    ] = False,
    json: JsonOption = None,
) -> None:
    """Measure every layer of a model on every device of the cluster, and every link."""
    from hetpipe.zoo.load import check_name, load_workload, optimizer_of

    output = Output(json)
    check_name(model)
    members = where.make()
    from hetpipe.capture.captured import Captured
    from hetpipe.crew.crew import Crew
    from hetpipe.profile.measure import profile
    from hetpipe.profile.stored import stored_costs
    from hetpipe.report.tables import cost_table, link_table

    workload = load_workload(model)
    rows = mini_batch or workload.mini_batch
    samples = -(-rows // (microbatches or 1))
    example = next(workload.batches(rows, 0))
    with progress_bar() as progress, Crew.start(members) as crew:
        progress("capturing", 0, 1)
        captured = Captured(workload.model, workload.loss_fn, example)
        optimizer = optimizer_of(workload)
        sizes = {samples}
        if again:
            others = {-(-rows // count) for count in range(1, min(rows, MOST_MICROBATCHES) + 1)}
            sizes |= stored_costs(captured, crew, optimizer, sorted(others)).keys()
        ordered = sorted(sizes, reverse=True)
        costs = profile(captured, crew, optimizer, ordered, progress, again=again)[samples]
    output.console.print(cost_table(costs))
    output.console.print(link_table(costs))
    output.finish(costs.to_json())
