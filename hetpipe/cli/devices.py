"""`hetpipe devices`: lists the devices of this machine, or of all hosts under torchrun."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from hetpipe.cli.meet import SURVEY_S, hosts_of_command
from hetpipe.cli.options import BackendsOption, ClusterOption, JsonOption, split_names
from hetpipe.cli.output import Output

if TYPE_CHECKING:
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.cluster.survey import Survey
    from hetpipe.hosts.hosts import Hosts


def command(
    backends: BackendsOption = None, cluster: ClusterOption = None, json: JsonOption = None
) -> None:
    """List the devices, the packages of their backends, and the reason why a backend is off.

    The column `joins` marks the devices of an automatic cluster, or of the cluster file.
    """
    from hetpipe.cluster.cluster import Cluster, connected
    from hetpipe.cluster.cluster_file import read_cluster_file
    from hetpipe.crew.launcher import check_met, part_of
    from hetpipe.report.tables import device_table

    output, names, hosts = Output(json), split_names(backends), hosts_of_command()
    if hosts is not None:
        whole = cluster and connected(read_cluster_file(cluster, meets=True), hosts)
        parts = {f.name: whole and part_of(whole, f.name) for f in hosts.facts}
        arguments = {name: (part, names) for name, part in parts.items()}
        _show_hosts(output, hosts, hosts.call_each(SURVEY_S, survey_for, arguments))
        return
    described = None if cluster is None else Cluster.load(cluster)
    if described is not None:
        check_met(described)
    found = survey_for(described, names)
    output.console.print(device_table(found.infos, found.joining, found.providers))
    _show_backends(output, found, "")
    output.finish(_plain(found))


def survey_for(cluster: Cluster | None, backends: list[str] | None) -> Survey:
    """Return the survey of this host, with a cluster's options and its devices as the joining
    ones."""
    from hetpipe.cluster.survey import survey
    from hetpipe.crew.launcher import configure_backends

    if cluster is None:
        return survey(backends)
    configure_backends(cluster)
    joining = frozenset(member.device for member in cluster.members)
    return replace(survey(backends), joining=joining)


def _show_hosts(output: Output, hosts: Hosts, surveys: dict[str, Survey]) -> None:
    """Print the facts of each host, and the devices of all hosts in one table."""
    from hetpipe.cluster.survey import offered_twice
    from hetpipe.report.tables import Table, device_table

    for facts in hosts.facts:
        output.text(str(facts))
    twice = offered_twice({facts.name: facts.machine for facts in hosts.facts}, surveys)
    tables = {
        host: device_table(each.infos, each.joining, each.providers)
        for host, each in surveys.items()
    }
    columns = next(iter(tables.values())).columns
    joined = Table("Devices", ("host", *columns, "same as"), {"memory"}, keys=2)
    for host, table in tables.items():
        for info, row in zip(surveys[host].infos, table.rows, strict=True):
            joined.add_row(host, *row, twice.get((host, info.id), ""))
    output.console.print(joined)
    for host, each in surveys.items():
        _show_backends(output, each, f"host {host}: ")
    plain = {host: _plain(each) for host, each in surveys.items()}
    output.finish({"hosts": [{**asdict(facts), **plain[facts.name]} for facts in hosts.facts]})


def _show_backends(output: Output, found: Survey, where: str) -> None:
    for name, reason in found.failures.items():
        source = f" (of {found.providers[name]})" if name in found.providers else ""
        output.text(f"{where}backend {name}{source} is off: {reason}")
    for name, own in found.kernels.items():
        for kernel, operator in own:
            output.text(f"{where}backend {name} runs your kernel {kernel} for {operator}")


def _plain(found: Survey) -> dict[str, object]:
    return {
        "devices": [{**asdict(info), "joins": info.id in found.joining} for info in found.infos],
        "backends": {name: asdict(provider) for name, provider in found.providers.items()},
        "failures": found.failures,
        "user_kernels": found.kernels,
    }
