"""Compilation in two processes, for runtimes that compile one kernel at a time.

    compute thread                   thread `second compiler`       child `specialise.py`

    takes a job from the queue:      takes a job from the    --->   builds its program, launches
    builds its program, launches     queue                          its kernels, in another cache
    its kernels                                              <---   answers "" or an error
    ... until the queue is empty     ... until it is empty
    moves the programs from the
    other cache into its cache

PoCL keeps a folder of compiled kernels for each program, and later finds them there.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

from hetpipe.caches import problem_of
from hetpipe.child import Child, ChildError
from hetpipe.entries import key_of
from hetpipe.errors import BackendError

from ..platform.driver import driver, errors, quiet
from . import specialise
from .specialise import CACHE, FirstLaunch, Job

KNOWN = "compiled"
"""Folder in the cache, with an empty file for each compiled kernel."""
BUILD_S, KERNEL_S = 0.2, 0.15
"""Approximate seconds to build a program, and to compile a kernel in it."""
WORTH_S = 2.5
"""With fewer seconds of work, this process compiles alone: another process takes 1 s to start."""

log = logging.getLogger(__name__)


class SecondCompiler:
    """Compiles for one device; with much to compile, a second process helps."""

    def __init__(self, context: Any, cl_device: Any, device_id: str) -> None:
        self._context = context
        self._cl_device = cl_device
        self._device_id = device_id

    def compile(self, jobs: Sequence[Job]) -> dict[tuple[str, tuple[str, ...]], Any]:
        """Compile all new jobs; return the programs built in this process, by source and options.

        The caller builds the other programs from the runtime's cache. The second process is not
        used if there is little to compile, no second core or no room in the cache. Raises
        `BackendError` with the compiler's log, or if the cache has no room left.
        """
        new = [job for job in map(_unknown, jobs) if job.launches]
        folder = Path(os.environ[CACHE])
        if new and (problem := problem_of(folder)):  # the compiler would end this process
            raise BackendError(
                f"{self._device_id} compiles kernels in {folder}, which has become unusable "
                f"({problem}): free space there, or set HETPIPE_CACHE to another folder"
            )
        work_s = sum(BUILD_S + KERNEL_S * len(job.launches) for job in new)
        queue: SimpleQueue[Job] = SimpleQueue()
        for job in sorted(new, key=lambda job: -len(job.source)):  # the longest sources first
            queue.put(job)
        cores = _other_cores() if work_s >= WORTH_S else None
        if cores is None:
            return self._compile_here(queue)
        try:
            own_cache = TemporaryDirectory(dir=folder)
        except OSError as error:
            log.info("the second compiler of %s has no cache: %s", self._device_id, error)
            return self._compile_here(queue)
        with own_cache as other_folder:
            other = threading.Thread(
                target=self._compile_elsewhere,
                args=(queue, cores, other_folder),
                name="second compiler",
            )
            other.start()
            try:
                return self._compile_here(queue)
            finally:
                for _ in _rest(queue):
                    pass
                other.join()
                _move(Path(other_folder), folder)

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
        """Let a child compile jobs from the queue until the queue is empty.

        If the child fails, the kernels of its last job are compiled at their first launch.
        """
        names = (self._cl_device.platform.name, self._cl_device.name)
        variables = {CACHE: folder}
        try:
            with Child(specialise.__name__, *names, environment=variables, cores=cores) as child:
                for job in _rest(queue):
                    child.send(asdict(job))
                    if error := child.receive()["error"]:
                        raise ChildError(error)
                    _remember(job)  # the files of a job are complete when the child answers
        except ChildError as error:
            log.info("the second compiler of %s failed: %s", self._device_id, error)


def _rest(queue: SimpleQueue[Job]) -> Iterator[Job]:
    """Take jobs from the queue that both threads share, until it is empty."""
    with suppress(Empty):
        while True:
            yield queue.get_nowait()


def _other_cores() -> frozenset[int] | None:
    """Return cores for the other process, or None if no second core is known.

    A pinned worker was started by a process with more cores: return the cores that only this parent
    has. An unpinned worker shares its cores.
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
    """Return the job without the kernels that were compiled before."""
    launches = [launch for launch in job.launches if not _place(job, launch).exists()]
    return Job(job.source, job.options, launches)


def _remember(job: Job) -> None:
    with suppress(OSError):  # no room in the cache: the next process compiles it again
        for launch in job.launches:
            place = _place(job, launch)
            place.parent.mkdir(exist_ok=True)
            place.touch()


def _place(job: Job, launch: FirstLaunch) -> Path:
    local_size = None if launch.local_size is None else tuple(launch.local_size)
    key = key_of(job.source, tuple(job.options), launch.name, local_size)
    return Path(os.environ[CACHE]) / KNOWN / key


def _move(source: Path, target: Path) -> None:
    """Move folders of programs into another cache of PoCL, unless it already has them."""
    for program in source.glob("*/*/program.bc"):
        folder = target / program.parent.relative_to(source)
        if not folder.exists():
            with suppress(OSError):  # no room in the cache: this process builds it again
                folder.parent.mkdir(exist_ok=True)
                program.parent.rename(folder)
