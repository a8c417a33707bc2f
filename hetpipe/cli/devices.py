"""`hetpipe devices`: lists the devices of this machine."""

from __future__ import annotations

from dataclasses import asdict

from hetpipe.cli.options import BackendsOption, ClusterOption, JsonOption, split_names
from hetpipe.cli.output import Output


def command(
    backends: BackendsOption = None, cluster: ClusterOption = None, json: JsonOption = None
) -> None:
    """List the devices, the packages of their backends, and the reason why a backend is off.

    The column `joins` marks the devices of an automatic cluster, or of the cluster file.
    """
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.crew.launcher import configure_backends
    from hetpipe.errors import ClusterError
    from hetpipe.report.tables import device_table
    from hetpipe.sdk.host.registry import backend_names, discover_devices, get_backend, provider_of

    output = Output(json)
    described = None if cluster is None else Cluster.load(cluster)
    if described is not None:
        configure_backends(described)
    names = split_names(backends)
    infos, failures = discover_devices(names)
    try:
        members = (described or Cluster.local(names)).members
        joining = {member.device for member in members}
    except ClusterError:
        joining = set()
    used = dict.fromkeys([info.backend for info in infos] + list(failures))
    providers = {name: provider_of(name) for name in used if name in backend_names()}
    output.console.print(device_table(infos, joining, providers))
    for name, reason in failures.items():
        source = f" (of {providers[name]})" if name in providers else ""
        output.text(f"backend {name}{source} is off: {reason}")
    kernels = {
        name: [(each.name, each.operator) for each in get_backend(name).user_kernels()]
        for name in dict.fromkeys(info.backend for info in infos)
    }
    for name, own in kernels.items():
        for kernel, operator in own:
            output.text(f"backend {name} runs your kernel {kernel} for {operator}")
    output.finish(
        {
            "devices": [{**asdict(info), "joins": info.id in joining} for info in infos],
            "backends": {name: asdict(provider) for name, provider in providers.items()},
            "failures": failures,
            "user_kernels": kernels,
        }
    )
