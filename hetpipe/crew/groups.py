"""Finds stages whose replicas may sum gradients without the host, and a place where they meet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.transports import transport_of
from hetpipe.sdk.info import DeviceInfo


@contextmanager
def meeting_places(
    cluster: Cluster, members: Sequence[Sequence[str]], infos: Mapping[str, DeviceInfo]
) -> Iterator[dict[int, str]]:
    """Yield empty folders, by stage, where replicas may meet; remove them at the end.

    `members[n]` are the replicas of stage n.
    """
    stages = [n for n, own in enumerate(members) if may_group(cluster, own, infos)]
    if not stages:
        yield {}
        return
    with TemporaryDirectory(prefix="hetpipe-groups-") as root:
        folders = {n: Path(root, str(n)) for n in stages}
        for folder in folders.values():
            folder.mkdir()
        yield {n: str(folder) for n, folder in folders.items()}


def may_group(cluster: Cluster, members: Sequence[str], infos: Mapping[str, DeviceInfo]) -> bool:
    """Return whether the members' devices may sum tensors directly.

    They are accelerators of one backend with separate memories, in separate processes. A sum over
    an emulated link takes as long as its messages, so it needs them.
    """
    own = [infos[member] for member in members]
    return (
        len(own) > 1
        and cluster.connections is None  # the meeting place is a folder of this host
        and not transport_of(cluster.transport).in_threads
        and not any(info.on_cores for info in own)
        and len({info.backend for info in own}) == 1
        and len({info.memory_domain for info in own}) == len(own)
        and all(cluster.emulated_link(*pair) is None for pair in combinations(members, 2))
    )
