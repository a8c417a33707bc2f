"""`hetpipe train MODEL`: trains and validates a model, and compares its losses with torch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpipe.cli.changes import ChangeOptions
from hetpipe.cli.options import (
    ChangedOption,
    ClusterOptions,
    JsonOption,
    MicrobatchesOption,
    MiniBatchOption,
    ModelArgument,
    PassLimitOption,
    PipelineOptions,
    SeedOption,
    check_devices,
    check_picture,
    check_plan_alone,
    read_options,
)
from hetpipe.cli.output import Output, logged
from hetpipe.cli.pace import Pace, pace_of
from hetpipe.cli.recipe import RecipeOptions
from hetpipe.errors import HetpipeError, NotFiniteError
from hetpipe.files import check_target
from hetpipe.report.progress import progress_bar

if TYPE_CHECKING:
    from hetpipe.diagnosis.record import Diagnosis
    from hetpipe.pipeline.options import UpdateOptions
    from hetpipe.pipeline.pipeline import Pipeline
    from hetpipe.plan.plan import Plan
    from hetpipe.report.progress import Progress
    from hetpipe.simulate.timeline import Timeline
    from hetpipe.train.training import Comparison, GradientError, Step
    from hetpipe.zoo.workload import Workload

LINES = 10  # number of losses that a run prints


def command(
    model: ModelArgument,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Mini-batches to train.")] = 100,
    epochs: Annotated[
        int | None,
        typer.Option("--epochs", min=1, help="Passes over the data; replaces --steps."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="A plan that `plan` wrote.")
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Also train in plain torch; compare losses and gradients.")
    ] = True,
    check_steps: Annotated[
        int, typer.Option("--check-steps", min=1, help="The number of first steps to compare.")
    ] = 3,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture", metavar="FILE", help="Draw the last step's timeline: .png, .svg or .pdf."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Write the last step's timeline as JSON, for Perfetto."
        ),
    ] = None,
    *,
    where: ClusterOptions,
    microbatches: MicrobatchesOption = None,
    mini_batch: MiniBatchOption = None,
    pipeline: PipelineOptions,
    recipe: RecipeOptions,
    changes: ChangeOptions,
    sync_batch_norm: Annotated[
        bool,
        typer.Option("--sync-batch-norm", help="Replicas share their batch norms' statistics."),
    ] = False,
    pass_limit: PassLimitOption = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", metavar="DIR", help="Write a checkpoint into this folder at the end."
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="DIR", help="Continue from a checkpoint."),
    ] = None,
    changed: ChangedOption = None,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Train a model as a pipeline on the cluster."""
    from hetpipe.checkpoint.checkpoint import check_folder
    from hetpipe.plan.plan_file import read_plan
    from hetpipe.zoo.load import check_name

    output = Output(json)
    asked = read_options(pipeline, microbatches, mini_batch, changes.rebalance)
    stored, costs = (None, None) if plan is None else read_plan(plan)
    if plan is not None and stored is not None:
        check_plan_alone(plan, stored, asked)
    check_name(model)
    check_picture(picture)
    check_target(trace)
    check_target(save and save / "manifest.json")
    check_folder(save)
    if changed and resume is None:
        raise HetpipeError(
            f"--changed {changed[0]} names a difference from a checkpoint, but no checkpoint "
            "is given: add --resume DIR"
        )
    members = where.make()
    check_devices(asked, len(members.members))

    from hetpipe.train.training import compare, compare_gradients, open_pipeline
    from hetpipe.zoo.load import load_workload

    workload, updates = recipe.change(load_workload(model)), recipe.updates()
    options = {
        **asked.keywords, **recipe.keywords, **changes.keywords, "plan": stored, "costs": costs,
        "sync_batch_norm": sync_batch_norm, "changed": changed or (), "pass_limit_s": pass_limit,
    }  # fmt: skip
    with (
        logged(output),
        progress_bar() as progress,
        open_pipeline(
            workload, members, mini_batch=mini_batch, seed=seed, progress=progress, resume=resume,
            **options,
        ) as pipe,
    ):  # fmt: skip
        output.text(str(pipe.plan))
        count = _count(workload, pipe.plan.mini_batch, steps, epochs)
        checked = min(count, check_steps) if check else 0
        checked, compares = _checked(workload, pipe, checked, recipe.why_not_compared, output)
        diagnosis: Diagnosis | None = None
        gradient: GradientError | None = None
        try:
            if compares:
                progress("gradients of unpartitioned torch", 0, 1)
                gradient = compare_gradients(workload, pipe, seed)
                progress("gradients of unpartitioned torch", 1, 1)
                if not gradient.is_right:
                    diagnosis = _diagnose(workload, pipe, seed, 0, output, progress)
            taken = _train(workload, pipe, count, seed, checked, updates, output, progress)
        except NotFiniteError as error:
            diagnosis = _diagnose(workload, pipe, seed, error.index, output, progress)
            output.finish({"model": workload.name, "seed": seed, "diagnosis": diagnosis.to_json()})
            raise HetpipeError(f"{error.fact}; the diagnosis is above") from None
        pace = pace_of(pipe, median(step.time_s for step in taken[len(taken) // 2 :]))
        comparison = compare(workload, pipe.plan, taken, seed, gradient, updates)
        if diagnosis is None and comparison is not None and not comparison.equal:
            worst = max(taken, key=lambda step: step.difference).index
            diagnosis = _diagnose(workload, pipe, seed, worst, output, progress)
        workload.model.load_state_dict(pipe.state_dict(), strict=False)
        _keep(output, pipe, save, picture, trace, model)
        memory = {"peak_nbytes": [*pipe.peak_nbytes], "device_nbytes": {**pipe.device_nbytes}}
    _conclude(output, workload, pace, taken, comparison, diagnosis, seed, memory)


def _diagnose(
    workload: Workload, pipe: Pipeline, seed: int, index: int, output: Output, progress: Progress
) -> Diagnosis:
    """Diagnose mini-batch `index`, and print the result."""
    progress("comparing every program with torch", 0, 1)
    x, y = next(islice(workload.batches(pipe.plan.mini_batch, seed), index, None))
    diagnosis = pipe.diagnose(x, y)
    progress("comparing every program with torch", 1, 1)
    output.text(str(diagnosis))
    return diagnosis


def _keep(
    output: Output,
    pipe: Pipeline,
    save: Path | None,
    picture: Path | None,
    trace: Path | None,
    title: str,
) -> None:
    """Write the checkpoint, the picture and the trace that the user asked for."""
    from hetpipe.report.picture import draw_workloads

    if save is not None:
        pipe.save(save)
        output.text(f"checkpoint of step {pipe.steps} in {save}")
    if picture is not None:
        draw_workloads(picture, _panels(pipe), title)
        output.text(f"timelines of a step drawn in {picture}")
    if trace is not None:
        from hetpipe.explain.tracing import details_of
        from hetpipe.report.trace import write_trace

        details = details_of(pipe.plan, pipe.explain().simulation)
        write_trace(trace, [timeline for panel in _panels(pipe) for timeline in panel], details)
        output.text(f"timelines of a step in {trace}, for ui.perfetto.dev or chrome://tracing")


def _panels(pipe: Pipeline) -> list[list[Timeline]]:
    """Return groups of timelines of a step; the timelines of a group share a time axis.

    The first group has the measured or modelled timeline, and the predicted one unless it is
    missing or equal. With boards, a second group has the timeline of their numerics.
    """
    boards = {board.id for board in pipe.boards}
    known = pipe.costs is None or boards >= {*pipe.plan.all_devices}  # boards take predicted times
    timelines = [pipe.timeline] if known else [pipe.timeline, pipe.predicted]
    return [timelines] if pipe.modelled_step_s is None else [timelines, [pipe.wall_timeline]]


def _count(workload: Workload, rows: int, steps: int, epochs: int | None) -> int:
    if epochs is None:
        return steps
    if workload.train_samples is None:
        raise HetpipeError(
            f"{workload.name} does not say how many samples make an epoch (train_samples): give "
            "--steps"
        )
    if workload.train_samples < rows:
        raise HetpipeError(
            f"an epoch of {workload.name} has {workload.train_samples} samples, a mini-batch has "
            f"{rows}: give --steps, or a smaller --mini-batch"
        )
    return epochs * (workload.train_samples // rows)


def _checked(
    workload: Workload, pipe: Pipeline, check_steps: int, why_not: str, output: Output
) -> tuple[int, bool]:
    """Return how many losses to compare with torch's, and whether to compare gradients.

    Print the reason if losses are not compared.
    """
    from hetpipe.schedule.rule import is_asynchronous
    from hetpipe.train.eager import random_layers

    if not check_steps:
        return 0, False
    if why_not:
        output.text(f"not compared with torch: {why_not}")
        return 0, False
    if dropout := random_layers(workload.model):
        output.text(
            f"not compared with torch, which draws other dropout masks in {', '.join(dropout)}"
        )
        return 0, False
    if is_asynchronous(pipe.plan.schedule):
        output.text(f"losses are not compared: {pipe.plan.schedule} trains on older weights")
        return 0, True
    if pipe.steps:
        output.text("losses are not compared: this training began before the checkpoint")
        return 0, True
    return check_steps, True


def _train(
    workload: Workload,
    pipe: Pipeline,
    count: int,
    seed: int,
    check_steps: int,
    updates: UpdateOptions,
    output: Output,
    progress: Progress,
) -> list[Step]:
    from hetpipe.train.eager import compared_sizes
    from hetpipe.train.training import torch_losses, train

    progress(f"{check_steps} steps of unpartitioned torch", 0, 1)
    plan = pipe.plan
    sizes = compared_sizes(workload.model, plan.mini_batch, plan.microbatches)
    expected = torch_losses(workload, sizes, check_steps, seed, updates)
    taken: list[Step] = []
    for step in train(workload, pipe, count, seed=seed, expected=expected):
        taken.append(step)
        progress("training", len(taken), count)
        if len(taken) % max(count // LINES, 1) == 0:
            output.text(f"step {len(taken):5d}   loss {step.loss:.6f}")
    return taken


def _conclude(
    output: Output,
    workload: Workload,
    pace: Pace,
    taken: list[Step],
    comparison: Comparison | None,
    diagnosis: Diagnosis | None,
    seed: int,
    memory: Mapping[str, Any],
) -> None:
    """Print rate, memory, validation figures and the comparison with torch; then write JSON.

    Raises `HetpipeError` if losses or gradients differ from torch's.
    """
    for line in (*pace.lines(), *memory_lines(pace.plan, **memory)):
        output.text(line)
    figures = workload.validate(workload.model) if workload.validate else {}
    for name, value in figures.items():
        output.text(f"validation {name} {value:.4f}")
    if comparison is not None and comparison.equal:
        output.text(str(comparison))
    output.finish(
        {
            "model": workload.name,
            "seed": seed,
            "plan": pace.plan.to_json(),
            "losses": [step.loss for step in taken],
            "torch_losses": [step.expected for step in taken if step.expected is not None],
            "max_loss_rel_diff": comparison.difference if comparison and comparison.steps else None,
            "gradient": asdict(comparison.gradient) if comparison and comparison.gradient else None,
            "diagnosis": None if diagnosis is None else diagnosis.to_json(),
            **pace.to_json(),
            **memory,
            "validation": figures,
        }
    )
    if comparison is not None and not comparison.equal:
        raise HetpipeError(str(comparison))


def memory_lines(
    plan: Plan, peak_nbytes: Sequence[int], device_nbytes: Mapping[str, int]
) -> list[str]:
    """Return lines with each stage's peak memory, measured and planned, and devices' own counts."""
    from hetpipe.words import format_nbytes

    def planned(nbytes: int) -> str:
        return format_nbytes(nbytes) if plan.is_priced else "not"

    stages = [
        f"memory of stage {number} on {', '.join(stage.devices)}: {format_nbytes(peak)} at most, "
        f"measured ({planned(stage.memory_nbytes)} planned)"
        for number, (stage, peak) in enumerate(zip(plan.stages, peak_nbytes, strict=True))
    ]
    return stages + [
        f"memory in use on {member}: {format_nbytes(nbytes)} after a mini-batch, by its own count"
        for member, nbytes in device_nbytes.items()
    ]
