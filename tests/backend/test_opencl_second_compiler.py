"""Two processes share the compilation of many kernels for PoCL, which compiles one at a time."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from hetpipe.backends.opencl.device import OpenCLDevice
from hetpipe.backends.opencl.platform.driver import driver, quiet
from hetpipe.backends.opencl.run import second_compiler
from hetpipe.backends.opencl.run.second_compiler import CACHE, SecondCompiler
from hetpipe.backends.opencl.run.specialise import MOST_NBYTES, FirstLaunch, Job, specialise
from opencl_devices import IDS, opencl_device

from hetpipe.errors import BackendError

POCL = "opencl:pocl:0"
pytestmark = pytest.mark.skipif(POCL not in IDS, reason="no PoCL: apt install pocl-opencl-icd")

SOURCE = """
__kernel void twice_NAME(__global float *a, const float b) { a[get_global_id(0)] += a[0] + b; }
__kernel void thrice_NAME(__global float *a, const int b) { a[get_global_id(0)] *= b; }
"""


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> SecondCompiler:
    """A second compiler that always starts, on any machine."""
    monkeypatch.setattr(second_compiler, "WORTH_S", 0.0)
    cores = frozenset(os.sched_getaffinity(0))
    monkeypatch.setattr(second_compiler, "_other_cores", lambda: cores)
    device = opencl_device(POCL)
    return SecondCompiler(device.context, device.context.devices[0], POCL)


def job() -> Job:
    """Return a job of two kernels that no process has compiled."""
    name = uuid4().hex
    launches = [
        FirstLaunch(f"twice_{name}", (4,), (2,), ([64], 1.0)),
        FirstLaunch(f"thrice_{name}", (4,), None, ([64], 3)),
    ]
    return Job(SOURCE.replace("NAME", name), (), launches)


def folders(job: Job) -> list[Path]:
    """Return the files of a job's kernels in PoCL's cache."""
    cache = Path(os.environ[CACHE])
    return [path for launch in job.launches for path in cache.glob(f"*/*/{launch.name}/*/*.so")]


def leave_all_jobs_to_the_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process wait without compiling until the other process has emptied the queue."""

    def wait(self: SecondCompiler, queue: SimpleQueue[Job]) -> dict[Any, Any]:
        while not queue.empty():
            time.sleep(0.01)
        return {}

    monkeypatch.setattr(SecondCompiler, "_compile_here", wait)


def values(device: OpenCLDevice, program: Any, job: Job) -> list[float]:
    """Return two elements of an array of zeros after both kernels of a job."""
    array = np.zeros(16, np.float32)
    flags = driver().mem_flags
    memory = driver().Buffer(device.context, flags.COPY_HOST_PTR, hostbuf=array)
    for launch, argument in zip(job.launches, (np.float32(1), np.int32(3)), strict=True):
        kernel = driver().Kernel(program, launch.name)
        kernel.set_args(memory, argument)
        driver().enqueue_nd_range_kernel(device.queue, kernel, (4,), launch.local_size)
    driver().enqueue_copy(device.queue, array, memory)
    return [float(array[1]), float(array[5])]


def test_a_job_survives_json() -> None:
    first = job()
    again = Job.of(json.loads(json.dumps(asdict(first))))
    assert json.dumps(asdict(again)) == json.dumps(asdict(first))
    assert again.launches[0].nbytes == 64
    assert [type(arg) for launch in again.launches for arg in launch.args] == [
        list,
        float,
        list,
        int,
    ]


@pytest.mark.slow
def test_another_process_compiles_for_this_one(
    compiler: SecondCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [job(), job()]
    own_caches: list[Path] = []

    def remembered(**options: Any) -> TemporaryDirectory[str]:
        folder = TemporaryDirectory(**options)
        own_caches.append(Path(folder.name))
        return folder

    with monkeypatch.context() as patched:
        leave_all_jobs_to_the_other_process(patched)
        patched.setattr(second_compiler, "TemporaryDirectory", remembered)
        assert compiler.compile(jobs) == {}
    (own_cache,) = own_caches
    device = opencl_device(POCL)
    for each in jobs:
        assert len(folders(each)) == 2
        with quiet():
            program = specialise(driver(), device.queue, Job(each.source, (), []))
        assert values(device, program, each) == pytest.approx([6.0, 0.0])
        assert len(folders(each)) == 2, "nothing was compiled again"
    assert not own_cache.exists(), "the other process's cache is gone"
    assert compiler.compile(jobs) == {}, "all is known, so nothing is to do"


@pytest.mark.slow
def test_both_processes_together_compile_all_jobs(compiler: SecondCompiler) -> None:
    jobs = [job() for _ in range(8)]
    built = compiler.compile(jobs)
    assert all(len(folders(each)) == 2 for each in jobs)
    device = opencl_device(POCL)
    for each in jobs:
        if (program := built.get((each.source, ()))) is not None:
            assert values(device, program, each) == pytest.approx([6.0, 0.0])


def test_few_jobs_are_compiled_by_one_process(
    compiler: SecondCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any) -> None:
        raise AssertionError("another process was started")

    monkeypatch.setattr(SecondCompiler, "_compile_elsewhere", never)
    few, alone = job(), job()
    monkeypatch.setattr(second_compiler, "WORTH_S", 1.0)
    assert set(compiler.compile([few])) == {(few.source, ())}
    monkeypatch.setattr(second_compiler, "WORTH_S", 0.0)
    monkeypatch.setattr(second_compiler, "_other_cores", lambda: None)
    assert set(compiler.compile([alone])) == {(alone.source, ())}
    assert len(folders(few)) == len(folders(alone)) == 2, "before their first launch"
    assert compiler.compile([few, alone]) == {}, "all is known, so nothing is to do"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["/bin/false", "/nowhere"])
def test_another_process_that_fails_is_replaced(
    compiler: SecondCompiler, monkeypatch: pytest.MonkeyPatch, command: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "executable", command)
    jobs = [job() for _ in range(4)]
    with caplog.at_level(logging.INFO, second_compiler.__name__):
        built = compiler.compile(jobs)
    assert len(built) >= 3, "at most one job went to the process that failed"
    assert "the second compiler of opencl:pocl:0 failed" in caplog.text


@pytest.mark.slow
def test_an_error_quotes_the_compiler(
    compiler: SecondCompiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = Job("__kernel void wrong() { nothing; }", (), [FirstLaunch("wrong", (1,), (1,), ())])
    with monkeypatch.context() as patched:
        patched.setattr(SecondCompiler, "_compile_elsewhere", lambda *arguments: None)
        with pytest.raises(BackendError, match=r"(?s)compiling kernel wrong.*identifier 'nothing'"):
            compiler.compile([wrong])
    leave_all_jobs_to_the_other_process(monkeypatch)
    with caplog.at_level(logging.INFO, second_compiler.__name__):
        compiler.compile([wrong])  # building the program in this process reports the error
    assert "undeclared identifier" in caplog.text


def test_a_launch_with_much_memory_is_not_compiled_ahead(compiler: SecondCompiler) -> None:
    large = job()
    launch = FirstLaunch(large.launches[0].name, (4,), (2,), ([MOST_NBYTES + 1], 1.0))
    compiler.compile([Job(large.source, (), [launch, large.launches[1]])])
    assert [path.parents[1].name for path in folders(large)] == [large.launches[1].name]


def test_a_full_disk_does_not_stop_compilation(
    compiler: SecondCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "touch", full)
    (own,) = jobs = [job()]
    assert set(compiler.compile(jobs)) <= {(own.source, ())}
    assert len(folders(own)) == 2, "it is compiled, though nobody will remember"
    monkeypatch.setattr(second_compiler, "TemporaryDirectory", full)
    (other,) = jobs = [job()]
    assert set(compiler.compile(jobs)) == {(other.source, ())}, "this process compiles all"


def test_without_room_in_the_cache_nothing_is_compiled(
    compiler: SecondCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PoCL aborts the process if a file cannot be written."""
    monkeypatch.setattr(second_compiler, "problem_of", lambda folder: "No space left on device")
    with pytest.raises(BackendError, match=r"opencl:pocl:0 .* \(No space left on device\): free"):
        compiler.compile([job()])
