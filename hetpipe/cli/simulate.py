"""`hetpipe simulate PLAN`: simulates a plan's step on a virtual clock, without the devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetpipe.cli import complete
from hetpipe.cli.options import JsonOption
from hetpipe.cli.output import Output
from hetpipe.cli.study import DrawingOptions, cluster_from
from hetpipe.errors import CostError, PlanError

if TYPE_CHECKING:
    from hetpipe.cost.table import CostTable
    from hetpipe.plan.plan import Plan
    from hetpipe.plan.simulation import Simulation
    from hetpipe.report.tables import Table


def command(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A file of `hetpipe plan --out FILE`.")
    ],
    costs: Annotated[
        Path | None,
        typer.Option("--costs", metavar="FILE", help="The costs, if the plan's file lacks them."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="FILE|NAME",
            help="Let messages share the links of this cluster.",
            autocompletion=complete.cluster,
        ),
    ] = None,
    *,
    drawing: DrawingOptions,
    json: JsonOption = None,
) -> None:
    """Simulate a plan: step time, bubble and peak memory of each worker, bytes on each link."""
    from hetpipe.explain.tracing import details_of
    from hetpipe.plan.plan_file import read_plan
    from hetpipe.plan.simulation import simulate

    output = Output(json)
    drawing.check()
    kept, table = read_plan(plan)
    if costs is not None:
        table = costs_of(kept, costs)
    if table is None:
        raise PlanError(
            f"{plan} has no costs: give --costs FILE, which `hetpipe profile --json FILE` writes"
        )
    simulation = simulate(kept, table, cluster_from(cluster) if cluster else None)
    output.text(str(kept))
    output.console.print(worker_table(simulation))
    for (source, target), nbytes in sorted(simulation.outcome.link_nbytes.items()):
        names = simulation.outcome.workers
        output.text(f"{names[source]} -> {names[target]}: {nbytes} bytes a step")
    details = details_of(simulation.plan, simulation)
    drawing.draw(output, [simulation.timeline], f"{kept.model}, {kept.schedule}", details)
    output.finish(simulation.to_json())


def costs_of(plan: Plan, path: Path) -> CostTable:
    """Read the costs of a plan's model, for micro-batches of the plan's size. Raises `CostError`
    for other costs."""
    from hetpipe.cost.importers import read_costs
    from hetpipe.plan.plan_file import check_fit
    from hetpipe.records import Source

    table, source = read_costs(path), Source("the costs", CostError, str(path))
    check_fit(plan, table, source)
    if table.samples != plan.share_samples:
        why = (
            f"is {table.samples}, and a device gets {plan.share_samples} samples of each "
            f"micro-batch: profile with --microbatches {plan.microbatches}"
        )
        raise source.fault(("samples",), why)
    return table


def worker_table(simulation: Simulation) -> Table:
    """Return a table with a row for each worker of the step."""
    from hetpipe.report.tables import Table
    from hetpipe.words import format_nbytes

    columns = ["worker", "busy", "bubble", "peak memory"]
    step = f"{1e3 * simulation.step_s:.2f} ms, {simulation.timeline.label}"
    if not simulation.plan.rule.flushes:
        step += ", in a full pipeline"
    table = Table(f"Step of {step}", columns, columns[1:])
    rows = zip(
        simulation.outcome.workers, simulation.outcome.bubble, simulation.outcome.peak_nbytes,
        strict=True,
    )  # fmt: skip
    for worker, bubble, peak_nbytes in rows:
        table.add_row(
            worker, f"{100 * (1 - bubble):.1f} %", f"{100 * bubble:.1f} %",
            format_nbytes(peak_nbytes),
        )  # fmt: skip
    return table
