"""`hetpipe report MODEL`: trains some mini-batches, and shows where their time goes."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli.options import (
    ClusterOptions,
    MicrobatchesOption,
    MiniBatchOption,
    ModelArgument,
    PipelineOptions,
    SeedOption,
    check_devices,
    read_options,
)
from hetpipe.cli.output import Output, logged
from hetpipe.files import check_target
from hetpipe.report.progress import progress_bar


def command(
    model: ModelArgument,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Mini-batches to train.")] = 10,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page to write.")] = Path(
        "report.html"
    ),
    *,
    where: ClusterOptions,
    microbatches: MicrobatchesOption = None,
    mini_batch: MiniBatchOption = None,
    pipeline: PipelineOptions,
    seed: SeedOption = 0,
) -> None:
    """Train some mini-batches, print where the time goes, and write a page with a timeline."""
    from hetpipe.zoo.load import check_name

    output = Output(None)
    check_target(out)
    asked = read_options(pipeline, microbatches, mini_batch)
    check_name(model)
    members = where.make()
    check_devices(asked, len(members.members))

    from hetpipe.train.training import open_pipeline
    from hetpipe.zoo.load import load_workload

    workload = load_workload(model)
    with (
        logged(output),
        progress_bar() as progress,
        open_pipeline(
            workload, members, mini_batch=mini_batch, seed=seed, progress=progress, priced=True,
            **asked.keywords,
        ) as pipe,
    ):  # fmt: skip
        batches = islice(workload.batches(pipe.plan.mini_batch, seed), steps)
        for number, _ in enumerate(pipe.run(batches), 1):
            progress("training", number, steps)
        explanation = pipe.explain()
    output.text(str(explanation))
    explanation.to_html(out)
    output.text(f"a page with the timeline is in {out}")
