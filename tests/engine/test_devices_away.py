"""Devices that cannot be opened after a loss are lost as well, however many they are."""

from __future__ import annotations

from pathlib import Path

from engine_backends import FaultyBackend
from test_lost_devices import batches, kill, opened

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import BackendOptions, Member
from hetpipe.crew.crew import Crew
from hetpipe.sdk.host.registry import register_backend


def test_devices_that_refuse_to_open_are_lost(tmp_path: Path) -> None:
    register_backend(FaultyBackend)
    devices = ["numpy:cpu:0", *["faulty:away:0"] * 3, "numpy:cpu:0"]
    members = tuple(Member(f"m{n}", device) for n, device in enumerate(devices))
    options = {"faulty": BackendOptions({"away": "file"}, tmp_path)}
    cluster = Cluster(members, transport="shared-memory", options=options)
    with Crew.start(cluster) as crew, opened(crew, members="012") as pipe:
        pipe.step(*batches(1)[0])
        (tmp_path / "file").touch()
        kill(crew, "m0")
        pipe.step(*batches(1)[0])
        assert sorted(pipe.lost[0].members) == ["m0", "m1", "m2", "m3"]
        assert pipe.plan.all_devices == ("m4",)
