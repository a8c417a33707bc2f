"""Turns lowered graphs into the sources and records of a bundle."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from hetpipe.entries import key_of
from hetpipe.errors import BackendError
from hetpipe.sdk.formats.bundle import (
    Argument,
    Exported,
    ExportedSource,
    KernelEntry,
    LaunchEntry,
    Parameter,
    ProgramEntry,
)

from ..lower.arena import nbytes
from ..lower.expr import Value
from ..lower.launch import Kernel, Launch
from ..lower.lowering import Lowered
from ..lower.signature import parameters
from ..run.memory import room_nbytes
from ..run.specialise import FirstLaunch, Job
from .merged_source import Joined, joined

Directions = dict[Kernel, list[set[str]]]
"""By kernel, the ways in which launches use each parameter: "in", "out", "inout" or "value"."""


def kernel_hash(kernel: Kernel) -> str:
    """Return the hash of a kernel's text and options. A bundle finds a kernel by this hash."""
    return key_of(kernel.source, kernel.options)


def exported(programs: Mapping[str, Lowered]) -> Exported:
    """Return the programs' kernels in few sources. Raises `BackendError` if there are none."""
    launches = [launch for lowered in programs.values() for launch in lowered.launches]
    if not launches:
        raise BackendError(f"nothing to export: {', '.join(programs)} run no kernel")
    directions: Directions = {}
    for lowered in programs.values():
        _direct(lowered, directions)
    sources = joined(launch.kernel for launch in launches)
    names = {kernel: name for source in sources for kernel, name in source.names.items()}
    return Exported(
        tuple(_source(number, source, directions) for number, source in enumerate(sources)),
        tuple(
            ProgramEntry(name, tuple(_launch(launch, names) for launch in lowered.launches))
            for name, lowered in programs.items()
        ),
    )


def job_of(text: str, options: Sequence[str], programs: Sequence[ProgramEntry]) -> Job:
    """Return the job to build a source, and to launch each kernel once with each local size."""
    first: dict[tuple[object, ...], FirstLaunch] = {}
    for launch in (launch for program in programs for launch in program.launches):
        key = (launch.kernel, launch.local_size or launch.global_size)
        are_known = all(arg.shape is not None or arg.value is not None for arg in launch.arguments)
        if key not in first and are_known:
            args = list(map(_first_argument, launch.arguments))
            first[key] = FirstLaunch(launch.kernel, launch.global_size, launch.local_size, args)
    return Job(text, options, list(first.values()))


def _source(number: int, source: Joined, directions: Directions) -> ExportedSource:
    entries = tuple(
        KernelEntry(
            name,
            kernel.name,
            kernel_hash(kernel),
            tuple(
                Parameter(
                    each.name, f"{each.ctype} *" if each.points else each.ctype, _direction(ways)
                )
                for each, ways in zip(parameters(kernel), directions[kernel], strict=True)
            ),
        )
        for kernel, name in source.names.items()
    )
    file = "stage.cl" if number == 0 else f"stage-{number}.cl"
    return ExportedSource(file, source.text, source.options, entries)


def _launch(launch: Launch, names: Mapping[Kernel, str]) -> LaunchEntry:
    arguments = tuple(map(_argument, launch.args))
    return LaunchEntry(names[launch.kernel], launch.global_size, launch.local_size, arguments)


def _argument(arg: Value | int | float) -> Argument:
    if isinstance(arg, Value):
        return Argument(arg.dtype, tuple(arg.shape), None)
    dtype = "float32" if isinstance(arg, float) else "int32"
    return Argument(dtype, None, arg if math.isfinite(arg) else None)


def _direct(lowered: Lowered, directions: Directions) -> None:
    """Add to `directions` how the launches of a graph use their arguments.

    No launch writes an input of the graph. The first launch with any other tensor writes it.
    """
    inputs = {value.id for value in lowered.inputs}
    touched = set(inputs)
    for launch in lowered.launches:
        kernel = launch.kernel
        declared = parameters(kernel)
        ways = directions.setdefault(kernel, [set() for _ in declared])
        for parameter, arg, own in zip(declared, launch.args, ways, strict=True):
            if not isinstance(arg, Value):
                own.add("value")
            elif parameter.constant or arg.id in inputs:
                own.add("in")
            elif kernel.generated and (known := _by_text(kernel.source, parameter.name)):
                own.add(known)
            else:
                own.add("inout" if arg.id in touched else "out")
        touched |= launch.touches


def _direction(ways: set[str]) -> str:
    return next(iter(ways)) if len(ways) == 1 else "inout"


def _by_text(source: str, name: str) -> str:
    """Return how generated code uses a pointer: "in", "out" or "inout"; "" if no use is found."""
    text = source[source.index("__kernel") :]
    element = rf"\b{name}\[[^;=]*\]"
    writes = rf"(?:^|[;{{}}])\s*{element} =|vstore\w*\([^;]*,\s*{name}\b[^,;]*\);"
    is_written = re.search(writes, text, re.MULTILINE) is not None
    rest = re.sub(writes, "", text, flags=re.MULTILINE)
    is_read = re.search(rf"{element}|vload\w*\([^;]*\b{name}\b", rest) is not None
    return {(True, False): "in", (True, True): "inout", (False, True): "out"}.get(
        (is_read, is_written), ""
    )


def _first_argument(argument: Argument) -> int | float | list[int]:
    if argument.shape is not None:
        return [room_nbytes(nbytes(Value(0, argument.shape, argument.dtype)))]
    assert argument.value is not None
    return float(argument.value) if argument.dtype == "float32" else int(argument.value)
