"""`hetpipe zoo`: trains one step of each model of the zoo on a device, and compares with torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpipe.cli import complete
from hetpipe.cli.options import JsonOption
from hetpipe.cli.output import Output
from hetpipe.report.progress import progress_bar

if TYPE_CHECKING:
    from hetpipe.bench.parity import Parity
    from hetpipe.report.tables import Table
    from hetpipe.sdk.backend import Device


BY_LAYERS = """\
by layers: float32 does not determine these gradients. Torch's own float32 steps also exceed a limit
(column "torch's own"), because layers amplify rounding errors, or a rounding error decides a
maximum. Each layer keeps the limits if its inputs are torch's float64 values (column "layers").
"""


def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete.model,
            help="Zoo names, or package.module:factory. \\[default: the small models]",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="A device's id. \\[default: the automatic cluster's first device]"),
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Without MODEL: test models of published sizes.")
    ] = False,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples of the step. \\[default: 4 at most]")
    ] = None,
    stages: Annotated[
        int,
        typer.Option(
            min=1,
            help="The number of stages that take turns on the device, for a "
            "model that does not fit into its memory.",
        ),
    ] = 1,
    json: JsonOption = None,
) -> None:
    """Train one step of whole models on a device and in torch. Exit 1 if a model differs."""
    from hetpipe.errors import HetpipeError
    from hetpipe.zoo.load import check_name, zoo_names

    output = Output(json)
    names = models or zoo_names(published)
    for name in names:
        check_name(name)
    results = _Results(_opened(device))
    with progress_bar() as progress:
        try:
            for number, name in enumerate(names):
                progress(f"training {name}", number, len(names))
                results.train(name, samples, stages)
                output.keep(results.data)
        finally:  # show the other rows even if one model crashes
            results.show(output)
    output.finish(results.data)
    unequal = [*(row.model for row in results.rows if not row.is_equal), *results.failed]
    if unequal:
        raise HetpipeError(f"not equal to torch on {results.device}: {', '.join(unequal)}")


class _Results:
    """The results of the models that a device trained, and the errors of the failed models."""

    def __init__(self, device: Device) -> None:
        self._opened = device
        self.device = device.info.id
        self.rows: list[Parity] = []
        self.failed: dict[str, str] = {}

    def train(self, name: str, samples: int | None, stages: int) -> None:
        """Train a step of a model, and keep the result or the error."""
        from hetpipe.bench.parity import parity
        from hetpipe.errors import HetpipeError
        from hetpipe.zoo.load import load_workload

        try:
            self.rows.append(parity(load_workload(name), self._opened, samples, stages))
        except HetpipeError as error:
            self.failed[name] = str(error)

    @property
    def data(self) -> dict[str, Any]:
        """The results for JSON."""
        rows = [{**asdict(row), "equal": row.is_equal, "verdict": row.verdict} for row in self.rows]
        return {"device": self.device, "models": rows, "failed": self.failed}

    def show(self, output: Output) -> None:
        """Print the table, the refused operators, and the errors of failed models."""
        if self.rows:
            output.console.print(_table(self.rows))
        if any(row.is_equal and not row.is_strict for row in self.rows):
            output.text(BY_LAYERS)
        for row in self.rows:
            for reason, calls in row.refused.items():
                output.text(f"{row.model}: {row.device} refuses {calls} calls of {reason}")
        for name, message in self.failed.items():
            output.text(f"{name}: {message}")


def _opened(device: str | None) -> Device:
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.sdk.host.registry import open_device

    return open_device(device or Cluster.local().members[0].device)


def _table(rows: list[Parity]) -> Table:
    from hetpipe.bench.judge import GRADIENT_LIMIT, LOSS_LIMIT, UPDATE_LIMIT
    from hetpipe.report.tables import Table
    from hetpipe.words import format_s

    numbers = (
        "parameters", "samples", "refused", "loss", "update", "gradients", "torch's own",
        "layers", "time",
    )  # fmt: skip
    limits = f"loss {LOSS_LIMIT:g}, gradients {GRADIENT_LIMIT:g}, update {UPDATE_LIMIT:g}"
    table = Table(
        f"One training step on {rows[0].device}: relative errors against torch in float64; "
        f"allowed are {limits}",
        ("model", *numbers, "worst gradient", "equal"),
        numbers,
    )
    for row in rows:
        errors, layers = row.errors, row.layers
        figures = ["-"] * 5
        if errors is not None:
            figures[:3] = [f"{e:.1e}" for e in (errors.loss, errors.update, errors.gradient)]
        if row.torch is not None:
            figures[3] = f"{row.torch.gradient:.1e}"
        if layers is not None:
            figures[4] = f"{max(layers.gradient, layers.crossing):.1e}"
        table.add_row(
            row.model,
            _millions(row.parameters),
            str(row.samples),
            f"{sum(row.refused.values())} of {sum(row.operators.values())}",
            *figures,
            format_s(row.capture_s + row.compile_s + row.step_s) if errors is not None else "-",
            errors.worst if errors is not None else "",
            row.verdict,
        )
    return table


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e3:.0f} k"
