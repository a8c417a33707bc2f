"""An agent names the controller that is killed or stopped, and no worker is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from agents import SECRET, end, free_address, start_agent
from crews import eventually, has_ended

LIMIT_S = 30.0  # far beyond what a quiet machine needs
CONTROLLER = """
import os, sys, time
from hetpipe.cluster import Cluster
from hetpipe.crew.crew import Crew

devices = [f"{host}/numpy:cpu:0" for host in ("the-boss", "h1")]
cluster = Cluster.hosts(sys.argv[1], 2, name="the-boss", limit_s=60, devices=devices)
with Crew.start(cluster) as crew:
    workers = crew.call(devices, "engine_backends:pid")
    fork = os.fork()  # as a DataLoader's worker, which has the connections as well
    if fork:
        print(fork, *workers, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_controller_is_named(number: int) -> None:
    meet = free_address()
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, meet], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "HETPIPE_SECRET": SECRET, "PYTHONPATH": os.path.dirname(__file__)},
    )  # fmt: skip
    agent = start_agent("--meet", meet, "--name", "h1", PYTHONPATH=os.path.dirname(__file__))
    fork = 0
    try:
        assert controller.stdout is not None
        fork, *workers = [int(word) for word in controller.stdout.readline().split()]
        assert len(workers) == 2
        controller.send_signal(number)
        status, words = end(agent)
        assert status == 1
        assert "the controller 'the-boss' is lost: " in words
        assert "Traceback" not in words
        assert eventually(lambda: all(map(has_ended, workers)), LIMIT_S)
    finally:
        controller.kill()
        if fork:
            os.kill(fork, signal.SIGKILL)
        controller.communicate()
        agent.kill()
