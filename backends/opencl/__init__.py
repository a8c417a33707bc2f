"""OpenCL devices: CPUs, GPUs and FPGAs of any vendor with a driver."""

from hetpipe._lazy import lazy

from .backend import OpenCLBackend

__getattr__, __dir__, _names = lazy(__name__, {"Call": "own", "OwnKernel": "own", "Pack": "own"})
__all__ = ["Call", "OpenCLBackend", "OwnKernel", "Pack"]
