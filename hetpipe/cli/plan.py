"""`hetpipe plan`: chooses the stages and their devices, and predicts the time of a step.

Costs are measured on attached devices, or read from a file. With a published profile, a named
planner, recomputation, or boards without numerics, the command is a study (`hetpipe.study`).
"""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpipe.cli.options import (
    ClusterOptions,
    JsonOption,
    MicrobatchesOption,
    PipelineOptions,
    check_devices,
    read_options,
    split_names,
)
from hetpipe.cli.output import Output
from hetpipe.cli.study import (
    DrawingOptions,
    GlobalBatchOption,
    PlannerOption,
    RecomputeOption,
    SubjectOptions,
)
from hetpipe.errors import PlanError
from hetpipe.files import check_target
from hetpipe.report.progress import progress_bar
from hetpipe.words import choices, word

if TYPE_CHECKING:
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.cost.table import CostTable
    from hetpipe.pipeline.options import PlanOptions
    from hetpipe.plan.plan import Plan
    from hetpipe.study.subject import Subject
    from hetpipe.zoo.workload import Workload


def command(
    about: SubjectOptions,
    planner: PlannerOption = None,
    *,
    where: ClusterOptions,
    microbatches: MicrobatchesOption = None,
    mini_batch: GlobalBatchOption = None,
    pipeline: PipelineOptions,
    costs: Annotated[
        Path | None,
        typer.Option(
            "--costs",
            metavar="FILE",
            help="Plan by costs that `profile --json` wrote, without devices or measurements.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write plan and costs, for `train --plan`."),
    ] = None,
    recompute: RecomputeOption = False,
    drawing: DrawingOptions,
    json: JsonOption = None,
) -> None:
    """Plan a model on the cluster: the layers of each device, and the predicted cost."""
    from hetpipe.plan.plan_file import write_plan
    from hetpipe.plan.simulation import simulate
    from hetpipe.study.accuracy import error_note

    output = Output(json)
    drawing.check()
    check_target(out)
    asked = read_options(pipeline, microbatches, mini_batch)
    model, note = about.model, ""
    members = replace(where, devices=None, backends=None).make() if where.cluster else None
    if (
        about.profile
        or planner
        or recompute
        or (members is not None and members.boards_without_numerics)
    ):
        if costs is not None:
            raise PlanError(
                f"--costs {costs} does not work with --profile, --planner, "
                "--recompute or boards: leave out --costs"
            )
        members = members or where.make()
        subject = about.subject(mini_batch)
        chosen = _studied(subject, members, planner or "auto", asked, recompute)
        note = error_note(subject, [members])
    elif model is None:
        raise PlanError("no model: give MODEL, or --profile FILE")
    elif costs is None:
        chosen = _measured(model, where, mini_batch, asked, about.precision)
    else:
        options = {
            "--cluster": where.cluster, "--backends": where.backends,
            "--emulate-speed": where.emulate_speed, "--precision": about.precision,
        }  # fmt: skip
        for option in (option for option, value in options.items() if value):
            raise PlanError(f"--costs {costs} has the costs of its devices: leave out {option}")
        chosen = _priced(model, costs, where.devices, mini_batch, asked)
    best, table = chosen
    output.text(str(best))
    if note:
        output.text(note)
    if out is not None:
        write_plan(out, best, table, model or "")
        output.text(f"written to {out}")
    if any(astuple(drawing)):
        from hetpipe.explain.tracing import details_of

        simulation = simulate(best, table)
        title, details = f"{best.model}, {best.origin}", details_of(best, simulation)
        drawing.draw(output, [simulation.timeline], title, details)
    output.finish(summary(best))


def summary(plan: Plan) -> dict[str, Any]:
    """Return the plan's JSON, with the first and last layer of each stage and more figures."""
    data = plan.to_json()
    for stage in data["stages"]:
        stage["layers"] = [stage["lo"], stage["hi"] - 1]
    return data | {
        "planner": plan.origin,
        "predicted_step_s": plan.step_s,
        "peak_nbytes": max(stage.memory_nbytes for stage in plan.stages),
    }


def _studied(
    subject: Subject, members: Cluster, planner: str, asked: PlanOptions, recompute: bool
) -> tuple[Plan, CostTable]:
    """Return the plan of a planner, and its costs. Raises `PlanError` for cuts or replicas."""
    from hetpipe.plan.proposal import PlannerOptions
    from hetpipe.study.subject import plan

    if asked.cuts or asked.replicas:
        raise PlanError(
            f"the planner {planner} chooses cuts and replicas: leave out --cuts and --replicas"
        )
    options = PlannerOptions(
        subject.mini_batch,
        () if asked.microbatches is None else (asked.microbatches,),
        () if asked.schedule == "auto" else (asked.schedule,),
        asked.weights,
        recompute=recompute,
    )
    with progress_bar("planning"):
        return plan(subject, members, options, planner)


def _measured(
    model: str,
    where: ClusterOptions,
    mini_batch: int | None,
    asked: PlanOptions,
    precision: str | None,
) -> tuple[Plan, CostTable]:
    """Return the plan and the costs of a pipeline that profiles its devices."""
    members = where.make()
    check_devices(asked, len(members.members))
    from hetpipe.train.training import open_pipeline
    from hetpipe.zoo.load import load_workload

    options = asked.keywords | {"priced": True, "precision": precision}
    with (
        progress_bar() as progress,
        open_pipeline(
            load_workload(model), members, mini_batch=mini_batch, progress=progress, **options
        ) as pipe,
    ):
        assert pipe.costs is not None  # `priced` asks for costs
        return pipe.plan, pipe.costs


def _priced(
    model: str, path: Path, devices: str | None, mini_batch: int | None, asked: PlanOptions
) -> tuple[Plan, CostTable]:
    """Return a plan by the costs in a file, and these costs. No device is opened."""
    from hetpipe.cost.importers import read_costs
    from hetpipe.pipeline.fit import check_policy
    from hetpipe.zoo.load import load_workload, optimizer_of

    table = read_costs(path)
    workload = load_workload(model)
    samples = mini_batch or workload.mini_batch
    with progress_bar("capturing") as progress:
        check_layers(table, workload, samples)
        progress("planning", 0, 1)
        chosen = plan_by(table, split_names(devices), samples, asked)
    check_policy(chosen, optimizer_of(workload))
    return chosen, table


def plan_by(
    costs: CostTable, devices: list[str] | None, mini_batch: int, asked: PlanOptions
) -> Plan:
    """Return the plan with the shortest predicted step on `devices` of the table (default: all).

    Its micro-batches have the size of the table. Raises `PlanError`.
    """
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.pipeline.planning import Planning

    members = devices or list(costs.devices)
    for member in members:
        if member not in costs.devices:
            raise PlanError(f"no costs for {word(member)}; {choices(member, costs.devices)}")
    check_devices(asked, len(members))
    asked = replace(asked, microbatches=microbatches_of(costs, mini_batch, asked.microbatches))
    layers = [layer.name for layer in costs.layers]
    cluster = Cluster.with_ids(members)
    planning = Planning(
        costs.model, layers, cluster, mini_batch, lambda sizes: {costs.samples: costs}
    )
    return planning.choose(asked)[0]


def microbatches_of(costs: CostTable, mini_batch: int, asked: int | None) -> int:
    """Return a number of micro-batches of the table's size. Raises `PlanError`."""
    count = -(-mini_batch // costs.samples)
    samples = -(-mini_batch // (asked or count))
    if samples != costs.samples:
        raise PlanError(
            f"the costs are for micro-batches of {costs.samples} samples, but each of the "
            f"{asked or count} micro-batches of a mini-batch of {mini_batch} has {samples}: "
            f"profile with --microbatches {asked or count}, or choose another number"
        )
    return count if asked is None else asked


def check_layers(costs: CostTable, workload: Workload, mini_batch: int) -> None:
    """Raise `PlanError` if the table has the costs of another model."""
    from hetpipe.capture.captured import Captured

    example = next(workload.batches(mini_batch, 0))
    captured = Captured(workload.model, workload.loss_fn, example, samples=costs.samples)
    layers = list(captured.layer_names)
    names = [layer.name for layer in costs.layers]
    if layers != names:
        raise PlanError(
            f"the costs are of {costs.model} with {len(names)} layers, {workload.name} has "
            f"{len(layers)} layers" + _difference(names, layers) + ": profile this model"
        )


def _difference(names: list[str], layers: list[str]) -> str:
    pairs = zip(names, layers, strict=False)
    for number, (name, layer) in enumerate(pairs):
        if name != layer:
            return f", and layer {number} is {name} there, {layer} here"
    return ""
