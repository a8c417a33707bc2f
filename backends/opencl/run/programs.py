"""Built programs of a device, by source and options.

Binaries are stored for runtimes that forget compiled programs. Intel's runtimes compile a matrix
product in seconds, and load its binary in milliseconds.

Generated kernels are grouped into programs. The groups are stored too: runtimes store compiled
programs under their text, so every process should build the same programs. Without stored groups, a
process that compiles single layers before whole stages would put the same kernels into other
programs than a process that compiles only the stages.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hetpipe.entries import Entries, key_of

from ..lower.arena import nbytes
from ..lower.expr import Value
from ..lower.launch import Kernel, Launch, helpers_identity, with_helpers
from ..platform.driver import driver, errors, quiet
from ..platform.runtimes import cpu_flags, target_arch
from .memory import room_nbytes
from .second_compiler import SecondCompiler
from .specialise import FirstLaunch, Job, build

BINARIES = Entries("opencl/programs", "bin", most=2000)
GROUPS = Entries("opencl/groups", "json", most=5000)
MOST_KERNELS = 24
"""The most new kernels in a program: two compilers share the work by programs, not by kernels."""

Sources = tuple[str, ...]


class Programs:
    """Builds each (source, options) once; generated kernels that are new share a program."""

    def __init__(
        self,
        context: Any,
        device_id: str,
        binaries: Binaries | None = None,
        second: SecondCompiler | None = None,
    ) -> None:
        """Keep programs in memory, and also on disk if `binaries` is given.

        If `second` is given, another process compiles a part of the programs when there are many.
        """
        self._context = context
        self._device_id = device_id
        self._binaries = binaries
        self._built: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._second = second
        self._lock = threading.Lock()

    def prepare(self, kernels: Iterable[Kernel], launches: Sequence[Launch] = ()) -> None:
        """Build the missing programs. Raises `BackendError` with the compiler's log.

        `launches` are the launches to come: some runtimes compile only at a launch.
        """
        with self._lock:
            missing = list(self._missing(kernels))
            built = {}
            if self._second is not None and launches:
                built = self._second.compile([program.job(launches) for program in missing])
            for program in missing:
                key = program.source, program.options
                of_runtime = built.get(key) or self._build(*key, program.name)
                self._built |= {(part, program.options): of_runtime for part in program.parts}

    def kernel(self, kernel: Kernel) -> Any:
        """Return a new `cl.Kernel`, which shares its arguments with no other kernel object."""
        doing = f"looking up kernel {kernel.name}"
        # pyopencl generates a launcher for each kernel, and warns if two kernels share a name.
        with quiet(), errors(self._device_id, doing):
            return driver().Kernel(self._built[kernel.source, kernel.options], kernel.name)

    def _missing(self, kernels: Iterable[Kernel]) -> Iterator[_Program]:
        new = [k for k in dict.fromkeys(kernels) if (k.source, k.options) not in self._built]
        generated = [kernel for kernel in new if kernel.generated]
        names = {kernel.source: kernel.name for kernel in generated}
        for sources in groups_of(generated):
            text = "\n".join(sources)
            name = next(names[source] for source in sources if source in names)
            yield _Program(with_helpers(text), (), sources, name)
        others = {(k.source, k.options): k.name for k in new if not k.generated}
        for (source, options), name in others.items():
            yield _Program(source, options, (source,), name)

    def _build(self, source: str, options: tuple[str, ...], name: str) -> Any:
        kept = self._binaries
        program = None if kept is None else kept.load(self._context, source, options)
        if program is None:
            program = self._compile(source, options, name)
            if kept is not None:
                kept.store(program, source, options)
        return program

    def _compile(self, source: str, options: tuple[str, ...], name: str) -> Any:
        doing = f"building kernel {name} with options {options}"
        with quiet(), errors(self._device_id, doing):
            return build(driver(), self._context, source, options)


@dataclass(frozen=True)
class _Program:
    """A program to build: the sources in `parts`, with their helpers. `name` is a kernel's name."""

    source: str
    options: tuple[str, ...]
    parts: tuple[str, ...]
    name: str

    def job(self, launches: Sequence[Launch]) -> Job:
        """Return the job that compiles the program: its first launch of each kernel and size."""
        first: dict[tuple[object, ...], FirstLaunch] = {}
        for launch in launches:
            kernel = launch.kernel
            if kernel.options == self.options and kernel.source in self.parts:
                # Without a local size, the runtime chooses one.
                sizes = launch.local_size or launch.global_size
                first.setdefault((kernel.name, sizes), _first(launch))
        return Job(self.source, self.options, list(first.values()))


def _first(launch: Launch) -> FirstLaunch:
    args = [[room_nbytes(nbytes(arg))] if isinstance(arg, Value) else arg for arg in launch.args]
    return FirstLaunch(launch.kernel.name, launch.global_size, launch.local_size, args)


def facts_of(cl_device: Any, on_cores: bool) -> dict[str, str]:
    """Return the facts, by name, that decide whether a device can use a binary; with `on_cores`,
    also the facts of the host's processor."""
    platform = cl_device.platform
    facts = {
        "platform": platform.name, "platform version": platform.version, "device": cl_device.name,
        "device version": cl_device.version, "driver": cl_device.driver_version,
    }  # fmt: skip
    if on_cores:
        facts |= {"target": target_arch(), "processor flags": key_of(sorted(cpu_flags()))}
    return facts


class Binaries:
    """The stored programs of one device, for its current driver and processor."""

    def __init__(self, cl_device: Any, device_id: str) -> None:
        self._cl_device = cl_device
        self._device_id = device_id
        self._facts = tuple(facts_of(cl_device, on_cores=True).items())

    def load(self, context: Any, source: str, options: tuple[str, ...]) -> Any:
        """Return the stored program, or None. Warns (`CacheWarning`) if the runtime refuses it."""
        key = self._key(source, options)
        binary = BINARIES.load(key)
        if binary is None:
            return None
        cl = driver()
        try:
            with quiet():
                return cl.Program(context, [self._cl_device], [binary]).build()
        except cl.Error as error:
            BINARIES.refuse(key, error)
            return None

    def store(self, program: Any, source: str, options: tuple[str, ...]) -> None:
        """Store the binary that the runtime has compiled from `source`."""
        with errors(self._device_id, "reading a compiled program"):
            (binary,) = program.get_info(driver().program_info.BINARIES)
        BINARIES.store(self._key(source, options), binary)

    def _key(self, source: str, options: tuple[str, ...]) -> str:
        return key_of(self._facts, source, options)


def groups_of(kernels: Sequence[Kernel]) -> Iterator[Sources]:
    """Yield the kernel sources of each program to build; together they have all `kernels`.

    Kernels without a stored group form new groups, which are stored.
    """
    new, grouped = [], set[str]()
    for kernel in kernels:
        if kernel.source in grouped:
            continue
        sources = _group_of(kernel)
        if sources is None:
            new.append(kernel)
        else:
            grouped.update(sources)
            yield sources
    rest = tuple(kernel.source for kernel in new if kernel.source not in grouped)
    for begin in range(0, len(rest), MOST_KERNELS):
        group = rest[begin : begin + MOST_KERNELS]
        for source in group:
            GROUPS.store(_group_key(source), json.dumps(group).encode())
        yield group


def _group_of(kernel: Kernel) -> Sources | None:
    content = GROUPS.load(_group_key(kernel.source))
    return None if content is None else tuple(json.loads(content))


def _group_key(source: str) -> str:
    """Return the key of a kernel's group, which depends on the text of all helper functions.

    Without that text, a key could find a group of an older version of this package. Other kernels
    of that group may call functions that no longer exist.
    """
    return key_of(helpers_identity(), source)
