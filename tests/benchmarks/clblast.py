"""Compares hetpipe's matrix products with CLBlast's, on the same device and in the same queue.

    PYTHONPATH=tests python -m benchmarks.clblast DEVICE SECONDS ROUNDS

measures both in turns, and prints hetpipe's time, and CLBlast's time over hetpipe's. CLBlast is an
optional library of the system (Debian: libclblast1); if it is missing, the command says so.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from hetpipe.backends.opencl.platform.driver import driver
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.environment import clock
from hetpipe.errors import BackendError
from hetpipe.sdk.graph import canonical
from hetpipe.sdk.host.registry import open_device

LIBRARY = "clblast"
ROW_MAJOR, NOT_TRANSPOSED = 101, 111
SIZES = (256, 512, 1024, 2048)
CLOCK = clock()
LARGEST_ERROR = 1e-4


def load() -> Any | None:
    """Return CLBlast, or None if the system lacks it."""
    name = ctypes.util.find_library(LIBRARY)
    return None if name is None else ctypes.CDLL(name)


def multiplier(library: Any, queue: Any, n: int, abc: Sequence[Any]) -> Callable[[], None]:
    """Return a function that multiplies n x n matrices by CLBlast, c = a b, and waits for c.

    If CLBlast fails, the function raises `BackendError` with its error code.
    """
    size, pointers = ctypes.c_size_t(n), [ctypes.c_void_p(each.int_ptr) for each in abc]
    none, one, zero = ctypes.c_size_t(0), ctypes.c_float(1.0), ctypes.c_float(0.0)
    in_queue = ctypes.c_void_p(queue.int_ptr)

    def run() -> None:
        status = library.CLBlastSgemm(
            ROW_MAJOR, NOT_TRANSPOSED, NOT_TRANSPOSED, size, size, size, one, pointers[0], none,
            size, pointers[1], none, size, zero, pointers[2], none, size, ctypes.byref(in_queue),
            None,
        )  # fmt: skip
        if status != 0:
            raise BackendError(f"CLBlast cannot multiply {n} x {n} matrices: its code is {status}")
        queue.finish()

    return run


def measure(device_id: str, n: int, round_s: float, rounds: int) -> tuple[float, float] | None:
    """Return (hetpipe's seconds, CLBlast's time over hetpipe's), as medians over rounds.

    Return None without CLBlast. Raises `BackendError` if CLBlast's product is wrong.
    """
    library = load()
    if library is None:
        return None
    device: Any = open_device(device_id)
    generator = np.random.default_rng(0)
    hosts = [generator.standard_normal((n, n), dtype=np.float32) for _ in range(2)]
    inputs = [device.upload(host)[0] for host in hosts]
    tensors = [torch.from_numpy(host) for host in hosts]
    executable = device.compile(canonical(make_fx(lambda a, b: (torch.mm(a, b),))(*tensors)))
    cl, queue = driver(), device.queue
    unwritten, copying = np.full((n, n), np.nan, np.float32), cl.mem_flags.COPY_HOST_PTR
    out = cl.Buffer(device.context, cl.mem_flags.READ_WRITE | copying, hostbuf=unwritten)
    theirs = multiplier(library, queue, n, (inputs[0].memory.cl, inputs[1].memory.cl, out))
    ours = lambda: executable.run(inputs)[1].wait()  # noqa: E731 - one expression
    theirs()
    product, wide = np.empty((n, n), np.float32), hosts[0].astype(np.float64) @ hosts[1]
    cl.enqueue_copy(queue, product, out)
    with np.errstate(invalid="ignore"):  # infinities and NaN of a wrong product
        error = np.abs(product - wide).max() / np.abs(wide).max()
    if not error <= LARGEST_ERROR:  # also true for NaN
        raise BackendError(
            f"CLBlast's product of {n} x {n} matrices has an error of {error:.1e}; at most "
            f"{LARGEST_ERROR:g} is allowed"
        )
    pairs = [(_time(ours, round_s), _time(theirs, round_s)) for _ in range(rounds)]
    ratio = statistics.median(their_s / our_s for our_s, their_s in pairs)
    return statistics.median(our_s for our_s, _ in pairs), ratio


def _time(run: Callable[[], object], seconds: float) -> float:
    begin_s, count = CLOCK(), 0
    while (elapsed_s := CLOCK() - begin_s) < seconds or count == 0:
        run()
        count += 1
    return elapsed_s / count


def main(device_id: str, round_s: float, rounds: int) -> None:
    """Print a line for each size."""
    for n in SIZES:
        figures = measure(device_id, n, round_s, rounds)
        if figures is None:
            print("CLBlast is not installed (Debian: apt-get install libclblast1)")
            return
        our_s, ratio = figures
        print(f"{device_id}, mm {n}: {our_s * 1e3:.2f} ms, CLBlast {ratio:.2f} times as long")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
