"""A full disk on an agent's host ends no training; what needs the disk says so by name."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from agents import end, free_address, patched_secret, start_agent
from crews import Crews
from found_devices import infos
from test_hosts import DEVICE, train

from hetpipe.cluster import Cluster
from hetpipe.crew.crew import Crew
from hetpipe.errors import WorkerError

POCL = "opencl:pocl:0"
FOLDERS = "/tmp", "/var/tmp", "/dev/shm"
FULL = f"""
for folder in {" ".join(FOLDERS)}; do
    mount -t tmpfs -o size=4k full $folder && head -c 4096 /dev/zero > $folder/full || exit 3
done
cd /tmp && exec "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, unshare")
@pytest.mark.skipif(
    any(
        Path(place).resolve().is_relative_to(folder)
        for place in (__file__, sys.prefix)
        for folder in FOLDERS
    ),
    reason="full disks would hide this checkout or its Python",
)
def test_a_full_disk_ends_no_training_and_is_named(crews: Crews) -> None:
    meet, names = free_address(), [DEVICE, *(i.id for i in infos() if i.id == POCL)]
    full = "unshare", "--mount", "sh", "-c", FULL, "sh"
    agent = start_agent("--meet", meet, "--name", "h1", before=full, HETPIPE_CACHE="/dev/shm/cache")
    devices = [f"h0/{DEVICE}", *(f"h1/{name}" for name in names)]
    try:
        with patched_secret():
            cluster = Cluster.hosts(meet, 2, name="h0", limit_s=60, devices=devices)
        assert cluster.connections is not None
        with Crew.start(replace(cluster, members=cluster.members[:2])) as crew:
            losses = train(crew, crew.cluster.ids, "1f1b")
        assert losses == train(crews((DEVICE,) * 2, "shared-memory"), "01", "1f1b")
        if POCL in names:
            reason = rf"'h1/{POCL}' .*No space left on device.* set TMPDIR"
            with pytest.raises(WorkerError, match=reason):
                Crew.start(cluster)
        cluster.connections.close()
    finally:
        status, words = end(agent)
    assert (status, "Traceback" in words) == (0, False), words


def test_an_agent_goes_on_without_its_log() -> None:
    """Each write to /dev/full fails as on a full disk."""
    listen = free_address()
    silent = "sh", "-c", 'exec "$@" > /dev/full 2>&1', "sh"
    agent = start_agent("--stay", "--listen", listen, "--name", "h1", before=silent)
    try:
        with patched_secret():
            for _ in range(2):
                devices = [f"h0/{DEVICE}", f"h1/{DEVICE}"]
                cluster = Cluster.hosts(agents=[listen], name="h0", limit_s=60, devices=devices)
                assert len(cluster.members) == 2
                assert cluster.connections is not None
                cluster.connections.close()
                assert agent.poll() is None
    finally:
        agent.kill()
        agent.communicate()
