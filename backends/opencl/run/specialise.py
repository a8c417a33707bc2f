"""Launches all kernels of a program on zeros, because PoCL compiles a kernel when it is launched.

As a child, this module is the second compiler (`second_compiler.py`). It does not import torch,
which takes seconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetpipe.child import Parent

CACHE = "POCL_CACHE_DIR"
"""Environment variable with the folder in which PoCL keeps compiled kernels."""
MOST_NBYTES = 256 << 20
"""Most bytes of a launch's tensors; the kernels of larger launches are compiled later."""


@dataclass(frozen=True)
class FirstLaunch:
    """A kernel to launch. An argument is a number, or `[nbytes]` for a tensor of that size."""

    name: str
    global_size: Sequence[int]
    local_size: Sequence[int] | None
    args: Sequence[int | float | Sequence[int]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensor arguments."""
        return sum(arg[0] for arg in self.args if isinstance(arg, Sequence))


@dataclass(frozen=True)
class Job:
    """A program to build, and the launches that make the runtime compile its kernels."""

    source: str
    options: Sequence[str]
    launches: Sequence[FirstLaunch]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Job:
        """Return the job with the fields that `asdict` returned."""
        launches = [FirstLaunch(**launch) for launch in fields["launches"]]
        return cls(fields["source"], fields["options"], launches)


def build(cl: Any, context: Any, source: str, options: Sequence[str]) -> Any:
    """Return the built program of a source. Raises pyopencl's errors."""
    program = cl.Program(context, source)
    # After this query pyopencl builds the program without its own disk cache. The lock
    # of that cache survives a killed process and blocks the next process for a minute.
    program.get_info(cl.program_info.CONTEXT)
    # "-w" suppresses warnings, which PoCL would print to the terminal.
    return program.build([*options, "-w"])


def specialise(cl: Any, queue: Any, job: Job) -> Any:
    """Build a job's program, launch its kernels and return it. Raises pyopencl's errors."""
    context = queue.context
    program = build(cl, context, job.source, job.options)
    for launch in job.launches:
        if launch.nbytes <= MOST_NBYTES:
            kernel = cl.Kernel(program, launch.name)
            args = [_argument(cl, context, arg) for arg in launch.args]
            kernel.set_args(*args)
            cl.enqueue_nd_range_kernel(queue, kernel, launch.global_size, launch.local_size)
            queue.finish()  # `args` live until here
    return program


def _argument(cl: Any, context: Any, arg: int | float | Sequence[int]) -> Any:
    if isinstance(arg, Sequence):
        flags = cl.mem_flags
        zeros = np.zeros(max(arg[0], 1), np.uint8)  # a zero is a valid index of any dimension
        return cl.Buffer(context, flags.READ_WRITE | flags.COPY_HOST_PTR, hostbuf=zeros)
    return np.float32(arg) if isinstance(arg, float) else np.int32(arg)


def main(platform: str, device: str) -> None:
    """Do the parent's jobs, and send the error after each job, or "".

    If the parent ends early, nobody needs the folder of PoCL's cache, so it is deleted here.
    """
    parent = Parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # sent when the parent ends
    warnings.simplefilter("ignore")
    import pyopencl as cl

    (chosen,) = (
        each
        for one in cl.get_platforms()
        if one.name == platform
        for each in one.get_devices()
        if each.name == device
    )
    queue = cl.CommandQueue(cl.Context([chosen]))
    try:
        for fields in parent.requests():
            error = ""
            try:
                specialise(cl, queue, Job.of(fields))
            except cl.Error as fault:
                error = str(fault)
            parent.send({"error": error})
    finally:
        shutil.rmtree(os.environ[CACHE])


if __name__ == "__main__":
    main(*sys.argv[1:])
