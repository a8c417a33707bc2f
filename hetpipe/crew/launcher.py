"""Decides how a cluster's workers run, with which environment variables, and starts them.

Workers with the same library variables come from one fork server (`hetpipe.crew.forkserver`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import NamedTuple

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member, check_cores
from hetpipe.cluster.transports import transport_of
from hetpipe.crew.control import Control, Reports
from hetpipe.crew.fleet import Fleet, ProcessFleet, ThreadFleet
from hetpipe.crew.forkserver import server_for
from hetpipe.crew.plugboard import Outside, Plugboard
from hetpipe.crew.remote import LAUNCH_S, ControlPart, HostsFleet, RemoteFleet
from hetpipe.errors import BackendError, ClusterError, HetpipeError, WorkerError
from hetpipe.hosts.hosts import Hosts
from hetpipe.process import shadow
from hetpipe.sdk.host.isolation import blamed
from hetpipe.sdk.host.references import backend_reference, check_not_loading
from hetpipe.sdk.host.registry import (
    absent,
    companion_of,
    configure_backend,
    forget_options,
    get_backend,
    known_devices,
)
from hetpipe.sdk.info import DeviceInfo
from hetpipe.wire.host_messages import Launch
from hetpipe.wire.messages import Meeting, Open
from hetpipe.words import words

NAMED = 8  # most boards that a message names


@dataclass(frozen=True)
class _Worker:
    """A member and its device; for a worker process, also the backend's reference and variables."""

    member: Member
    info: DeviceInfo
    backend: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


class Timing(NamedTuple):
    """Seconds between signs of life, of silence after which a worker counts as dead, and of a
    start."""

    heartbeat_s: float
    silence_s: float
    start_timeout_s: float


class Launched(NamedTuple):
    """Workers that are starting."""

    fleet: Fleet
    control: Control


def launch(cluster: Cluster, timing: Timing) -> Launched:
    """Start one worker per member. The workers open their devices and then reply.

    Raises `ClusterError` if there are no members, if two members have the same id, if a member is a
    board without numerics, if hosts have not met, or if the transport does not connect them;
    `BackendError` for a missing device, `HetpipeError` for a backend that no process can import.
    """
    check_not_loading()
    _check_members(cluster)
    control = Control(labels_of(cluster))
    check_met(cluster)
    if cluster.connections is not None:
        fleet: Fleet = _launch_on_hosts(cluster, cluster.connections, control, timing)
        return Launched(fleet, control)
    transport, sharing = transport_of(cluster.transport), cluster.members_sharing_cores
    if transport.in_threads:
        workers = _workers(cluster, sharing, in_threads=True)
        orders = _orders(cluster, workers, timing, sharing, None)
        fleet = ThreadFleet(control, orders, transport)
    else:
        fleet = launch_here(cluster, control, timing, Plugboard(transport), sharing)
    return Launched(fleet, control)


def check_met(cluster: Cluster) -> None:
    """Raise `ClusterError` for hosts of a cluster file that have not met."""
    if cluster.connections is None and any(member.host for member in cluster.members):
        raise ClusterError(
            f"the hosts {words({member.host: 0 for member in cluster.members})} have not met: make "
            "this cluster by hp.Cluster.load_hosts, or start the command on each host by torchrun "
            "(docs/hosts.md)"
        )


def part_of(cluster: Cluster, host: str) -> Cluster:
    """Return the part of a cluster that one of its hosts starts."""
    members = tuple(member for member in cluster.members if member.host == host)
    used = {*map(_backend, members)}
    options = {name: options for name, options in cluster.options.items() if name in used}
    return replace(cluster, members=members, links={}, options=options, connections=None)


def labels_of(cluster: Cluster) -> list[str]:
    """Return the names of a cluster's workers in messages to the user."""
    return [f"worker {m.id!r} ({m.opened_device})" for m in cluster.members]


def launch_here(
    cluster: Cluster,
    control: Reports,
    timing: Timing,
    plugboard: Plugboard,
    sharing: Collection[str],
) -> Fleet:
    """Start processes of this host. `sharing` are the members that share cores with others."""
    transport = transport_of(cluster.transport)
    workers = _workers(cluster, sharing, in_threads=False)
    host, meeting = None, None
    if transport.meets:
        host, address = import_module(transport.module).host()
        meeting = Meeting(transport.module, address)
    orders = _orders(cluster, workers, timing, sharing, meeting)
    settings = [worker.settings for worker in workers]
    fleet = ProcessFleet(control, orders, settings, timing.silence_s, plugboard)
    fleet.keep = host
    return fleet


def _launch_on_hosts(
    cluster: Cluster, hosts: Hosts, control: Control, timing: Timing
) -> HostsFleet:
    transport, sharing = transport_of(cluster.transport), cluster.members_sharing_cores
    if not transport.crosses_hosts:
        raise ClusterError(
            f"transport {transport.name!r} does not connect hosts; use 'auto', or 'tls' if the "
            "network is not trusted"
        )
    places = [member.host for member in cluster.members]
    fleet = HostsFleet(control, hosts, places)
    crew = hosts.new_crew()
    configure_backends(cluster)  # the options may change the programs of other hosts' devices

    def start(host: str, control: ControlPart) -> Fleet:
        part = part_of(cluster, host)
        if host == hosts.own.name:
            plugboard = Plugboard(transport, Outside(hosts.wires, hosts.secret))
            return launch_here(part, control, timing, plugboard, sharing)
        launch = Launch(crew, fleet.wires, part, *timing, sharing)
        return RemoteFleet(control, hosts.others[host], launch)

    try:
        for host in sorted({*places}, key=lambda host: host == hosts.own.name):
            fleet.add(host, partial(start, host))
        fleet.wait()
    except BaseException:
        fleet.close()
        raise
    return fleet


def _check_members(cluster: Cluster) -> None:
    members = cluster.members
    if not members or len({member.id for member in members}) != len(members):
        raise ClusterError(
            f"a crew needs members with different ids, got {[member.id for member in members]}"
        )
    if boards := cluster.boards_without_numerics:
        names = ", ".join(board.id for board in boards[:NAMED])
        more = f" and {len(boards) - NAMED} more" if len(boards) > NAMED else ""
        raise ClusterError(
            f"not attached, as boards are only described: {names}{more}; plan and simulate with "
            "them, give them numerics (a device that computes their numbers), or name attached "
            "devices"
        )


def _workers(cluster: Cluster, sharing: Collection[str], *, in_threads: bool) -> list[_Worker]:
    configure_backends(cluster)
    return [
        _worker(m, m.id in sharing, in_threads, cluster.places.get(m.id)) for m in cluster.members
    ]


def _orders(
    cluster: Cluster,
    workers: Sequence[_Worker],
    timing: Timing,
    sharing: Collection[str],
    meeting: Meeting | None,
) -> list[Open]:
    return [
        Open(
            w.member,
            w.backend,
            timing.heartbeat_s,
            timing.start_timeout_s,
            rank,
            len(workers),
            w.member.id in sharing,
            meeting,
            cluster.options.get(_backend(w.member)),
        )
        for rank, w in enumerate(workers)
    ]


def configure_backends(cluster: Cluster) -> None:
    """Give backends their options and cancel the options of earlier clusters.

    Errors begin with the place of the options in the cluster's file.
    """
    for name in {_backend(member) for member in cluster.members} - cluster.options.keys():
        forget_options(name)
    for name, options in cluster.options.items():
        try:
            configure_backend(name, options.values, options.folder)
        except HetpipeError as error:
            raise type(error)(
                f"{options.place}: {error}" if options.place else str(error)
            ) from error


def _worker(member: Member, shares: bool, in_thread: bool, place: str | None) -> _Worker:
    """Return a member's worker. Errors begin with `place`, the device's line in a cluster file."""
    try:
        if in_thread:
            return _Worker(member, _info(member))
        check_cores(member)
        backend, info = _reference(member), _info(member)
        settings = settings_of(member, info, shares)
        server_for(settings)  # imports torch while the next member's device is searched
        return _Worker(member, info, backend, settings)
    except HetpipeError as error:
        if place is None:
            raise
        raise type(error)(f"{place}: {error}") from error


def _info(member: Member) -> DeviceInfo:
    infos = {info.id: info for info in known_devices(_backend(member))}
    if member.opened_device not in infos:
        use = "the numerics of " if member.numerics else ""
        raise BackendError(f"{use}member {member.id!r}: {absent(member.opened_device, infos)}")
    return infos[member.opened_device]


def missing_members(cluster: Cluster) -> list[str]:
    """Return the members whose devices their backends do not find, and members of lost hosts."""
    missing: list[str] = []
    if (hosts := cluster.connections) is not None:
        for host in dict.fromkeys(member.host for member in cluster.members):
            part = part_of(cluster, host)
            try:
                missing += hosts.call_each(LAUNCH_S, missing_members, {host: (part,)})[host]
            except WorkerError:
                missing += part.ids
        return missing
    for member in cluster.members:
        try:
            _info(member)
        except BackendError:
            missing.append(member.id)
    return missing


def _reference(member: Member) -> str:
    name = _backend(member)
    reference = backend_reference(name)
    if reference is None:
        raise HetpipeError(
            f"backend {name!r} is defined in a function or at a prompt, where no other process can "
            'load it; put its class at the top of a file, or use transport="local"'
        )
    module = reference.rpartition(":")[0]
    if not module.endswith(".py") and (other := shadow(module)) is not None:
        raise HetpipeError(
            f"backend {name!r} is in your module {module!r}, but a worker would import"
            f" {other} under that name, because installed packages come first: rename "
            "your module"
        )
    return reference


def _backend(member: Member) -> str:
    return member.opened_device.partition(":")[0]


def start_servers(cluster: Cluster, infos: Mapping[str, DeviceInfo]) -> None:
    """Start the fork servers that the workers need once they share no cores.

    They import torch, so that after the loss of a member no worker waits for it. Raises
    `WorkerError` for a lost host.
    """
    if transport_of(cluster.transport).in_threads:
        return
    if (hosts := cluster.connections) is not None:
        names = {member.host for member in cluster.members}
        parts = {host: (part_of(cluster, host), infos) for host in names}
        hosts.call_each(LAUNCH_S, start_servers, parts)
        return
    for member in cluster.members:
        server_for(settings_of(member, infos[member.id], shares=False))


THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables for the thread pools of the libraries that torch and numpy bring."""
KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # glibc accepts no larger value
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""For glibc: freed memory stays with the process. By default glibc returns the memory of
activations to the system, and every micro-batch faults the pages in again, which costs a tenth of a
step."""


def settings_of(member: Member, info: DeviceInfo, shares: bool) -> dict[str, str]:
    """Return the variables for a member's worker, which may share cores with others. Values of the
    member's backend replace values of a companion."""
    cores = len(member.cores) or len(os.sched_getaffinity(0))
    settings = usual_settings(cores)
    if shares:  # idle threads sleep; by default they spin on cores that the other worker needs
        settings["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    if companion := companion_of(info.backend):
        settings |= _backend_settings(companion, cores)
    return settings | _backend_settings(info, cores)


def _backend_settings(info: DeviceInfo, cores: int) -> dict[str, str]:
    with blamed(info.backend, f"fails to give the settings of {info.id}"):
        return get_backend(info.backend).worker_environment(info, cores)


def usual_settings(cores: int) -> dict[str, str]:
    """Return the variables of a worker with `cores` cores, before backends change them."""
    # Members share this host, so gloo need not look up the host's name to find an interface.
    gloo = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    return dict.fromkeys(THREADS, str(cores)) | KEEP_MEMORY | gloo
