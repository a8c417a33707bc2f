"""Single kernels: the interface of a backend for people who write and test kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from hetpipe.errors import BackendError

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class LocalMemory:
    """A kernel argument in the local memory of a work-group."""

    nbytes: int


@dataclass(frozen=True)
class KernelCall:
    """One launch of the kernel `function` in `source`, the text of the file `path`.

    `arguments` holds arrays (C-contiguous), numbers and local memory by the names of the
    parameters. `inputs` and `outputs` name the arrays that the kernel reads and writes.
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
    """Further kernels of the source that run at the same time, with their global and local sizes.
    Each takes the arguments that its parameters name."""


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
    """Line of the source, from 1."""


@dataclass(frozen=True)
class Shipped:
    """A kernel that comes with a backend: family (a folder), file, name, and the file's purpose."""

    family: str
    file: str
    name: str
    purpose: str


@dataclass(frozen=True)
class OutlineParameter:
    """A parameter of a kernel, as the text of its source shows it.

    `space` is global, constant, local or image, and empty for a number. `dtype` belongs to an
    element, or to the number; it is empty if the text does not tell it.
    """

    name: str
    text: str
    """The declaration without qualifiers such as `restrict`."""
    space: str
    dtype: str
    fault: str = ""
    """The reason why no argument can be passed; empty if one can."""
    width: int = 1
    """Elements of a vector."""
    rank: int = 0
    """Dimensions of an image."""
    uses: frozenset[str] = frozenset()
    """Uses in the kernel's body: `read`, `written`, and `passed` if its address goes elsewhere."""


@dataclass(frozen=True)
class Outline:
    """The outline of a kernel: its parameters, and its work-items."""

    function: str
    parameters: tuple[OutlineParameter, ...]
    dimensions: int = 1
    """Dimensions of the global size."""
    local_size: tuple[int | None, ...] = ()
    """The local size that the kernel requires; None for a macro whose number is unknown."""
    bounds: tuple[str, ...] = ()
    """Names of whole numbers with which the kernel compares, so that work-items may exceed them."""
    in_groups: bool = False
    """Whether the kernel uses work-groups: local memory, local ids or barriers."""


class KernelRunner(ABC):
    """Runs single kernels in a backend's language, for `hetpipe kernels`.

    Each device is used in a separate process, which may crash or hang.
    """

    suffix: str
    """Suffix of files with kernels, such as `.cl`."""

    @abstractmethod
    def functions(self, source: str) -> Sequence[str]:
        """Return the names of the kernels in a source, in order."""

    def outline(self, source: str, function: str, options: Sequence[str] = ()) -> Outline | None:
        """Return the outline of a kernel, compiled with `options`; default: None, not known.

        Raises `BackendError` if the source does not declare the kernel.
        """
        return None

    @abstractmethod
    def run(self, device_id: str, call: KernelCall) -> tuple[dict[str, Array], Sequence[Flaw]]:
        """Run a kernel once. Return arrays by name, and flaws such as accesses beyond tensors.

        The arrays include at least the outputs. Raises `KernelFaultError` if the kernel cannot be
        built or launched, but `DeviceLacksError` if the reason is a feature that the device lacks.
        """

    def timed(self, device_id: str, call: KernelCall) -> Callable[[int], float]:
        """Return a function that launches a call some times, and returns the seconds of a launch.

        Copies do not count. Raises `KernelFaultError` and `DeviceLacksError` like `run`, and
        `BackendError` if the backend measures no launches, which is the default.
        """
        raise BackendError(f"the backend of {device_id} measures no launches of kernels")

    @abstractmethod
    def shipped(self) -> Sequence[Shipped]:
        """Return the kernels that come with the backend."""

    def tunings(self, device_id: str) -> Mapping[str, Mapping[str, str]]:
        """Return the ways to divide the work of kernels, by name; default: none.

        A way is a set of environment variables; a process with these variables uses it. The first
        way in the mapping is the present one.
        """
        return {}

    def keep_tuning(self, device_id: str, name: str) -> None:
        """Use a way of `tunings` from now on, in every process of this user.

        Raises `BackendError` for an unknown name.
        """
        raise BackendError(f"the kernels of {device_id} have no tuning {name!r}")

    def checks(self, device_id: str) -> bool:
        """Return whether a device is a checker: an interpreter that sees every memory access."""
        return False

    def checker_environment(self, log: Path) -> Mapping[str, str]:
        """Return variables for a checker's process, which writes its findings to `log`."""
        return {}

    def flaws_of(self, log: str) -> Sequence[Flaw]:
        """Return the flaws in a checker's log, each kind and line once."""
        return ()

    def line_that_writes(self, source: str, function: str, argument: str) -> int | None:
        """Return the first line of `source` that writes an argument of a kernel; default: None."""
        return None


class KernelFaultError(Exception):
    """A kernel cannot be built or launched with its arguments; `flaw` gives the reason."""

    def __init__(self, flaw: Flaw) -> None:
        super().__init__(flaw.text)
        self.flaw = flaw


class DeviceLacksError(Exception):
    """A kernel uses a feature that the device does not have, such as half precision."""


@dataclass(frozen=True)
class UserKernel:
    """A user's kernel, which a backend runs instead of its stock kernel.

    `runs(node)` is true if the kernel runs a node of `operator`; the stock kernel runs the others.
    """

    operator: str
    name: str
    runs: Callable[[torch.fx.Node], bool]
