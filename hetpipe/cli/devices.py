"""`hetpipe devices`: lists the devices of this machine."""

from __future__ import annotations

from dataclasses import asdict

from hetpipe.cli.options import BackendsOption, JsonOption, split_names
from hetpipe.cli.output import Output


def command(backends: BackendsOption = None, json: JsonOption = None) -> None:
    """List the devices that the backends find, and which of them join a cluster unasked."""
    from hetpipe.cluster import Cluster
    from hetpipe.errors import ClusterError
    from hetpipe.report import device_table
    from hetpipe.sdk import discover_devices

    output = Output(json)
    names = split_names(backends)
    infos, failures = discover_devices(names)
    try:
        joining = {member.device for member in Cluster.local(names).members}
    except ClusterError:
        joining = set()
    output.console.print(device_table(infos, joining))
    for name, reason in failures.items():
        output.text(f"backend {name} is not usable: {reason}")
    output.finish(
        {
            "devices": [{**asdict(info), "joins": info.id in joining} for info in infos],
            "failures": failures,
        }
    )
