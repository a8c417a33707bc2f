"""Options that commands share, and checks of their values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpipe.cli import complete
from hetpipe.cli.meet import hosts_of_command
from hetpipe.errors import ClusterError, HetpipeError, PlanError
from hetpipe.files import check_target
from hetpipe.words import choices

if TYPE_CHECKING:
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.pipeline.options import PlanOptions
    from hetpipe.plan.plan import Plan

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A zoo name, or package.module:factory.",
        autocompletion=complete.model,
    ),
]
ClusterOption = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        help="A cluster file (TOML), or the name of a published cluster, such as pipedream-a.",
        autocompletion=complete.cluster,
    ),
]
DevicesOption = Annotated[
    str | None,
    typer.Option("--devices", metavar="LIST", help="Device ids in order, separated by commas."),
]
BackendsOption = Annotated[
    str | None,
    typer.Option(
        "--backends",
        metavar="LIST",
        help="Only these backends.",
        autocompletion=complete.backends,
    ),
]
MicrobatchesOption = Annotated[
    int | None,
    typer.Option(
        "--microbatches", min=1, help="Micro-batches per mini-batch; without it, several are tried."
    ),
]
MiniBatchOption = Annotated[
    int | None, typer.Option("--mini-batch", min=1, help="Samples per optimizer step.")
]
PRECISIONS = ("bfloat16", "float16")


def _known_precision(name: str | None) -> str | None:
    """Refuse an unknown precision before any work."""
    if name not in (None, *PRECISIONS):
        raise HetpipeError(f"no precision {name!r}; {choices(name, PRECISIONS)}")
    return name


PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="DTYPE",
        callback=_known_precision,
        help="Passes compute in bfloat16 or float16. \\[default: the model's own dtypes]",
    ),
]


def _known_schedule(value: str) -> str:
    """Return the name of a schedule. If `value` is a .txt file, register its schedule first."""
    if not value.endswith(".txt"):
        return value
    from hetpipe.schedule.fixed import register_file

    return register_file(Path(value))


ScheduleOption = Annotated[
    str,
    typer.Option(
        "--schedule",
        callback=_known_schedule,
        autocompletion=complete.schedule,
        help="A name (a wrong name lists all names), FILE.txt with the actions of a schedule, or "
        "auto: the planner chooses a schedule that flushes.",
    ),
]
ChangedOption = Annotated[
    list[str] | None,
    typer.Option(
        "--changed",
        metavar="NAME",
        help="With --resume: a setting, such as seed, that may differ from the checkpoint. "
        "Repeatable.",
    ),
]
PassLimitOption = Annotated[
    float | None,
    typer.Option(
        "--pass-limit",
        metavar="SECONDS",
        help="A pass that takes longer is stuck: the training ends or, with --survive, continues "
        "without its device.",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of batches and dropout.")]
JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is standard output."),
]


@dataclass(frozen=True)
class ClusterOptions:
    """The options that describe a cluster."""

    cluster: ClusterOption = None
    devices: DevicesOption = None
    backends: BackendsOption = None
    emulate_speed: Annotated[
        list[str] | None,
        typer.Option(
            "--emulate-speed",
            metavar="ID=SPEED",
            help="ID=0.5 makes every computation of this device take twice its time. Repeatable.",
        ),
    ] = None

    def make(self) -> Cluster:
        """Return the cluster, by default the automatic one. Raises `ClusterError`."""
        return make_cluster(self.cluster, self.devices, self.backends, self.emulate_speed)


@dataclass(frozen=True)
class PipelineOptions:
    """The options that fix a pipeline's stages and schedule."""

    schedule: ScheduleOption = "auto"
    weights: Annotated[
        str,
        typer.Option(
            "--weights",
            help="The policy for versions of the weights, if the schedule is asynchronous: stash, "
            "vertical-sync, 2bw, spectrain or pipeoptim.",
            autocompletion=complete.policy,
        ),
    ] = "auto"
    cuts: Annotated[
        str | None,
        typer.Option(
            "--cuts", metavar="LIST", help="The first layers of the stages after stage 0: 3,7."
        ),
    ] = None
    replicas: Annotated[
        str | None,
        typer.Option(
            "--replicas",
            metavar="LIST",
            help="The number of devices of each stage, in the cluster's order: 2,1.",
        ),
    ] = None


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with its records of options replaced by an option for each field."""
    records: dict[str, Any] = {}
    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        record = parameter.annotation
        if isinstance(record, type) and is_dataclass(record):
            records[parameter.name] = record
            options += inspect.signature(record, eval_str=True).parameters.values()
        else:
            options.append(parameter)

    @wraps(command)
    def run(**values: Any) -> None:
        made = {
            name: record(**{field.name: values.pop(field.name) for field in fields(record)})
            for name, record in records.items()
        }
        command(**made, **values)

    keywords = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run


def split_names(text: str | None) -> list[str] | None:
    """Split names: `"a, b"` -> `["a", "b"]`; None stays None."""
    if text is None:
        return None
    return [name.strip() for name in text.split(",") if name.strip()]


def split_numbers(text: str | None, option: str) -> list[int] | None:
    """Split numbers: `"2, 1"` -> `[2, 1]`; None stays None. Raises `PlanError`."""
    names = split_names(text)
    if names is None:
        return None
    if not names or not all(name.isdecimal() for name in names):
        raise PlanError(f"{option} {text!r}: separate the numbers by commas, for instance 2,1")
    return [int(name) for name in names]


def parse_speeds(entries: list[str] | None) -> dict[str, float]:
    """Parse speeds: `["a=0.5"]` -> `{"a": 0.5}`. Raises `ClusterError`."""
    speeds: dict[str, float] = {}
    for entry in entries or []:
        member, _, number = entry.rpartition("=")
        try:
            speeds[member] = float(number)
        except ValueError:
            member = ""
        if not member:
            raise ClusterError(f"--emulate-speed {entry!r}: write ID=SPEED, for instance a:0=0.5")
    return speeds


def make_cluster(
    file: Path | None, devices: str | None, backends: str | None, speeds: list[str] | None
) -> Cluster:
    """Return the options' cluster, by default the automatic one. Raises `ClusterError`."""
    from hetpipe.cluster.cluster import Cluster, connected, load_or_published
    from hetpipe.cluster.cluster_file import read_cluster_file

    emulated = parse_speeds(speeds)
    if (connections := hosts_of_command()) is not None:
        if backends:
            raise ClusterError("on several hosts, name the devices: --devices HOST/DEVICE,...")
        if file is None:
            return Cluster.on(connections, split_names(devices), emulated)
    elif file is None:
        return Cluster.local(split_names(backends), split_names(devices), emulated)
    if devices or backends:
        raise ClusterError(
            "--cluster already lists the devices: leave out --devices and --backends"
        )
    if connections is None:
        cluster = load_or_published(str(file))
    else:
        cluster = connected(read_cluster_file(file, meets=True), connections)
    members = {cluster.member(member).id: speed for member, speed in emulated.items()}
    return replace(
        cluster,
        members=tuple(
            replace(member, speed=members.get(member.id, member.speed))
            for member in cluster.members
        ),
    )


def read_options(
    options: PipelineOptions,
    microbatches: int | None,
    mini_batch: int | None,
    rebalance: str | None = None,
) -> PlanOptions:
    """Return the options of a plan, after all checks that need no model. Raises `HetpipeError`."""
    from hetpipe.pipeline.fit import check_count, fixed_by
    from hetpipe.pipeline.options import PlanOptions

    asked = PlanOptions(
        cuts=split_numbers(options.cuts, "--cuts"),
        replicas=split_numbers(options.replicas, "--replicas"),
        microbatches=microbatches,
        schedule=options.schedule,
        weights=options.weights,
        rebalance=rebalance,
    )
    fixed_by(asked)
    if microbatches and mini_batch:
        check_count(microbatches, mini_batch)
    return asked


def check_plan_alone(path: Path, plan: Plan, asked: PlanOptions) -> None:
    """Raise `HetpipeError` for options that `plan` fixes, or if its policy and rule conflict."""
    if asked.asked:
        options = ", ".join(f"--{name}" for name in asked.asked)
        raise HetpipeError(
            f"--plan {path} already contains {options}: leave out --plan, or these options"
        )
    plan.policy.check_rule(plan.rule)


def check_devices(asked: PlanOptions, count: int) -> None:
    """Raise `PlanError` if `count` devices are too few for the stages."""
    from hetpipe.schedule.rule import rule_of

    if asked.schedule != "auto" and rule_of(asked.schedule).several_stages:
        return
    stages = len(asked.cuts or ()) + 1
    need = sum(asked.replicas) if asked.replicas else stages
    if need > count:
        raise PlanError(
            f"{stages} stages need {need} devices, the cluster has {count}: give fewer cuts "
            "or replicas, or name more devices"
        )


def check_synchronous(schedule: str) -> None:
    """Raise `HetpipeError` if the schedule does not flush or is unknown."""
    from hetpipe.schedule.rule import rule_of

    if schedule != "auto" and not rule_of(schedule).flushes:
        raise HetpipeError(
            f"schedule {schedule} is asynchronous, so its training differs from the benchmark's "
            "other rows: choose a synchronous schedule, such as 1f1b"
        )


def check_picture(path: Path | None) -> None:
    """Raise `HetpipeError` unless hetpipe can write the file and draws in the suffix's format."""
    from hetpipe.report.picture import FORMATS

    check_target(path)
    if path is not None and path.suffix not in FORMATS:
        raise HetpipeError(
            f"a picture's name must end with one of {', '.join(FORMATS)}, not {path.name!r}"
        )
