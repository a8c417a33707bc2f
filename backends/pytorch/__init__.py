"""torch as a backend: the CPU, CUDA and whatever other accelerator torch drives."""

from .backend import PyTorchBackend

__all__ = ["PyTorchBackend"]
