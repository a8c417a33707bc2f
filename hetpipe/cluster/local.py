"""The local cluster: chooses devices of this machine, and divides its cores among them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hetpipe.check.selftest_process import trusted
from hetpipe.cluster.member import Member, available_cores
from hetpipe.errors import BackendError, ClusterError
from hetpipe.sdk.host.registry import backend_names, discover_devices, faults_of
from hetpipe.sdk.info import DeviceInfo
from hetpipe.words import near


class DeviceWarning(UserWarning):
    """A device of this machine is not used."""


def local_members(
    backends: Sequence[str] | None,
    devices: Sequence[str] | None,
    emulate_speed: Mapping[str, float],
    rank: Callable[[DeviceInfo], float] | None,
) -> list[Member]:
    """Return the members of a cluster of this machine's devices.

    `devices` lists ids of devices, or prefixes of ids up to a colon; a prefix names all devices
    whose ids begin with it. A device that is named twice becomes two members. Without `devices`,
    every accelerator joins once, although several drivers may show it; and for each memory domain
    and backend one device of the kind "cpu". Of several devices, the device with the lowest `rank`
    joins; then any device before an untried one; then the first that is found. Emulated and
    reference devices join only if they are named. If neither `devices` nor `backends` is given, a
    device must also pass its self-test if it is untried or its backend is not hetpipe's.

    Only the needed backends are loaded. Members that compute on the host's cores divide these cores
    evenly. `emulate_speed` has the speeds by member id.

    Raises `ClusterError` for a name without a match, or if no device remains, and `BackendError`
    with the reason for a named device whose backend does not work.
    """
    infos, failures = discover_devices(_needed(backends, devices))
    if devices is not None:
        if not all(_matching(name, infos) for name in devices):  # the error lists all devices
            infos, failures = discover_devices(None if backends is None else list(backends))
        chosen = _named(devices, infos, failures)
    else:
        chosen = _default(infos, rank, _passes if backends is None else lambda info: True)
    if not chosen:
        raise ClusterError(f"no usable device: {_overview(infos, failures)}")
    members = _share_cores(_members(chosen), chosen)
    for member_id in emulate_speed:
        if member_id not in (member.id for member in members):
            ids = ", ".join(member.id for member in members)
            raise ClusterError(f"emulate_speed names {member_id!r}; the members are {ids}")
    return [replace(member, speed=emulate_speed.get(member.id, 1.0)) for member in members]


def _needed(backends: Sequence[str] | None, devices: Sequence[str] | None) -> list[str] | None:
    """Return the names of the backends to load; None for all."""
    if devices is None:
        return None if backends is None else list(backends)
    named = dict.fromkeys(device.partition(":")[0] for device in devices)
    return [name for name in named if backends is None or name in backends]


def _passes(info: DeviceInfo) -> bool:
    """Whether a device that the user has not named may join; warns if its self-test fails."""
    reason = trusted(info)
    if reason:
        warnings.warn(
            f"{info.id} stays out of the cluster, because its self-test failed: {reason}; "
            f"see hetpipe doctor --backends {info.backend}, or name the device to use it anyway",
            DeviceWarning,
            stacklevel=2,
        )
    return not reason


def _default(
    infos: Sequence[DeviceInfo],
    rank: Callable[[DeviceInfo], float] | None,
    may_join: Callable[[DeviceInfo], bool],
) -> list[DeviceInfo]:
    usable = [i for i in infos if not (i.capabilities.emulated or i.capabilities.reference)]
    order = {info.id: (rank(info) if rank else 0.0, info.capabilities.untried) for info in usable}
    drivers: dict[tuple[str, ...], str] = {}  # the driver that won, by processor or accelerator
    joining = set()
    place: tuple[str, ...]
    for info in sorted(usable, key=lambda info: order[info.id]):
        if info.kind == "cpu":
            place, driver = (info.memory_domain, info.backend), info.id
        else:  # parts of one card are several devices of one driver
            place, driver = (info.hardware or info.id,), info.id.rpartition(":")[0]
        if drivers.get(place, driver) == driver and may_join(info):
            drivers[place] = driver
            joining.add(info.id)
    return [info for info in usable if info.id in joining]


def _named(
    names: Sequence[str], infos: Sequence[DeviceInfo], failures: Mapping[str, str]
) -> list[DeviceInfo]:
    chosen: list[DeviceInfo] = []
    for name in names:
        matches = _matching(name, infos)
        if not matches:
            backend = name.partition(":")[0]
            if backend in failures:
                raise BackendError(f"no device {name!r}: {failures[backend]}")
            hint = near(name, [info.id for info in infos])
            faults = faults_of(backend) if backend in backend_names() else []
            texts = f"no device {name!r}; {hint}{_overview(infos, failures)}", *faults
            raise ClusterError("; ".join(texts))
        chosen += matches
    return chosen


def _matching(name: str, infos: Sequence[DeviceInfo]) -> list[DeviceInfo]:
    """Return the devices with this id or prefix."""
    return [i for i in infos if i.id == name or i.id.startswith(f"{name.rstrip(':')}:")]


def _overview(infos: Sequence[DeviceInfo], failures: Mapping[str, str]) -> str:
    lines = [f"found {', '.join(info.id for info in infos) or 'none'}"]
    lines += [f"backend {name} is unusable: {reason}" for name, reason in failures.items()]
    return "; ".join(lines)


def _members(chosen: Sequence[DeviceInfo]) -> list[Member]:
    """Return members with the devices' ids; #0, #1, ... follow the id of a device named several
    times."""
    total = Counter(info.id for info in chosen)
    used: Counter[str] = Counter()
    members = []
    for info in chosen:
        suffix = f"#{used[info.id]}" if total[info.id] > 1 else ""
        used[info.id] += 1
        members.append(Member(info.id + suffix, info.id))
    return members


def _share_cores(members: Sequence[Member], infos: Sequence[DeviceInfo]) -> list[Member]:
    """Divide the host's cores evenly among the members that compute on them; each member gets
    neighbouring cores. If there are fewer cores than members, each member gets one core, and some
    members share a core. The last cores stay free for the threads that launch the work of other
    members, one for each, if at least half of all cores remain, and one for each member."""
    cores = available_cores()
    hosted = [member for member, info in zip(members, infos, strict=True) if info.on_cores]
    rest = len(cores) - (len(members) - len(hosted))
    if rest >= max(len(hosted), len(cores) / 2):
        cores = cores[:rest]
    shares: dict[str, tuple[int, ...]] = {}
    for index, member in enumerate(hosted):
        lo = index * len(cores) // len(hosted)
        hi = (index + 1) * len(cores) // len(hosted)
        shares[member.id] = cores[lo:hi] or (cores[lo],)
    return [replace(member, cores=shares.get(member.id, ())) for member in members]
