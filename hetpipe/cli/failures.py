"""`hetpipe failures`: what lost devices cost a training, simulated under four policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from hetpipe.cli.options import JsonOption, split_names
from hetpipe.cli.output import Output
from hetpipe.cli.study import (
    ClusterNameOption,
    PlannerChoices,
    PlannerOption,
    SubjectOptions,
    cluster_from,
)
from hetpipe.errors import ClusterError, HetpipeError
from hetpipe.report.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hetpipe.cluster.cluster import Cluster
    from hetpipe.report.tables import Table
    from hetpipe.study.survivors import FailureStudy, Trials

MOST = 1e6
"""The largest rate of failures and time of repairs."""
MOST_FAILURES = 1e6
"""The most failures that are simulated for each rate and time of repairs."""
NOTE = (
    "±: half of the distance between the quartiles. Lost devices are drawn at random, and rates"
    " between the planned steps are interpolated. A plan may leave devices idle. It is assumed that"
    " the snapshots of a stage are not lost together."
)


@dataclass(frozen=True)
class HostOptions:
    """The options that describe hosts with boards, instead of a cluster's file."""

    boards: Annotated[
        str | None,
        typer.Option(
            "--boards",
            metavar="BOARD=COUNT,...",
            help="Hosts with these boards instead of --cluster: a100-40=512,v100-pcie-16=512.",
        ),
    ] = None
    per_host: Annotated[
        int, typer.Option("--per-host", min=1, help="The boards of each host of --boards.")
    ] = 8
    inside: Annotated[
        str,
        typer.Option("--inside", metavar="LINK", help="The links inside each host of --boards."),
    ] = "150 GB/s, 5 us"
    network: Annotated[
        str,
        typer.Option("--network", metavar="LINK", help="The links between the hosts of --boards."),
    ] = "100 Gb/s, 10 us"

    def make(self, cluster: str | None) -> Cluster:
        """Return the cluster of `--boards`, or of `--cluster`. Raises `HetpipeError`."""
        from hetpipe.cluster.units import parse_link
        from hetpipe.study.survivors import hosts_of_boards

        if self.boards is None:
            return cluster_from(cluster)
        if cluster is not None:
            raise ClusterError("--boards and --cluster both describe a cluster: give one of them")
        links = parse_link(self.inside), parse_link(self.network)
        return hosts_of_boards(parse_values("--boards", self.boards), self.per_host, *links)


@dataclass(frozen=True)
class TrialOptions:
    """The options about the length and number of the simulated trainings."""

    hours: Annotated[
        float,
        typer.Option("--hours", min=0.01, max=MOST, help="The length of each simulated training."),
    ] = 24.0
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="The trainings simulated for each figure.")
    ] = 20
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Seed of the failures and repairs.")
    ] = 0

    def make(self, per_hour: float) -> Trials:
        """Return the trials. Raises `HetpipeError` if they have more than `MOST_FAILURES`, at the
        highest rate of failures."""
        from hetpipe.study.survivors import Trials

        count = self.hours * per_hour * self.repeats
        if not count <= MOST_FAILURES:
            raise HetpipeError(
                f"{self.repeats} trainings of {self.hours:g} hours with {per_hour:g} failures an "
                f"hour have {count:.3g} failures, more than {MOST_FAILURES:g}: give fewer --hours, "
                "--repeats or --per-hour"
            )
        return Trials(self.hours, self.repeats, self.seed)


def command(
    about: SubjectOptions,
    cluster: ClusterNameOption = None,
    *,
    hosts: HostOptions,
    per_hour: Annotated[
        str,
        typer.Option(
            "--per-hour", metavar="LIST", help="Failures per hour, of the whole cluster together."
        ),
    ] = "1,4,12,60",
    repair_s: Annotated[
        str, typer.Option("--repair-s", metavar="LIST", help="Mean seconds of a repair.")
    ] = "600,3600",
    assume: Annotated[
        str,
        typer.Option(
            "--assume",
            metavar="NAME=VALUE,...",
            help="Replace assumptions, as restart_s=300,detect_s=1. The command prints all.",
        ),
    ] = "",
    planner: PlannerOption = None,
    choices: PlannerChoices,
    trials: TrialOptions,
    json: JsonOption = None,
) -> None:
    """Simulate what failures cost: hetpipe's way beside a restart, rerouting, redundancy."""
    from hetpipe.study.policies import Assumptions
    from hetpipe.study.survivors import PLANNER, failures

    output = Output(json)
    assumed = Assumptions().changed(parse_values("--assume", assume))
    often, repairs = parse_numbers("--per-hour", per_hour), parse_numbers("--repair-s", repair_s)
    made = trials.make(max(often))
    members = hosts.make(cluster)
    subject = about.subject(choices.global_batch)
    options = choices.options(subject)
    with progress_bar("planning and simulating"):
        answer = failures(
            subject, members, often, repairs, options, planner or PLANNER,
            assumed=assumed, trials=made,
        )  # fmt: skip
    makers = [loss_table, interval_table, step_table, assumption_table]
    if not answer.intervals:
        makers.remove(interval_table)
    for table in (*goodput_tables(answer), *(make(answer) for make in makers)):
        output.console.print(table)
    output.text(NOTE)
    output.finish(answer.to_json())


def goodput_tables(answer: FailureStudy) -> Iterator[Table]:
    """Yield a table for each time of repair: policies by rates of failures."""
    from hetpipe.report.tables import Table

    rates = list(dict.fromkeys(row.per_hour for row in answer.rows))
    names = list(dict.fromkeys(row.policy for row in answer.rows))
    rows = {(row.policy, row.per_hour, row.repair_s): row for row in answer.rows}
    columns = ["policy", *(f"{rate:g} an hour" for rate in rates)]
    for repair_s in dict.fromkeys(row.repair_s for row in answer.rows):
        table = Table(
            f"{answer.subject} on {len(answer.trained.devices)} devices, repairs of "
            f"{repair_s:g} s: useful mini-batches, of those without failures, modelled",
            columns,
            columns[1:],
        )
        for name in names:
            cells = (rows[name, rate, repair_s] for rate in rates)
            table.add_row(
                name, *(f"{100 * row.mean:.1f} % ± {100 * row.spread:.1f}" for row in cells)
            )
        yield table


def loss_table(answer: FailureStudy) -> Table:
    """Return a table of the lost time, at the highest rate of failures and the longest repairs."""
    from hetpipe.report.tables import Table

    rate = max(row.per_hour for row in answer.rows)
    repair_s = max(row.repair_s for row in answer.rows)
    columns = ["policy", "useful", "pauses", "lost work", "copies", "slower steps"]
    table = Table(
        f"Time by policy, {rate:g} failures an hour, repairs of {repair_s:g} s, modelled",
        columns,
        columns[1:],
    )
    for row in answer.rows:
        if (row.per_hour, row.repair_s) == (rate, repair_s):
            parts = row.mean, row.pauses, row.repeated, row.copies, row.slower
            table.add_row(row.policy, *(f"{100 * part:.1f} %" for part in parts))
    return table


def interval_table(answer: FailureStudy) -> Table:
    """Return a table of the best intervals of snapshots and checkpoints."""
    from hetpipe.report.tables import Table
    from hetpipe.words import format_s

    columns = ["copies", "failures", "each takes", "by Young", "by Daly", "updates"]
    table = Table("Best intervals of snapshots and checkpoints", columns, columns[1:])
    for each in answer.intervals:
        table.add_row(
            each.copies, f"{each.per_hour:g} an hour", format_s(each.copy_s),
            format_s(each.young_s), format_s(each.daly_s), str(each.updates),
        )  # fmt: skip
    return table


def step_table(answer: FailureStudy) -> Table:
    """Return a table of the planned steps, by the number of lost devices."""
    from hetpipe.report.tables import Table
    from hetpipe.words import format_s

    columns = ["lost devices", "step", "rate, of the whole cluster"]
    plan, rates = answer.trained.plan, answer.trained.rates
    table = Table(
        f"Planned steps, {plan.label}; stages of the whole cluster: {len(plan.stages)}, "
        f"{plan.schedule}",
        columns,
        columns,
    )
    for lost, step_s in answer.steps_s.items():
        step = "no plan" if step_s is None else format_s(step_s)
        table.add_row(str(lost), step, f"{100 * rates[lost] / rates[0]:.1f} %")
    return table


def assumption_table(answer: FailureStudy) -> Table:
    """Return a table of all assumptions."""
    from hetpipe.report.tables import Table

    columns = ["assumption", "value", "meaning"]
    table = Table("Assumptions: nobody measured them", columns, ["value"])
    for name, value, meaning in answer.assumed.rows():
        table.add_row(name, f"{value:g}", meaning)
    return table


def parse_values(option: str, text: str) -> dict[str, float]:
    """Parse `"a=1,b=2"` -> `{"a": 1.0, "b": 2.0}`. Raises `HetpipeError`."""
    values: dict[str, float] = {}
    for entry in split_names(text) or ():
        name, _, number = entry.rpartition("=")
        try:
            values[name.strip()] = float(number)
        except ValueError:
            name = ""
        if not name.strip():
            raise HetpipeError(f"{option} {entry!r}: write NAME=NUMBER")
    return values


def parse_numbers(option: str, text: str) -> list[float]:
    """Parse `"1,0.5"` -> `[1.0, 0.5]`. Raises `HetpipeError`."""
    try:
        numbers = [float(each) for each in split_names(text) or ()]
    except ValueError:
        numbers = []
    if not numbers or not all(0 <= number <= MOST for number in numbers):
        raise HetpipeError(
            f"{option} {text!r}: separate numbers from 0 to {MOST:g} by commas, for instance 1,60"
        )
    return numbers
