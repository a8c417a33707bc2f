"""OpenCL devices: CPUs, GPUs and FPGAs of any vendor with a driver."""

from .backend import OpenCLBackend

__all__ = ["OpenCLBackend"]
