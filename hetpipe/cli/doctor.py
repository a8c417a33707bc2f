"""`hetpipe doctor`: tests backends and devices, repairs some faults, and names cures for others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpipe.cli.meet import hosts_of_command
from hetpipe.cli.options import BackendsOption, JsonOption, split_names
from hetpipe.cli.output import Output

if TYPE_CHECKING:
    from hetpipe.check.examination import Finding
    from hetpipe.sdk.info import DeviceInfo

STYLES = {"ok": "green", "repaired": "cyan", "missing": "yellow", "broken": "red"}
EXAMINE_S = 600.0
"""Seconds in which another host examines its devices."""


def command(
    backends: BackendsOption = None,
    selftest: Annotated[
        bool, typer.Option(help="Run a few graphs on every device and compare the results.")
    ] = True,
    json: JsonOption = None,
) -> None:
    """Examine every backend and device. Exit 1 if a named backend, or a device of an automatic
    cluster, does not work."""
    from hetpipe.check.examination import examination, examined
    from hetpipe.errors import HetpipeError

    output = Output(json)
    named = split_names(backends) or []
    hosts = hosts_of_command()
    found: Mapping[str, Iterable[Finding]] = {"": examination(named, selftest)}
    if hosts is not None:
        found = hosts.call_all(EXAMINE_S, examined, named, selftest)
    broken: list[str] = []
    findings: list[dict[str, Any]] = []
    devices: list[dict[str, Any]] = []
    for number, (host, each) in enumerate(found.items()):
        if hosts is not None:
            output.text(str(hosts.facts[number]))
        where = {"host": host} if host else {}
        for finding in each:
            plain = asdict(finding)
            info, result = plain.pop("device"), plain.pop("selftest")
            if info is None:
                findings.append({**where, **plain})
            else:
                devices.append({**where, **info, "selftest": result})
            if info is None or result is not None:
                _show(output, finding)
            if finding.level == "broken" and _counts(finding, named):
                broken.append(f"{host and host + '/'}{_name(finding)}")
    output.finish({"findings": findings, "devices": devices})
    if broken:
        where_all = "these hosts" if hosts else "this machine"
        raise HetpipeError(f"not working on {where_all}: {', '.join(dict.fromkeys(broken))}")


def _counts(finding: Finding, named: Iterable[str]) -> bool:
    """Return whether a fault is one of a named backend, or of a device that may join a cluster."""
    return finding.backend in named or (finding.device is not None and _joins(finding.device))


def _name(finding: Finding) -> str:
    return f"backend {finding.backend}" if finding.device is None else finding.device.id


def _joins(info: DeviceInfo) -> bool:
    """Return whether the device may join an automatic cluster."""
    return not (info.capabilities.emulated or info.capabilities.reference)


def _show(output: Output, finding: Finding) -> None:
    from rich.markup import escape

    line = f"[{STYLES.get(finding.level, 'white')}]{finding.level:>9}[/]  {escape(finding.what)}"
    if finding.cure:
        line += f"  [bold]cure: {escape(finding.cure)}[/bold]"
    output.console.print(line, highlight=False, soft_wrap=True)
