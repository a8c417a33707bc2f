"""Built programs of a device, by source and options."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..lower.arena import nbytes
from ..lower.expr import Value
from ..lower.launch import Kernel, Launch, with_helpers
from ..platform.driver import driver, errors, quiet
from .binaries import Binaries
from .groups import groups_of
from .memory import room_nbytes
from .second_compiler import SecondCompiler
from .specialise import FirstLaunch, Job, build


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
        """Return a new `cl.Kernel`, which shares its arguments with no other."""
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
    """A program to build: the sources in `parts`, with their helpers. `name` names a kernel."""

    source: str
    options: tuple[str, ...]
    parts: tuple[str, ...]
    name: str

    def job(self, launches: Sequence[Launch]) -> Job:
        """Return the job to compile it: for each kernel and local size, its first launch."""
        first: dict[tuple[object, ...], FirstLaunch] = {}
        for launch in launches:
            kernel = launch.kernel
            if kernel.options == self.options and kernel.source in self.parts:
                sizes = launch.local_size or launch.global_size  # else the runtime chooses
                first.setdefault((kernel.name, sizes), _first(launch))
        return Job(self.source, self.options, list(first.values()))


def _first(launch: Launch) -> FirstLaunch:
    args = [[room_nbytes(nbytes(arg))] if isinstance(arg, Value) else arg for arg in launch.args]
    return FirstLaunch(launch.kernel.name, launch.global_size, launch.local_size, args)
