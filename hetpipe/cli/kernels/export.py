"""`hetpipe kernels export PLAN`: writes the kernels of each stage as sources for a compiler."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpipe.cli import complete
from hetpipe.cli.options import (
    BackendsOption,
    ClusterOption,
    DevicesOption,
    JsonOption,
    make_cluster,
)
from hetpipe.cli.output import Output
from hetpipe.errors import ClusterError, HetpipeError
from hetpipe.report.progress import progress_bar
from hetpipe.words import words

if TYPE_CHECKING:
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.cost.board import Board
    from hetpipe.pipeline.exporting import Written
    from hetpipe.plan.plan import Plan

SHOWN = 2  # commands of a vendor's compiler that are printed; the manifest has all commands


def command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan that `plan` wrote.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="The plan's model, if the file does not name it.",
            autocompletion=complete.model,
        ),
    ] = None,
    board: Annotated[
        str | None,
        typer.Option(
            "--board",
            metavar="ID",
            help="The board whose compiler will be used.",
            autocompletion=complete.board,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="ID", help="Write all stages for this device."),
    ] = None,
    cluster: ClusterOption = None,
    devices: DevicesOption = None,
    backends: BackendsOption = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="The folder of the bundles.")
    ] = Path("bundles"),
    build: Annotated[
        bool, typer.Option("--build", help="Also compile the sources with the device's driver.")
    ] = False,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Also export the forwards in eval mode.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Write the kernels of a plan's stages as sources, with a manifest, for an offline compiler."""
    from hetpipe.plan.plan_file import read_plan, read_workload
    from hetpipe.zoo.load import check_name

    output = Output(json)
    stored, costs = read_plan(plan)
    name = model or read_workload(plan)
    if not name:
        raise HetpipeError(f"{plan} does not name its model: name it with --model MODEL")
    check_name(name)
    members = _members(stored, cluster, devices, backends, device)
    boards = _boards(stored, cluster, board)

    from hetpipe.capture.captured import Captured
    from hetpipe.crew.workers import Workers
    from hetpipe.pipeline.exporting import Exportable, check_layers, export
    from hetpipe.pipeline.options import PlanOptions
    from hetpipe.zoo.load import load_workload, optimizer_of

    options = {"--model": model, "--board": board, "--device": device, "--cluster": cluster,
               "--devices": devices, "--backends": backends, "--out": out}  # fmt: skip
    workload = load_workload(name)
    with progress_bar() as progress, Workers.start(members) as workers:
        progress("capturing", 0, 1)
        captured = Captured(
            workload.model, workload.loss_fn, next(workload.batches(stored.mini_batch, 0)),
            samples=-(-stored.mini_batch // stored.microbatches),
            split=PlanOptions(plan=stored).channels,
        )  # fmt: skip
        check_layers(stored, captured)
        progress("exporting", 0, 1)
        training = Exportable(
            captured, stored, optimizer_of(workload), costs, evaluates=evaluate, stand_in=device
        )
        again = _again(plan, options, build, evaluate)
        written = export(training, workers, out, boards, again)
    if build:
        written = list(map(_built, written))
    for each in written:
        output.text(_line(each))
    output.finish({"model": name, "stages": [_data(each) for each in written]})


def _members(
    plan: Plan, cluster: Path | None, devices: str | None, backends: str | None, device: str | None
) -> Cluster:
    """Return the options' cluster, by default the plan's devices. Raises `HetpipeError`."""
    if device is not None:
        if devices:
            raise HetpipeError(
                f"--device {device} writes all stages for one device: leave out --devices"
            )
        return make_cluster(None, device, None, None)
    hint = "name the plan's cluster, --cluster FILE, or a device for all stages, --device ID"
    if cluster is None and devices is None and backends is None:
        try:
            return make_cluster(None, ",".join(dict.fromkeys(plan.all_devices)), None, None)
        except ClusterError as error:
            raise ClusterError(f"the plan's devices: {error}; {hint}") from error
    members = make_cluster(cluster, devices, backends, None)
    if members.boards_without_numerics:
        names = words(member.id for member in members.boards_without_numerics)
        raise ClusterError(
            f"boards that are only described open no worker: {names}; name an attached device for "
            "all stages, --device ID"
        )
    return members


def _boards(plan: Plan, cluster: Path | None, board: str | None) -> dict[str, Board]:
    """Return the board of each member of the plan, from `board` or else from the cluster file."""
    from hetpipe.cost.board import board as board_of

    named = dict.fromkeys(plan.all_devices, board)
    if board is None and cluster is not None:
        described = make_cluster(cluster, None, None, None)
        named = {member: described.member(member).board for member in named}
    return {member: board_of(id) for member, id in named.items() if id}


def _again(plan: Path, options: Mapping[str, Any], build: bool, evaluate: bool) -> str:
    """Return the command that repeats this export."""
    given = [part for name, value in options.items() if value for part in (name, str(value))]
    flags = {"--build": build, "--evaluate": evaluate}
    words = ["hetpipe", "kernels", "export", str(plan), *given]
    return shlex.join([*words, *(flag for flag, is_set in flags.items() if is_set)])


def _built(written: Written) -> Written:
    from hetpipe.cli.kernels.build import build_bundle

    if written.folder is None:
        return written
    return replace(written, manifest=build_bundle(written.folder))


def _line(written: Written) -> str:
    where = f"stage {written.stage} on {written.member}"
    if written.folder is None or written.manifest is None:
        return f"{where}: left out, {written.why}"
    manifest = written.manifest
    count = sum(len(source.kernels) for source in manifest.sources)
    files = ", ".join(source.file for source in manifest.sources)
    lines = [f"{where}: {count} kernels in {written.folder}/{files}, hash {manifest.sha256[:12]}"]
    for source in manifest.sources:
        if source.binary is not None:
            lines.append(f"  binary {source.binary.file}, hash {source.binary.sha256[:12]}")
        lines += [f"  {each}" for each in source.commands[:SHOWN]]
        if len(source.commands) > SHOWN:
            lines.append(f"  and {len(source.commands) - SHOWN} more commands in manifest.json")
    if not any(source.commands for source in manifest.sources):
        lines.append(f"  the vendor's compiler: {manifest.compiler}")
    return "\n".join(lines)


def _data(written: Written) -> dict[str, Any]:
    own = {"stage": written.stage, "replica": written.replica, "member": written.member}
    if written.folder is None or written.manifest is None:
        return own | {"folder": None, "why": written.why}
    manifest = written.manifest
    return own | {
        "folder": str(written.folder),
        "device": manifest.device,
        "board": manifest.board,
        "compiler": manifest.compiler,
        "sha256": manifest.sha256,
        "kernels": [kernel.name for source in manifest.sources for kernel in source.kernels],
        "binaries": [source.binary and source.binary.file for source in manifest.sources],
    }
