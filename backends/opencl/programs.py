"""Built programs of one device, by source and options."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from .binaries import Binaries
from .builder import Kernel, kernel_source
from .driver import driver, errors, quiet
from .groups import groups_of

HELPERS = {"exact_erf(": "erf.cl"}
"""The file that defines each function that generated kernels may call."""


class Programs:
    """Builds each (source, options) once; new generated kernels share a program."""

    def __init__(self, context: Any, device_id: str, binaries: Binaries | None = None) -> None:
        """With `binaries`, programs are also kept on disk."""
        self._context = context
        self._device_id = device_id
        self._binaries = binaries
        self._built: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._lock = threading.Lock()

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        """Build the missing programs. Raises `BackendError` with the compiler's log."""
        with self._lock:
            new = [k for k in dict.fromkeys(kernels) if (k.source, k.options) not in self._built]
            generated = [kernel for kernel in new if kernel.generated]
            names = {kernel.source: kernel.name for kernel in generated}
            for sources in groups_of(generated):
                text = "\n".join(sources)
                helpers = [kernel_source(f) for call, f in HELPERS.items() if call in text]
                name = next(names[source] for source in sources if source in names)
                program = self._build("\n".join([*helpers, text]), (), name)
                self._built |= {(source, ()): program for source in sources}
            for kernel in new:
                key = (kernel.source, kernel.options)
                if key not in self._built:
                    self._built[key] = self._build(*key, kernel.name)

    def kernel(self, kernel: Kernel) -> Any:
        """A new `cl.Kernel`, with arguments of its own."""
        doing = f"looking up kernel {kernel.name}"
        # pyopencl writes a caller for each kernel, and warns where two kernels have one name.
        with quiet(), errors(self._device_id, doing):
            return driver().Kernel(self._built[kernel.source, kernel.options], kernel.name)

    def _build(self, source: str, options: tuple[str, ...], name: str) -> Any:
        kept = self._binaries
        program = None if kept is None else kept.load(self._context, source, options)
        if program is None:
            program = self._compile(source, options, name)
            if kept is not None:
                kept.store(program, source, options)
        return program

    def _compile(self, source: str, options: tuple[str, ...], name: str) -> Any:
        cl = driver()
        doing = f"building kernel {name} with options {options}"
        with quiet(), errors(self._device_id, doing):
            program = cl.Program(self._context, source)
            # Reading from the program makes pyopencl build it without its own disk cache: the
            # cache's lock survives a killed process and stops the next one for a minute.
            program.get_info(cl.program_info.CONTEXT)
            # "-w", because PoCL prints warnings to the terminal.
            return program.build([*options, "-w"])
