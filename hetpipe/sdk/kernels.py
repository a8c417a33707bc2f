"""Kernels by themselves: what a backend offers to those who write and test kernels for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt

from hetpipe.errors import BackendError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class LocalMemory:
    """An argument that is memory of a work-group."""

    nbytes: int


@dataclass(frozen=True)
class KernelCall:
    """One launch of the kernel `function` in the text of the file `path`.

    `arguments` has, by the names of the parameters, arrays (C-contiguous), numbers and local
    memory; `inputs` are the names of the arrays that the kernel reads, `outputs` those that it
    writes.
    """

    path: Path
    source: str
    function: str
    options: tuple[str, ...]
    arguments: Mapping[str, Array | int | float | LocalMemory]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    global_size: tuple[int, ...]
    local_size: tuple[int, ...] | None
    beside: Mapping[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = field(
        default_factory=dict
    )
    """Further kernels of the source that run at the same time, with global and local size; each
    takes the arguments that its parameters name."""


@dataclass(frozen=True)
class Flaw:
    """A fault of a kernel.

    `kind` is one of: does not build, wrong arguments, race, out of bounds, uninitialised read,
    not written, not deterministic, overwrites an input, wrong result, hangs, crashes.
    """

    kind: str
    kernel: str
    text: str
    line: int | None = None
    """Of the source, from 1."""


@dataclass(frozen=True)
class Shipped:
    """A kernel that a backend brings: its family (a folder), file, name, and the file's purpose."""

    family: str
    file: str
    name: str
    purpose: str


class KernelRunner(ABC):
    """Runs kernels of a backend's language by themselves, for `hetpipe kernels`.

    It is used in a process of its own for each device, which may crash or hang.
    """

    suffix: str
    """Of files with kernels: `.cl`."""

    @abstractmethod
    def functions(self, source: str) -> Sequence[str]:
        """The names of the kernels in a source, in order."""

    @abstractmethod
    def run(self, device_id: str, call: KernelCall) -> tuple[dict[str, Array], Sequence[Flaw]]:
        """The tensors after one run, outputs at least, and the accesses beyond tensors that it saw.

        Raises `KernelFaultError` where the kernel cannot be built or launched, and
        `DeviceLacksError` where that is because the device has no such feature.
        """

    @abstractmethod
    def shipped(self) -> Sequence[Shipped]:
        """The kernels that the backend brings."""

    def tunings(self, device_id: str) -> Mapping[str, Mapping[str, str]]:
        """Ways to divide the work of kernels, by name: variables of a process that measures one.

        The first is the one in use. Default: none.
        """
        return {}

    def keep_tuning(self, device_id: str, name: str) -> None:
        """Use a way of `tunings` from now on, in every process of this user.

        Raises `BackendError` for a name that is not there.
        """
        raise BackendError(f"the kernels of {device_id} have no tuning {name!r}")

    def checks(self, device_id: str) -> bool:
        """Whether a device is a checker: an interpreter that sees every access; default: none."""
        return False

    def checker_environment(self, log: Path) -> Mapping[str, str]:
        """Variables of a checker's process, which writes its findings to `log`."""
        return {}

    def flaws_of(self, log: str) -> Sequence[Flaw]:
        """The flaws that a checker has written down, each kind and line once."""
        return ()

    def line_that_writes(self, source: str, function: str, argument: str) -> int | None:
        """The first line of a kernel that writes an argument, if it can be told; default: none."""
        return None


class KernelFaultError(Exception):
    """A kernel cannot be built, or not with these arguments; `flaw` says why."""

    def __init__(self, flaw: Flaw) -> None:
        super().__init__(flaw.text)
        self.flaw = flaw


class DeviceLacksError(Exception):
    """A kernel uses a feature that the device does not have, such as half precision."""
