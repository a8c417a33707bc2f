"""`hetpipe plan MODEL`: the stages, their devices, and what a step should take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    split_numbers,
)
from hetpipe.cli.output import Output, progress_bar


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
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Keep the plan for `train`.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Plan a model on the cluster: which layers go where, and what it should cost."""
    from hetpipe.bench.open import open_pipeline
    from hetpipe.report import write_json
    from hetpipe.zoo import load_workload

    output = Output(json)
    workload = load_workload(model)
    members = make_cluster(cluster, devices, backends, emulate_speed)
    with (
        progress_bar() as progress,
        open_pipeline(
            workload, members, mini_batch=mini_batch, microbatches=microbatches, schedule=schedule,
            weights=weights, cuts=split_numbers(cuts, "--cuts"),
            replicas=split_numbers(replicas, "--replicas"), progress=progress,
        ) as pipe,
    ):  # fmt: skip
        plan = pipe.plan
    output.text(str(plan))
    if out is not None:
        write_json(out, plan.to_json())
        output.text(f"written to {out}")
    output.finish(plan.to_json())
