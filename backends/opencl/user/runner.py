"""Single kernels on an OpenCL device: built from a text, launched once and checked.

Each array is in the middle of a larger buffer: a write beyond the array changes the guard before or
behind it, and a read there gives NaN. Under Oclgrind, which reports both, buffers have no guards.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from hetpipe.errors import BackendError
from hetpipe.sdk.kernels import (
    Array,
    DeviceLacksError,
    Flaw,
    KernelCall,
    KernelFaultError,
    KernelRunner,
    LocalMemory,
    Outline,
    Shipped,
)

from ..lower.launch import Kernel
from ..lower.signature import Parameter, parameters, uncommented
from ..platform.driver import driver, quiet
from ..platform.runtimes import Runtime
from ..platform.tuning import VARIABLE, candidates, keep, text_of, tuning_of
from .elements import CTYPES, ELEMENTS
from .images import ImageRoom, is_image
from .oclgrind_log import flaws_of
from .outline import outline_of
from .room import GUARD, Room

KERNEL = re.compile(r"\b(?:__)?kernel\b[^;{}]*?\bvoid\s+(\w+)\s*\(")
ERROR = re.compile(r":(\d+):\d+: (?:fatal )?error|error: \S+:(\d+):\d+:")
"""Line of an error in a compiler's log, in the formats of clang and PoCL."""
FEATURES: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (re.compile(r"\bhalf\d*\b(?!\s*\*)"), ("cl_khr_fp16",)),  # `half *` needs no extension
    (re.compile(r"\bdouble\d*\b"), ("cl_khr_fp64",)),
    (re.compile(r"\b\w*sub_group\w*\b"), ("cl_khr_subgroups", "cl_intel_subgroups")),
)
"""Words in a source, each with extensions; the device needs one of these extensions."""
CONDITION = re.compile(r"^\s*#\s*(?:if|ifdef|elif)\b.*?\b(cl_\w+)", re.M)
PRAGMA = re.compile(r"^\s*#\s*pragma\s+OPENCL\s+EXTENSION\s+(\w+)\s*:\s*(?:enable|require)", re.M)


class OpenCLRunner(KernelRunner):
    """Runs the kernels of a `.cl` file."""

    suffix = ".cl"

    def __init__(self, find: Callable[[str], tuple[Any, Runtime | None]]) -> None:
        """`find` returns pyopencl's device of an id, and its runtime if hetpipe knows it."""
        self._find = find
        self._opened: dict[str, _Opened] = {}

    def functions(self, source: str) -> Sequence[str]:
        return KERNEL.findall(uncommented(source))

    def outline(self, source: str, function: str, options: Sequence[str] = ()) -> Outline:
        return outline_of(source, function, options)

    def shipped(self) -> Sequence[Shipped]:
        root, kernels = files("hetpipe.kernels"), []
        folders = (each for each in root.iterdir() if each.is_dir() and "_" not in each.name)
        for folder in sorted(folders, key=lambda each: each.name):
            for file in sorted(folder.iterdir(), key=lambda each: each.name):
                if file.name.endswith(".cl"):
                    text, place = file.read_text(encoding="utf-8"), f"{folder.name}/{file.name}"
                    purpose = text.partition("\n")[0].removeprefix("//").strip()
                    names = self.functions(text)
                    kernels += [Shipped(folder.name, place, name, purpose) for name in names]
        return kernels

    def checks(self, device_id: str) -> bool:
        return device_id.split(":")[1] == "oclgrind"

    def checker_environment(self, log: Path) -> Mapping[str, str]:
        return {
            "OCLGRIND_LOG": str(log), "OCLGRIND_DATA_RACES": "1", "OCLGRIND_UNINITIALIZED": "1",
            "OCLGRIND_MAX_ERRORS": "200",
        }  # fmt: skip

    def tunings(self, device_id: str) -> Mapping[str, Mapping[str, str]]:
        in_use = tuning_of(*self._find(device_id))
        every = [in_use, *(each for each in candidates() if each != in_use)]
        return {str(each): {VARIABLE: text_of(each)} for each in every}

    def keep_tuning(self, device_id: str, name: str) -> None:
        cl_device, runtime = self._find(device_id)
        every = [tuning_of(cl_device, runtime), *candidates()]
        named = next((each for each in every if str(each) == name), None)
        if named is None:
            super().keep_tuning(device_id, name)
        else:
            keep(cl_device, named)

    def flaws_of(self, log: str) -> Sequence[Flaw]:
        return flaws_of(log)

    def line_that_writes(self, source: str, function: str, argument: str) -> int | None:
        name = re.escape(argument)
        writes = re.compile(
            rf"\b{name}\s*\[[^;]*\]\s*[-+*/|&^]?=[^=]|\bvstore\w*\s*\([^;]*\b{name}\b|"
            rf"\batomic_\w+\s*\([^;]*\b{name}\b|\*\s*{name}\b\s*[-+*/]?=[^=]"
        )
        text = uncommented(source)
        heads = [(head.start(), head[1]) for head in KERNEL.finditer(text)]
        begin = next((at for at, head in heads if head == function), 0)
        end = next((at for at, _ in heads if at > begin), len(text))
        found = writes.search(text, begin, end)
        return None if found is None else text.count("\n", 0, found.start()) + 1

    def run(self, device_id: str, call: KernelCall) -> tuple[dict[str, Array], Sequence[Flaw]]:
        return self._open(device_id).run(call)

    def timed(self, device_id: str, call: KernelCall) -> Callable[[int], float]:
        return self._open(device_id).timed(call)

    def _open(self, device_id: str) -> _Opened:
        if device_id not in self._opened:
            cl_device, _ = self._find(device_id)
            self._opened[device_id] = _Opened(cl_device, device_id, self.checks(device_id))
        return self._opened[device_id]


class _Opened:
    """A device with a queue and its built programs."""

    def __init__(self, cl_device: Any, device_id: str, checks: bool) -> None:
        cl = driver()
        self._id, self._checks = device_id, checks
        self._alignment = max(64, cl_device.mem_base_addr_align // 8)
        self._context = cl.Context([cl_device])
        self._queue = cl.CommandQueue(self._context)
        self._programs: dict[tuple[str, tuple[str, ...]], Any] = {}

    def run(self, call: KernelCall) -> tuple[dict[str, Array], Sequence[Flaw]]:
        launch, rooms = self._prepared(call)
        with _refusals(call):
            launch(1)
            arrays = {name: room.array() for name, room in rooms.items()}
        damage = [room.damage(name, call.function) for name, room in rooms.items()]
        return arrays, [flaw for flaw in damage if flaw is not None]

    def timed(self, call: KernelCall) -> Callable[[int], float]:
        launch, rooms = self._prepared(call)

        def seconds(count: int, memory: object = rooms) -> float:
            # `memory` lives as long as this function, because a kernel does not hold its arguments
            with _refusals(call):
                return launch(count) / count

        return seconds

    def _prepared(
        self, call: KernelCall
    ) -> tuple[Callable[[int], float], dict[str, Room | ImageRoom]]:
        """Return a function that launches a call some times and returns all seconds; memory.

        The seconds come from the device's events. If several kernels run at the same time, they
        come from the clock of the host.
        """
        cl = driver()
        launches = {call.function: (call.global_size, call.local_size), **call.beside}
        kernels = {name: self._kernel(call, name) for name in launches}
        declared = _declared(call, tuple(launches))
        with _refusals(call):
            rooms = self._rooms(call, declared)
            for name, kernel in kernels.items():
                for at, parameter in enumerate(declared[name]):
                    kernel.set_arg(at, _argument(call, parameter, rooms))
            self._queue.finish()
            timing = cl.command_queue_properties.PROFILING_ENABLE
            queues = [cl.CommandQueue(self._context, properties=timing) for _ in launches]
        work = [
            (queue, kernels[name], *sizes)
            for queue, (name, sizes) in zip(queues, launches.items(), strict=True)
            if 0 not in sizes[0]
        ]

        def launch(count: int) -> float:
            begin_s, events_s = time.perf_counter(), 0.0
            for _ in range(count):
                events = [cl.enqueue_nd_range_kernel(*each) for each in work]
                for queue in queues:
                    queue.flush()
                for queue in queues:
                    queue.finish()
                events_s += sum(event.profile.end - event.profile.start for event in events) / 1e9
            return events_s if len(queues) == 1 else time.perf_counter() - begin_s

        return launch, rooms

    def _rooms(
        self, call: KernelCall, declared: Mapping[str, Sequence[Parameter]]
    ) -> dict[str, Room | ImageRoom]:
        """Return memory for the arrays of a call: images where the source declares images."""
        images = {
            parameter.name: parameter.ctype.split()[-1]
            for parameters in declared.values()
            for parameter in parameters
            if is_image(parameter)
        }
        rooms: dict[str, Room | ImageRoom] = {}
        for name, value in call.arguments.items():
            if isinstance(value, np.ndarray) and name in images:
                place = (self._context, self._queue, self._id)
                rooms[name] = ImageRoom(place, call.function, name, images[name], value)
            elif isinstance(value, np.ndarray):
                rooms[name] = Room(self, value, name in call.inputs)
        return rooms

    def _kernel(self, call: KernelCall, function: str) -> Any:
        cl = driver()
        key = (call.source, call.options)
        if lacking := self._lacking(call.source):
            raise DeviceLacksError(lacking)
        try:
            with quiet():
                if key not in self._programs:
                    options = [*call.options, *(["-cl-opt-disable"] if self._checks else [])]
                    program = cl.Program(self._context, call.source)
                    self._programs[key] = program.build(options=options)
                return cl.Kernel(self._programs[key], function)
        except cl.Error as error:
            log = str(error).strip()
            at = ERROR.search(log)
            text = f"{self._id} cannot build it: {log}"
            line = int(at[1] or at[2]) if at else None
            raise KernelFaultError(Flaw("does not build", call.function, text, line)) from error

    def _lacking(self, source: str) -> str:
        """Return the feature that the source needs and the device lacks, in words; empty if none.

        Some compilers build such a source without an error and compute nonsense. A source that
        tests for an extension by `#if` or `#ifdef` does not need it.
        """
        extensions = self._context.devices[0].extensions.split()
        text = uncommented(source)
        there = {*extensions, *CONDITION.findall(text)}
        for words, names in FEATURES:
            if (found := words.search(text)) and not there.intersection(names):
                return f"the source uses {found[0]}, and the device has no {' nor '.join(names)}"
        for name in PRAGMA.findall(text):
            if name not in there:
                return f"the source enables {name}, which the device does not have"
        return ""

    def buffer(self, nbytes: int, content: Array, is_input: bool) -> tuple[Any, Any, int]:
        """Return (the whole buffer, its part for an array of `nbytes`, bytes of each guard).

        A checker reports reads of uninitialised memory, so under a checker only inputs are copied.
        """
        cl = driver()
        flags = cl.mem_flags.READ_WRITE
        if self._checks:
            whole = cl.Buffer(self._context, flags, max(nbytes, 1))
            if content.size and is_input:
                cl.enqueue_copy(self._queue, whole, content)
            return whole, whole, 0
        guard = self._alignment
        padded = np.full(guard + nbytes + guard, GUARD, np.uint8)
        padded[guard : guard + nbytes] = content
        whole = cl.Buffer(self._context, flags | cl.mem_flags.COPY_HOST_PTR, hostbuf=padded)
        return whole, whole.get_sub_region(guard, max(nbytes, 1)), guard

    def read(self, buffer: Any, nbytes: int) -> Array:
        content = np.empty(nbytes, np.uint8)
        if nbytes:
            driver().enqueue_copy(self._queue, content, buffer)
        return content


@contextmanager
def _refusals(call: KernelCall) -> Iterator[None]:
    """Raise `KernelFaultError` for an error of the driver in the block."""
    try:
        yield
    except driver().Error as error:
        sizes = f"global size {call.global_size}, local size {call.local_size}"
        text = f"cannot be launched with {sizes}: {str(error).strip()}"
        raise KernelFaultError(Flaw("wrong arguments", call.function, text)) from error


def _declared(call: KernelCall, functions: Sequence[str]) -> dict[str, Sequence[Parameter]]:
    """Return the kernels' parameters. Raises `KernelFaultError` if the call has other names."""
    try:
        declared: dict[str, Sequence[Parameter]] = {
            name: parameters(Kernel(call.source, name, call.options)) for name in functions
        }
    except BackendError as error:
        flaw = Flaw("wrong arguments", call.function, str(error))
        raise KernelFaultError(flaw) from error
    names = list(dict.fromkeys(each.name for some in declared.values() for each in some))
    if sorted(names) != sorted(call.arguments):
        text = (
            f"the source declares {', '.join(names)}; the specification has "
            f"{', '.join(call.arguments)}"
        )
        raise KernelFaultError(Flaw("wrong arguments", call.function, text))
    return declared


def _argument(call: KernelCall, parameter: Parameter, rooms: Mapping[str, Room | ImageRoom]) -> Any:
    """Return the value of a parameter. Raises `KernelFaultError` if it has another type."""
    value = call.arguments[parameter.name]
    if isinstance(value, LocalMemory):
        if parameter.points:
            return driver().LocalMemory(max(value.nbytes, 1))
    elif isinstance(value, np.ndarray):
        if is_image(parameter):
            return rooms[parameter.name].part
        element = ELEMENTS.get(parameter.element_of(value.size))
        if parameter.points and element == value.dtype.name.replace("bool", "uint8"):
            return rooms[parameter.name].part
    elif not parameter.points and parameter.ctype in CTYPES:
        kind: Any = CTYPES[parameter.ctype]
        if isinstance(value, int) or np.dtype(kind).kind == "f":
            return kind(value)
    form = value.dtype.name + " array" if isinstance(value, np.ndarray) else type(value).__name__
    text = f"the source declares {parameter}, the specification gives {parameter.name} as {form}"
    raise KernelFaultError(Flaw("wrong arguments", call.function, text))
