"""`hetpipe plan MODEL`: the stages, their devices, and the predicted time of a step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetpipe.cli.check import check_devices, read_options
from hetpipe.cli.options import (
    BackendsOption,
    ClusterOption,
    CutsOption,
    DevicesOption,
    JsonOption,
    MicrobatchesOption,
    MiniBatchOption,
    ModelArgument,
    ReplicasOption,
    ScheduleOption,
    SpeedOption,
    WeightsOption,
    make_cluster,
    split_names,
)
from hetpipe.cli.output import Output
from hetpipe.cli.progress import progress_bar
from hetpipe.errors import PlanError

if TYPE_CHECKING:
    from hetpipe.cost.table import CostTable
    from hetpipe.pipeline.options import PlanOptions
    from hetpipe.plan.plan import Plan


def command(
    model: ModelArgument,
    cluster: ClusterOption = None,
    devices: DevicesOption = None,
    backends: BackendsOption = None,
    emulate_speed: SpeedOption = None,
    microbatches: MicrobatchesOption = None,
    mini_batch: MiniBatchOption = None,
    schedule: ScheduleOption = "auto",
    weights: WeightsOption = "auto",
    cuts: CutsOption = None,
    replicas: ReplicasOption = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            "--costs",
            metavar="FILE",
            help="Plan by the costs of `profile --json`, without a device or a measurement.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Keep plan and costs for `train`."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Plan a model on the cluster: the layers of each device, and the predicted cost."""
    from hetpipe.plan.file import write_plan
    from hetpipe.zoo.load import check_name

    output = Output(json)
    asked = read_options(schedule, weights, cuts, replicas, microbatches, mini_batch)
    check_name(model)
    if costs is None:
        chosen = _measured(model, (cluster, devices, backends, emulate_speed), mini_batch, asked)
    else:
        options = {"--cluster": cluster, "--backends": backends, "--emulate-speed": emulate_speed}
        for option in (option for option, value in options.items() if value):
            raise PlanError(f"--costs {costs} say what devices there are: leave out {option}")
        chosen = _priced(model, costs, devices, mini_batch, asked)
    best, table = chosen
    output.text(str(best))
    if out is not None:
        write_plan(out, best, table)
        output.text(f"written to {out}")
    output.finish(best.to_json())


def _measured(
    model: str,
    where: tuple[Path | None, str | None, str | None, list[str] | None],
    mini_batch: int | None,
    asked: PlanOptions,
) -> tuple[Plan, CostTable]:
    """The plan of a pipeline on these devices, after profiling them."""
    members = make_cluster(*where)
    check_devices(asked, len(members.members))
    from hetpipe.bench.open import open_pipeline
    from hetpipe.zoo import load_workload

    options = asked.keywords | {"priced": True}
    with (
        progress_bar() as progress,
        open_pipeline(
            load_workload(model), members, mini_batch=mini_batch, progress=progress, **options
        ) as pipe,
    ):
        assert pipe.costs is not None  # it was asked for a price
        return pipe.plan, pipe.costs


def _priced(
    model: str, path: Path, devices: str | None, mini_batch: int | None, asked: PlanOptions
) -> tuple[Plan, CostTable]:
    """The plan from a table of costs alone."""
    from hetpipe.cli.priced import check_layers, plan_by
    from hetpipe.cost import read_costs

    table = read_costs(path)
    from hetpipe.pipeline.fit import check_policy
    from hetpipe.zoo.load import load_workload, optimizer_of

    workload = load_workload(model)
    samples = mini_batch or workload.mini_batch
    with progress_bar() as progress:
        progress("capturing", 0, 1)
        check_layers(table, workload, samples)
        progress("planning", 0, 1)
        chosen = plan_by(table, split_names(devices), samples, asked)
    check_policy(chosen, optimizer_of(workload))
    return chosen, table
