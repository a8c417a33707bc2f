"""Decides how a cluster's workers run, and starts them."""

from __future__ import annotations

import os
import sys

from hetpipe.cluster.cluster import Cluster, Member
from hetpipe.crew.control import Control
from hetpipe.crew.fleet import Fleet, ProcessFleet, ThreadFleet
from hetpipe.errors import BackendError, ClusterError, HetpipeError
from hetpipe.sdk.info import DeviceInfo
from hetpipe.sdk.registry import backend_reference, get_backend
from hetpipe.wire.messages import Open

TRANSPORTS = ("auto", "local", "shared-memory", "distributed")


def transport_of(cluster: Cluster) -> str:
    """How messages travel: `auto` is shared memory, as all members are on this host."""
    if cluster.transport not in TRANSPORTS:
        raise ClusterError(
            f"no transport {cluster.transport!r}; choose from {', '.join(TRANSPORTS)}"
        )
    return "shared-memory" if cluster.transport == "auto" else cluster.transport


def launch(cluster: Cluster, heartbeat_s: float, silence_s: float, start_timeout_s: float) -> Fleet:
    """Start one worker per member; they open their devices and then reply."""
    transport = transport_of(cluster)
    members = cluster.members
    if not members or len({member.id for member in members}) != len(members):
        raise ClusterError(
            f"a crew needs members with different ids, got {[member.id for member in members]}"
        )
    local = transport == "local"
    found = [_find(member, local, cluster.places.get(member.id)) for member in members]
    control = Control([f"worker {m.id!r} ({m.device})" for m in members])
    store, address = None, None
    if transport == "distributed":
        from hetpipe.wire.gloo import host_store

        store = host_store()
        address = (store.host, store.port)
    orders = [
        Open(
            member,
            reference,
            tuple(sys.path),
            heartbeat_s,
            start_timeout_s,
            rank,
            len(members),
            address,
        )
        for rank, (member, (reference, _)) in enumerate(zip(members, found, strict=True))
    ]
    if local:
        return ThreadFleet(control, orders)
    environments = [
        _environment(member, info) for member, (_, info) in zip(members, found, strict=True)
    ]
    fleet = ProcessFleet(control, orders, environments, silence_s)
    fleet.keep = store
    return fleet


def _find(member: Member, local: bool, place: str | None) -> tuple[str | None, DeviceInfo]:
    """How a process loads the member's backend, and its device.

    An error begins with `place`, the line of a cluster file that names the device.
    """
    try:
        return None if local else _reference(member), _info(member)
    except HetpipeError as error:
        if place is None:
            raise
        raise type(error)(f"{place}: {error}") from error


def _reference(member: Member) -> str:
    name = member.device.partition(":")[0]
    reference = backend_reference(name)
    if reference is None:
        raise HetpipeError(
            f"backend {name!r} is defined in a script or a function, where no other process can "
            'import it; put its class into a module, or use transport="local"'
        )
    return reference


def _info(member: Member) -> DeviceInfo:
    backend = get_backend(member.device.partition(":")[0])
    infos = {info.id: info for info in backend.discover()}
    if member.device not in infos:
        raise BackendError(
            f"member {member.id!r} needs {member.device!r}; found: {', '.join(infos) or 'none'}"
        )
    return infos[member.device]


def _environment(member: Member, info: DeviceInfo) -> dict[str, str]:
    cores = len(member.cores) or len(os.sched_getaffinity(0))
    # Members share this host: gloo must not look the host's name up to find an interface.
    defaults = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    return defaults | get_backend(info.backend).worker_environment(info, cores)
