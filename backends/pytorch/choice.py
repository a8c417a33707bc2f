"""Chooses the way in which a device runs a program: eagerly, or as Inductor compiles it.

A card may also replay both from a captured graph. A choice by measurement runs all ways in turns on
the program's first inputs, and stores the fastest. So a later start neither measures nor compiles.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import fx

from hetpipe.entries import Entries, key_of
from hetpipe.errors import BackendError
from hetpipe.sdk import operators
from hetpipe.sdk.graph import graph_inputs, graph_rows
from hetpipe.sdk.indices import index_bounds
from hetpipe.sdk.info import DeviceInfo

from .inductor import compile_program, load_program
from .options import Options, lacks_compiler
from .program import Program, Way
from .replay import Recorder, Replayed

MARGIN = 0.02
"""Another way than the eager way must be faster by this share of the eager time."""
LEAST, LEAST_S, MOST = 9, 1.0, 50
"""Runs of each way in a comparison: at least `LEAST`, for `LEAST_S` seconds, at most `MOST`."""

_PROGRAMS = Entries("compiled", "torch", most=400)
_CHOICES = Entries("compiled", "json", most=4000)

log = logging.getLogger(__name__)


class Chooser:
    """Chooses the way of each program of a device.

    `wait` waits for the device's work. `record` captures graphs, if the device can.
    """

    def __init__(
        self,
        info: DeviceInfo,
        options: Options,
        device: torch.device,
        wait: Callable[[], None],
        record: Recorder | None = None,
    ) -> None:
        options.check(info.id, device.type)
        self._info = info
        self._wait = wait
        self._record = record
        self._tf32 = options.tf32
        self._checks = device.type == "cpu"  # on accelerators, graphs are guarded against indices
        self._option = options.compile
        if self._option == "measured" and (lack := lacks_compiler(device.type)):
            what, cure = lack
            log.warning("%s runs all graphs eagerly: Inductor needs %s: %s", info.id, what, cure)
            self._option = "eager"

    def way(
        self,
        graph: fx.GraphModule,
        donate: frozenset[int],
        program: Program,
        tensors: Sequence[torch.Tensor],
    ) -> Way:
        """Return the way to run `program`, which `graph` became, on inputs like `tensors`.

        Raises `BackendError` if the program must be compiled and Inductor cannot.
        """
        if self._option == "eager" or why_eager(program, self._checks):
            return program.call
        key = self._key(graph, donate)
        if self._option == "inductor":
            return self._compiled(key, program, tensors)
        steady = frozenset(i for i, n in enumerate(graph_inputs(graph)) if n.meta.get("steady"))
        chosen = _stored_choice(key)
        if chosen is None:
            ways = self._ways(key, program, tensors, steady)
            chosen = self._measured(key, ways, tensors, donate)
            return ways[chosen]
        name, _, graph_text = chosen.partition(" ")
        way = program.call if name == "eager" else self._compiled(key, program, tensors)
        return Replayed(way, steady, self._record) if graph_text and self._record else way

    def _key(self, graph: fx.GraphModule, donate: frozenset[int]) -> str:
        """Return the key of everything on which a compiled program and its speed depend."""
        rows = [
            (op, target if op == "call_function" else "", args, sorted(kwargs.items()), val)
            for op, _, target, args, kwargs, val, *_ in graph_rows(graph)
        ]
        return key_of(
            _code(), rows, sorted(donate), self._info.name, self._tf32, torch.get_num_threads(),
            torch.__version__, torch.version.cuda, torch.version.hip,
            torch.backends.cpu.get_cpu_capability(),
        )  # fmt: skip

    def _compiled(self, key: str, program: Program, tensors: Sequence[torch.Tensor]) -> Way:
        if data := _PROGRAMS.load(key):
            try:
                return load_program(data, program)
            except Exception as error:  # torch may raise anything for a program of another state
                _PROGRAMS.refuse(key, error)
        try:
            way, data = compile_program(program, tensors)
        except Exception as error:  # and for a program that it cannot compile
            lines = str(error).splitlines() or [type(error).__name__]
            full = [line for line in lines[1:] if os.strerror(errno.ENOSPC) in line]
            text = ": ".join([lines[0], *full[:1]])
            raise BackendError(
                f"{self._info.id}: Inductor cannot compile a graph of {len(program.calls)} "
                f'operators: {text}; set compile = "measured" or "eager" in [backend.pytorch]'
            ) from error
        if data:
            _PROGRAMS.store(key, data)
        return way

    def _ways(
        self,
        key: str,
        program: Program,
        tensors: Sequence[torch.Tensor],
        steady: frozenset[int],
    ) -> dict[str, Way]:
        """Return the ways to compare, by name, without the ways for which Inductor fails."""
        ways = {"eager": program.call}
        try:
            ways["inductor"] = self._compiled(key, program, tensors)
        except BackendError as error:
            log.warning("%s; the graph runs eagerly", error)
        if self._record is not None:
            for name, way in list(ways.items()):
                ways[f"{name} graph"] = Replayed(way, steady, self._record)
        return ways

    def _measured(
        self,
        key: str,
        ways: Mapping[str, Way],
        tensors: Sequence[torch.Tensor],
        donate: frozenset[int],
    ) -> str:
        """Return the name of the fastest way, and store it."""
        times_s = times_in_turns(ways, tensors, donate, self._wait)
        chosen = fastest(times_s)
        medians_s = {name: statistics.median(own) for name, own in times_s.items() if own}
        log.info("%s: %s, so the graph runs %s", self._info.id, medians_s, chosen)
        # Another worker may have measured the same program. All workers follow the first choice.
        if (earlier := _stored_choice(key)) and earlier in ways:
            return earlier
        _CHOICES.store(key, json.dumps({"way": chosen, "times_s": medians_s}).encode())
        return chosen


@cache
def _code() -> str:
    """Return a digest of the code that turns a graph into a program."""
    digest = hashlib.sha256()
    for module in (__file__, operators.__file__):
        for path in sorted(Path(str(module)).parent.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def why_eager(program: Program, checks: bool) -> str:
    """Return why a program can run only eagerly, or "".

    With `checks`, the eager program reports indices that are out of range. Compiled kernels do not
    report which index it is, and may end the process.
    """
    for node in program.calls:
        if node.meta.get("opaque"):
            return f"it calls {getattr(node.target, '__name__', node.target)}"
        if checks and index_bounds(node):
            return f"{node.target} checks its indices"
    return ""


def times_in_turns(
    ways: Mapping[str, Way],
    tensors: Sequence[torch.Tensor],
    donate: frozenset[int],
    wait: Callable[[], None],
) -> dict[str, list[float]]:
    """Return the seconds of some runs of each way; the ways take turns.

    The runs overwrite donated inputs. Their values are kept on the host and restored at the end. A
    way that fails, for example for lack of memory, has no times.
    """
    times_s: dict[str, list[float]] = {"eager": []}
    with torch.inference_mode():
        values = {index: tensors[index].to("cpu", copy=True) for index in donate}
        for name, way in ways.items():
            try:
                for _ in range(2):  # the first run loads kernels, the second may capture a graph
                    way(tensors)
                wait()
            except Exception as error:  # compiled code raises whatever torch raises in it
                if name == "eager":
                    raise
                log.warning("%s fails, so it is not chosen: %s", name, error)
            else:
                times_s[name] = []
        begin_s, runs = time.perf_counter(), 0
        while len(times_s) > 1 and (
            runs < LEAST or (runs < MOST and time.perf_counter() - begin_s < LEAST_S)
        ):
            for name, own_s in times_s.items():
                start_s = time.perf_counter()
                ways[name](tensors)
                wait()
                own_s.append(time.perf_counter() - start_s)
            runs += 1
        for index, value in values.items():
            tensors[index].copy_(value)
        wait()
    return times_s


def fastest(times_s: Mapping[str, Sequence[float]]) -> str:
    """Return the way with the least median of its ratios to the eager way, run by run.

    Return "eager" unless another way is faster by `MARGIN`.
    """
    eager_s = times_s["eager"]
    ratios = {
        name: statistics.median(own / eager for own, eager in zip(own_s, eager_s, strict=True))
        for name, own_s in times_s.items()
        if name != "eager"
    }
    best = min(ratios, key=lambda name: ratios[name], default="eager")
    return best if ratios.get(best, 1.0) < 1 - MARGIN else "eager"


def _stored_choice(key: str) -> str | None:
    data = _CHOICES.load(key)
    if data is None:
        return None
    chosen: str = json.loads(data)["way"]
    return chosen
