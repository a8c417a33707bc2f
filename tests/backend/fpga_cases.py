"""Cases for the kernels of FPGAs. As a script, save their results on the emulator:

    PYTHONPATH=tests python tests/backend/fpga_cases.py FILE.npz channels

A separate process can be ended if kernels wait for each other for ever.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from as_fpga import as_fpga
from opencl_devices import Array, results
from torch.nn import functional

aten = torch.ops.aten
EMULATOR = "opencl:intel-fpga-emulator:0"
Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


def normal(*shape: int) -> torch.Tensor:
    """Return random numbers that are the same in every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(11))


def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Compute a product with an epilogue: bias, activation, residual."""
    return functional.gelu(torch.addmm(b, x, w.t())) + r


def normed(
    x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, s: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Compute a residual sum, which is also a result, and its norm."""
    residual = x @ w + r
    return residual, *torch.native_layer_norm(residual, [s.numel()], s, None, 1e-5)


def convolution(weight: tuple[int, ...], **how: Any) -> Case:
    """Return a case with a convolution, a function of its result, and its gradients."""
    x, w, b = normal(2, 4, 11, 13), normal(*weight), normal(weight[0])
    dy = normal(*functional.conv2d(x, w, b, **how).shape)

    def both(
        x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, dy: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        y, gradients = torch.func.vjp(lambda *args: functional.conv2d(*args, **how), x, w, b)
        return y.relu(), *gradients(dy)

    return both, (x, w, b, dy)


def transposed_convolution() -> Case:
    """Return the same case for a transposed convolution."""
    x, w = normal(2, 6, 5, 4), normal(6, 4, 3, 3)
    how: dict[str, Any] = {"stride": 2, "padding": 1, "output_padding": 1}
    dy = normal(*functional.conv_transpose2d(x, w, **how).shape)

    def both(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        run = functional.conv_transpose2d
        y, gradients = torch.func.vjp(lambda *args: run(*args, **how), x, w)
        return y.relu(), *gradients(dy)

    return both, (x, w, dy)


def batch_norm(running: bool, *shape: int, **how: Any) -> Case:
    """Return a case with training batch norm of a convolution, its statistics and gradients."""
    x, w, b = normal(*shape), normal(70, 3, 3, 3), normal(70)
    dy = normal(*functional.conv2d(x, w, b, **how).shape)
    state = (normal(70) * 0.1, normal(70).abs()) if running else ()

    def whole(
        x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, dy: torch.Tensor, *state: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        def normed(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
            y = functional.conv2d(x, w, b, **how)
            if state:
                return aten._native_batch_norm_legit_functional(y, b, None, *state, True, 0.1, 1e-5)
            return aten._native_batch_norm_legit.no_stats(y, b, b, True, 0.1, 1e-5)

        (y, *statistics), gradients = torch.func.vjp(normed, x, w, b)
        return y.relu(), *statistics, *gradients((dy, *map(torch.zeros_like, statistics)))

    return whole, (x, w, b, dy, *state)


def mm(rows: int, depth: int, cols: int) -> Case:
    """Return a case with a matrix product and a product of the transposed matrices."""

    def both(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a @ b, b.t() @ a.t()

    return both, (normal(rows, depth), normal(depth, cols))


CASES: dict[str, Case] = {
    **{
        f"mm {rows} x {depth} x {cols}": mm(rows, depth, cols)
        for rows, depth, cols in ((1, 1, 1), (33, 70, 45), (64, 32, 128), (65, 300, 129))
    },
    "batches": (lambda a, b: a @ b.transpose(1, 2), (normal(3, 20, 35), normal(3, 40, 35))),
    "scaled": (
        lambda a, b, c: torch.baddbmm(c, a, b.transpose(1, 2), beta=0.5, alpha=2.0),
        (normal(3, 20, 35), normal(3, 40, 35), normal(20, 1)),
    ),
    "epilogue": (layer, (normal(35, 20), normal(50, 20), normal(50), normal(35, 50))),
    "softmax": (lambda a, b: torch.softmax(a @ b * 0.25, 1), (normal(70, 30), normal(30, 45))),
    "log softmax": (
        lambda x, w, b: torch.log_softmax(torch.addmm(b, x, w), 1),
        (normal(70, 20), normal(20, 200), normal(200)),
    ),
    "layer norm": (normed, (normal(66, 20), normal(20, 130), normal(66, 130), normal(130))),
    "gradient": (lambda x, dy: x.t() @ dy, (normal(300, 13), normal(300, 17))),
    "convolution": convolution((6, 4, 3, 2)),
    "one pixel": convolution((70, 4, 1, 1)),
    "strided": convolution((6, 4, 3, 3), stride=2, padding=1),
    "groups": convolution((6, 2, 3, 2), groups=2, padding=(1, 2)),
    "depthwise": convolution((4, 1, 3, 3), groups=4, padding=1),
    "dilated": convolution((6, 4, 3, 2), dilation=2, stride=(1, 2), padding=2),
    "transposed": transposed_convolution(),
    "batch norm": batch_norm(True, 3, 3, 9, 8, padding=1),
    "batch norm without statistics": batch_norm(False, 2, 3, 5, 4),
}


WITHOUT = (
    "mm 64 x 32 x 128", "one pixel", "depthwise", "gradient", "batch norm without statistics",
)  # fmt: skip
CHANNELLED = tuple(name for name in CASES if name not in WITHOUT)
"""The cases that also run with channels."""


def main(file: str, form: str) -> None:
    """Write the results of `CHANNELLED` on the emulator, with or without channels."""
    device = as_fpga(EMULATOR, form == "channels")
    kept: dict[str, Array] = {}
    for name in CHANNELLED:
        fn, inputs = CASES[name]
        kept |= {f"{name} {n}": each for n, each in enumerate(results(device, fn, *inputs))}
        print(name, flush=True)
    np.savez(file, allow_pickle=False, **kept)
    os._exit(0)  # end the process, whatever the emulator's threads do


if __name__ == "__main__":
    main(*sys.argv[1:])
