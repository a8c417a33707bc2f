"""The devices of a host, as `hetpipe devices` lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetpipe.cluster.local import local_members
from hetpipe.errors import ClusterError
from hetpipe.sdk.host.registry import (
    Provider,
    backend_names,
    discover_devices,
    get_backend,
    provider_of,
)
from hetpipe.sdk.info import DeviceInfo


@dataclass(frozen=True)
class Survey:
    """A host's devices, and facts about their backends by name.

    `joining` are the devices of an automatic cluster; `failures` are the reasons why backends are
    off; `kernels` are users' kernels, each with its operator.
    """

    infos: Sequence[DeviceInfo]
    joining: frozenset[str]
    providers: Mapping[str, Provider]
    failures: Mapping[str, str]
    kernels: Mapping[str, Sequence[tuple[str, str]]]


def survey(backends: Sequence[str] | None) -> Survey:
    """Return the survey of this host; `backends` narrows it."""
    infos, failures = discover_devices(None if backends is None else list(backends))
    try:
        members = local_members(backends, None, {}, None)
        joining = frozenset(member.device for member in members)
    except ClusterError:
        joining = frozenset()
    used = dict.fromkeys([info.backend for info in infos] + list(failures))
    kernels = {
        name: [(each.name, each.operator) for each in get_backend(name).user_kernels()]
        for name in dict.fromkeys(info.backend for info in infos)
    }
    providers = {name: provider_of(name) for name in used if name in backend_names()}
    return Survey(infos, joining, providers, failures, kernels)


def offered_twice(
    machines: Mapping[str, str], surveys: Mapping[str, Survey]
) -> dict[tuple[str, str], str]:
    """Return the devices that another host of the same machine offers first, by (host, id)."""
    first: dict[tuple[str, str], str] = {}
    twice = {}
    for host, each in surveys.items():
        for info in each.infos:
            place = machines[host], info.hardware or info.id
            before = first.setdefault(place, f"{host}/{info.id}")
            if not before.startswith(f"{host}/"):
                twice[host, info.id] = before
    return twice
