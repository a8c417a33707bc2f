"""torch as a backend: the CPU, CUDA and every other accelerator that torch drives."""

from .backend import PyTorchBackend

__all__ = ["PyTorchBackend"]
