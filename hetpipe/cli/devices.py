"""`hetpipe devices`: lists the devices of this machine."""

from __future__ import annotations

from dataclasses import asdict

from hetpipe.cli.options import BackendsOption, JsonOption, split_names
from hetpipe.cli.output import Output


def command(backends: BackendsOption = None, json: JsonOption = None) -> None:
    """List devices, who provides them, which join a cluster unasked, and what is off and why."""
    from hetpipe.cluster import Cluster
    from hetpipe.errors import ClusterError
    from hetpipe.report import device_table
    from hetpipe.sdk import backend_names, discover_devices
    from hetpipe.sdk.registry import provider_of

    output = Output(json)
    names = split_names(backends)
    infos, failures = discover_devices(names)
    try:
        joining = {member.device for member in Cluster.local(names).members}
    except ClusterError:
        joining = set()
    used = dict.fromkeys([info.backend for info in infos] + list(failures))
    providers = {name: provider_of(name) for name in used if name in backend_names()}
    output.console.print(device_table(infos, joining, providers))
    for name, reason in failures.items():
        source = f" (of {providers[name]})" if name in providers else ""
        output.text(f"backend {name}{source} is off: {reason}")
    output.finish(
        {
            "devices": [{**asdict(info), "joins": info.id in joining} for info in infos],
            "backends": {name: asdict(provider) for name, provider in providers.items()},
            "failures": failures,
        }
    )
