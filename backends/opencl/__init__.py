"""OpenCL devices: CPUs, GPUs and FPGAs of any vendor with a driver."""

from typing import TYPE_CHECKING

from hetpipe._lazy import lazy

if TYPE_CHECKING:
    from .backend import OpenCLBackend as OpenCLBackend
    from .own import Call as Call
    from .own import OwnKernel as OwnKernel
    from .own import Pack as Pack
else:
    __getattr__, __dir__ = lazy(__name__)
