"""Numbers, paths and words in environment variables."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hetpipe.errors import ClusterError, HetpipeError
from hetpipe.files import user_path
from hetpipe.words import short


def seconds(name: str, usual_s: float, error: type[HetpipeError] = HetpipeError) -> float:
    """Return the seconds in an environment variable; `usual_s` if it is unset or empty.

    Raises `error` for anything but a finite number above 0.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return usual_s
    try:
        value_s = float(text)
    except ValueError:
        value_s = math.nan
    if not 0 < value_s < math.inf:
        raise error(
            f"the environment variable {name} is {short(text)}; write a number of seconds above "
            f"0, such as {name}={usual_s:g}, or unset it"
        )
    return value_s


def paths(name: str, error: type[HetpipeError] = HetpipeError) -> list[Path]:
    """Return the paths in an environment variable, with the system's separator between them.

    Raises `error` for a path that no file can have, such as `~nobody/x`.
    """
    texts = [text for text in os.environ.get(name, "").split(os.pathsep) if text]
    return [_path(name, text, error) for text in texts]


def path(name: str, error: type[HetpipeError] = HetpipeError) -> Path | None:
    """Return the path in an environment variable; None if it is unset or empty.

    Raises `error` for a path that no file can have.
    """
    text = os.environ.get(name, "")
    return _path(name, text, error) if text else None


def _path(name: str, text: str, error: type[HetpipeError]) -> Path:
    try:
        return user_path(text, error)
    except error as fault:
        raise error(f"the environment variable {name}: {fault}") from None


def clock() -> Callable[[], float]:
    """Return the clock of benchmarks: wall time, or, with HETPIPE_CLOCK=process, CPU time.

    CPU time of this process suits a busy machine. Raises `HetpipeError` for another value.
    """
    word = os.environ.get("HETPIPE_CLOCK", "").strip()
    if word not in ("", "process"):
        raise HetpipeError(
            f"the environment variable HETPIPE_CLOCK is {short(word)}; write "
            "HETPIPE_CLOCK=process, or unset it"
        )
    return time.process_time if word else time.perf_counter


@dataclass(frozen=True)
class Ranks:
    """This process's place among the processes that torchrun started."""

    rank: int
    count: int
    master: str  # the host of rank 0 as torchrun names it, and the port of its store
    port: int


def torchrun_ranks() -> Ranks | None:
    """Return this process's rank; None if torchrun did not start it.

    Raises `ClusterError` for several processes on one host.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if on_host != 1:
        raise ClusterError(
            f"torchrun started {on_host} processes on this host, but hetpipe starts one worker per "
            "device by itself: use --nproc-per-node 1"
        )
    variables = os.environ
    place = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    return Ranks(int(variables["RANK"]), int(variables["WORLD_SIZE"]), *place)


def refuse_ranks(environment: Mapping[str, str] = os.environ) -> None:
    """Raise `HetpipeError` if a launcher such as torchrun started this process several times."""
    ranks = environment.get("WORLD_SIZE", "")
    rank = environment.get("RANK", environment.get("LOCAL_RANK"))
    if rank is None or not ranks.isdecimal() or int(ranks) < 2:
        return
    raise HetpipeError(
        f"this is process {rank} of {ranks} (RANK and WORLD_SIZE, as torchrun sets them), and each "
        "would train the whole model: hetpipe starts its own workers, one per device; run it once, "
        "without torchrun, or let the processes share their devices: cluster=hp.Cluster.hosts()"
    )
