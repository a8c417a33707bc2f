"""The end of worker processes that were killed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess

import pytest

from hetpipe.crew import forkserver
from hetpipe.crew.forkserver import WorkerProcess
from hetpipe.wire.messages import STATUS


def test_a_worker_that_a_driver_keeps_in_the_kernel_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel ends such a process only after its system call, if ever."""
    monkeypatch.setattr(forkserver, "UNKILLABLE_S", 0.2)
    monkeypatch.setattr(forkserver, "REPORT_S", 0.05)
    status, server_end = os.pipe()
    with subprocess.Popen(["sleep", "60"]) as server:
        try:
            os.write(server_end, STATUS.pack(server.pid))
            worker = WorkerProcess(status, server)
            assert worker.pid == server.pid
            with caplog.at_level(logging.WARNING, "hetpipe"):
                worker.wait_for_end(0.1)
            assert worker.wait(0.0) == -signal.SIGKILL
            assert f"worker process {server.pid} was killed" in caplog.text
        finally:
            server.kill()
            os.close(server_end)
