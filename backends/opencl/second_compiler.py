"""Compiles many kernels on two cores, for runtimes that compile one at a time.

    compute thread                   thread `second compiler`       process `specialise.py`

    takes a job from the queue:      takes a job from the    --->   builds its program, launches
    builds its program, launches     queue                          its kernels, in a cache of its
    its kernels                                              <---   own: "", or an error
    ... until the queue is empty     ... until it is empty
    moves the programs from there
    into the cache of this process

PoCL keeps what it compiled in a folder for each program, and finds it there again.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

from hetpipe.entries import key_of

from . import specialise
from .driver import driver, errors, quiet
from .specialise import CACHE, FirstLaunch, Job

KNOWN = "compiled"
"""Folder, in the cache, with an empty file for each kernel that was compiled."""
BUILD_S, KERNEL_S = 0.2, 0.15
"""About the time of a program, and of a kernel in it."""
WORTH_S = 2.5
"""Less is compiled in this process alone: another one takes a second to start."""
DONE = '""\n'
"""The answer to a job without an error."""

log = logging.getLogger(__name__)


class SecondCompiler:
    """Another process that compiles for a device of this one, when there is much to compile."""

    def __init__(self, context: Any, cl_device: Any, device_id: str) -> None:
        self._context = context
        self._cl_device = cl_device
        self._device_id = device_id

    def compile(self, jobs: Sequence[Job]) -> dict[tuple[str, tuple[str, ...]], Any]:
        """Have the runtime compile all jobs. The programs that were built here, by source and
        options; the others will be built from the runtime's cache.

        Where there is little to compile, no second core, or no room in the cache, they are all
        built here. Raises `BackendError` with the compiler's log.
        """
        new = [job for job in map(_unknown, jobs) if job.launches]
        work_s = sum(BUILD_S + KERNEL_S * len(job.launches) for job in new)
        queue: SimpleQueue[Job] = SimpleQueue()
        for job in sorted(new, key=lambda job: -len(job.source)):  # the longest ones first
            queue.put(job)
        cores = _other_cores() if work_s >= WORTH_S else None
        if cores is None:
            return self._compile_here(queue)
        try:
            own_cache = TemporaryDirectory(dir=os.environ[CACHE])
        except OSError as error:
            log.info("the second compiler of %s has no cache: %s", self._device_id, error)
            return self._compile_here(queue)
        with own_cache as folder:
            other = threading.Thread(
                target=self._compile_elsewhere, args=(queue, cores, folder), name="second compiler"
            )
            other.start()
            try:
                return self._compile_here(queue)
            finally:
                for _ in _rest(queue):
                    pass
                other.join()
                _move(Path(folder), Path(os.environ[CACHE]))

    def _compile_here(self, queue: SimpleQueue[Job]) -> dict[tuple[str, tuple[str, ...]], Any]:
        built = {}
        commands = driver().CommandQueue(self._context)
        for job in _rest(queue):
            doing = f"compiling kernel {job.launches[0].name} with options {tuple(job.options)}"
            with quiet(), errors(self._device_id, doing):
                program = specialise.specialise(driver(), commands, job)
            built[job.source, tuple(job.options)] = program
            _remember(job)
        return built

    def _compile_elsewhere(
        self, queue: SimpleQueue[Job], cores: frozenset[int], folder: str
    ) -> None:
        """Let another process compile what is in the queue, until it is empty.

        If that process fails, kernels of its last job are compiled when they first run.
        """
        try:
            answer = self._ask(queue, cores, folder)
        except OSError as error:
            answer = str(error)
        if answer != DONE:
            log.info("the second compiler of %s failed: %s", self._device_id, answer or "it ended")

    def _ask(self, queue: SimpleQueue[Job], cores: frozenset[int], folder: str) -> str:
        """Have jobs done; the answer to the last one, which is empty if the process has ended."""
        place = (self._cl_device.platform.name, self._cl_device.name)
        numbers = ",".join(map(str, sorted(cores)))
        answer = DONE
        with subprocess.Popen(
            [sys.executable, specialise.__file__, *place, numbers, folder],
            text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                for job in _rest(queue):
                    print(job.to_json(), file=process.stdin, flush=True)
                    answer = process.stdout.readline()
                    if answer != DONE:
                        break
                    _remember(job)
            finally:
                process.kill()  # its files are complete when it answers
        return answer


def _rest(queue: SimpleQueue[Job]) -> Iterator[Job]:
    """Take jobs, in turn with the other thread, until there are none."""
    with suppress(Empty):
        while True:
            yield queue.get_nowait()


def _other_cores() -> frozenset[int] | None:
    """The cores that the user gave, without those of this worker; None if there are none.

    A worker that is pinned to some cores was started by a process that is not.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    own = given = os.sched_getaffinity(0)
    with suppress(OSError):  # the parent may have ended
        given = os.sched_getaffinity(os.getppid())
    if given - own:
        return frozenset(given - own)
    return frozenset(own) if len(own) > 1 else None


def _unknown(job: Job) -> Job:
    """The job without the kernels that were compiled before."""
    launches = [launch for launch in job.launches if not _place(job, launch).exists()]
    return Job(job.source, job.options, launches)


def _remember(job: Job) -> None:
    with suppress(OSError):  # a cache without room: the next process compiles it again
        for launch in job.launches:
            place = _place(job, launch)
            place.parent.mkdir(exist_ok=True)
            place.touch()


def _place(job: Job, launch: FirstLaunch) -> Path:
    local_size = None if launch.local_size is None else tuple(launch.local_size)
    key = key_of(job.source, tuple(job.options), launch.name, local_size)
    return Path(os.environ[CACHE]) / KNOWN / key


def _move(source: Path, target: Path) -> None:
    """Move the folders of programs into another cache of PoCL, unless it has them."""
    for program in source.glob("*/*/program.bc"):
        folder = target / program.parent.relative_to(source)
        if not folder.exists():
            with suppress(OSError):  # a cache without room: it is built here again
                folder.parent.mkdir(exist_ok=True)
                program.parent.rename(folder)
