"""OpenCL devices: CPUs, GPUs and FPGAs of any vendor with a driver."""

from typing import TYPE_CHECKING

from hetpipe._lazy import lazy

if TYPE_CHECKING:
    from .backend import OpenCLBackend as OpenCLBackend
    from .user.user_kernels import Call as Call
    from .user.user_kernels import OwnKernel as OwnKernel
    from .user.user_kernels import Pack as Pack
else:
    __getattr__, __dir__ = lazy(__name__)
