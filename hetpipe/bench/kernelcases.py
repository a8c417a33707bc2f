"""Cases of the kernel benchmark: operators with their sizes, operations and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten
MKLDNN, LINEAR = torch.ops.mkldnn, "_linear_pointwise"
"""Namespace and name of oneDNN's matrix product in builds of torch with oneDNN."""
Tensor = torch.Tensor

IMAGES = 8  # batch size of the convolutions


@dataclass(frozen=True)
class Case:
    """A kernel at one size.

    `shapes` has the shapes of the float32 inputs. `operations` counts multiplications and
    additions; `nbytes` is the least number of bytes to read and write. `theirs` is torch's fastest
    function for the case, unless that is `function`.
    """

    group: str
    kernel: str
    shape: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    operations: float
    nbytes: float
    theirs: Callable[..., Any] | None = None
    channels_last: bool = False
    """Whether torch gets its four-dimensional inputs in the layout channels-last."""
    replaces: tuple[int, ...] = ()
    """Indices of donated inputs, which the first results replace in the next run."""
    ways: Mapping[str, Callable[..., Callable[[], object]]] = field(default_factory=dict)
    """More ways to compute the result in torch, by name.

    Each is a function that gets the inputs and returns the call to time.
    """


def product(kernel: str, m: int, k: int, n: int, function: Callable[..., Any], batch: int = 1,
            left: bool = False, right: bool = False) -> Case:  # fmt: skip
    """Return a product; with `left` or `right`, `function` first transposes this operand."""
    lead = (batch,) if batch > 1 else ()
    a, b = ((k, m) if left else (m, k)), ((n, k) if right else (k, n))
    return Case(
        "products", kernel, f"{batch} x {m} x {k} x {n}" if batch > 1 else f"{m} x {k} x {n}",
        function, ((*lead, *a), (*lead, *b)), 2.0 * batch * m * k * n,
        4.0 * batch * (m * k + k * n + m * n),
        ways={"oneDNN": _onednn} if function is torch.mm and hasattr(MKLDNN, LINEAR) else {},
    )  # fmt: skip


def _onednn(a: Tensor, b: Tensor) -> Callable[[], object]:
    """Return a call of oneDNN's product; `b` is transposed here, outside the timing."""
    weight = b.t().contiguous()
    return lambda: getattr(MKLDNN, LINEAR)(a, weight, None, "none", [], "")


def products() -> Iterator[Case]:
    """Yield square, transposed, batched and rectangular products."""
    for n in (256, 512, 1024, 2048):
        yield product("mm", n, n, n, torch.mm)
    n = 1024
    yield product("mm, A transposed", n, n, n, lambda a, b: torch.mm(a.t(), b), left=True)
    yield product("mm, B transposed", n, n, n, lambda a, b: torch.mm(a, b.t()), right=True)
    yield product("bmm", 512, 512, 512, torch.bmm, batch=8)
    yield product("mm", 2048, 384, 1536, torch.mm)


def tuned() -> Iterator[Case]:
    """Yield the products for comparing tunings: a small, a usual, a deep and a large one."""
    for m, k, n in ((256, 256, 256), (1024, 1024, 1024), (384, 4096, 384), (2048, 384, 1536)):
        yield product("mm", m, k, n, torch.mm)


@dataclass(frozen=True)
class Layer:
    """A convolution of a network: input and output channels, sides of input and kernel, stride."""

    inner: int
    outer: int
    side: int
    kernel: int
    stride: int = 1


RESNET50 = (
    Layer(3, 64, 224, 7, 2), Layer(64, 64, 56, 1), Layer(64, 64, 56, 3), Layer(64, 256, 56, 1),
    Layer(256, 64, 56, 1), Layer(256, 128, 56, 1), Layer(128, 128, 56, 3, 2),
    Layer(128, 512, 28, 1), Layer(256, 512, 56, 1, 2), Layer(512, 128, 28, 1),
    Layer(128, 128, 28, 3), Layer(512, 256, 28, 1), Layer(256, 256, 28, 3, 2),
    Layer(256, 1024, 14, 1), Layer(512, 1024, 28, 1, 2), Layer(1024, 256, 14, 1),
    Layer(256, 256, 14, 3), Layer(1024, 512, 14, 1), Layer(512, 512, 14, 3, 2),
    Layer(512, 2048, 7, 1), Layer(1024, 2048, 14, 1, 2), Layer(2048, 512, 7, 1),
    Layer(512, 512, 7, 3),
)  # fmt: skip
"""Each shape of ResNet-50 once (He et al., CVPR 2016, with the stride in the 3x3 convolution)."""
VGG16 = (
    Layer(3, 64, 224, 3), Layer(64, 64, 224, 3), Layer(64, 128, 112, 3), Layer(128, 128, 112, 3),
    Layer(128, 256, 56, 3), Layer(256, 256, 56, 3), Layer(256, 512, 28, 3), Layer(512, 512, 28, 3),
    Layer(512, 512, 14, 3),
)  # fmt: skip


def convolutions(layers: Sequence[Layer]) -> Iterator[Case]:
    """Yield the forward and both gradients of each layer."""
    for layer in layers:
        padding, side = layer.kernel // 2, layer.side
        out = (side + 2 * padding - layer.kernel) // layer.stride + 1
        x, y = (IMAGES, layer.inner, side, side), (IMAGES, layer.outer, out, out)
        w = (layer.outer, layer.inner, layer.kernel, layer.kernel)
        text = f"{layer.inner} -> {layer.outer}, {side}x{side}, {layer.kernel}x{layer.kernel}"
        text += f"/{layer.stride}" if layer.stride > 1 else ""
        operations = 2.0 * math.prod(y) * layer.inner * layer.kernel**2
        nbytes = 4.0 * (math.prod(x) + math.prod(y) + math.prod(w))
        settings = ([layer.stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)
        forward = partial(_forward, settings)
        yield Case("convolutions", "forward", text, forward, (x, w), operations, nbytes,
                   channels_last=True)  # fmt: skip
        for kernel, part in (("input gradient", 0), ("weight gradient", 1)):
            function = partial(_gradient, settings, part)
            yield Case("convolutions", kernel, text, function, (y, x, w), operations, nbytes,
                       channels_last=True)  # fmt: skip


def _forward(settings: tuple[Any, ...], x: Tensor, w: Tensor) -> Tensor:
    output: Tensor = aten.convolution(x, w, None, *settings)
    return output


def _gradient(settings: tuple[Any, ...], part: int, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    mask = [part == 0, part == 1, False]
    output: Tensor = aten.convolution_backward(dy, x, w, None, *settings, mask)[part]
    return output


ROWS, WIDTH = 16384, 1024
"""A matrix of 64 MiB, which does not fit into a core's share of the last-level cache."""
STEP = 1 << 23  # number of parameters in the optimizer's step


def memory_bound() -> Iterator[Case]:
    """Yield operators that memory bandwidth limits, with tensors larger than a core's caches."""
    x, w = (ROWS, WIDTH), (WIDTH,)
    size, text = 4.0 * ROWS * WIDTH, f"{ROWS} x {WIDTH}"
    norm = partial(aten.native_layer_norm.default, normalized_shape=[WIDTH], eps=1e-5)

    def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        output: Tensor = norm(x, weight=w, bias=b)[0]
        return output

    yield Case("memory", "layer norm", text, layer_norm, (x, w, w), 8.0 * ROWS * WIDTH, 2 * size)
    softmax = partial(torch.softmax, dim=-1)
    yield Case("memory", "softmax", text, softmax, (x,), 5.0 * ROWS * WIDTH, 2 * size)
    gelu = torch.nn.functional.gelu
    yield Case("memory", "gelu", text, gelu, (x,), 8.0 * ROWS * WIDTH, 2 * size)
    yield Case("memory", "gelu, gradient", text, aten.gelu_backward.default, (x, x),
               16.0 * ROWS * WIDTH, 3 * size)  # fmt: skip
    p = (STEP,)
    yield Case("memory", "AdamW step", f"{STEP}", _adamw, (p, p, p, p), 16.0 * STEP,
               4.0 * 7 * STEP, _fused_adamw, replaces=(0, 2, 3))  # fmt: skip


def _adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute update 10 of `hetpipe.optim.adamw`."""
    lr, b1, b2, eps, decay = 1e-3, 0.9, 0.999, 1e-8, 0.01
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    step = (m / (1 - b1**10)) / ((v.abs() / (1 - b2**10)).sqrt() + eps)
    return p - lr * (step + decay * p), m, v


def _fused_adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    """Compute the same update in place with torch's fused kernel.

    The random `v` may be negative, which makes NaN but takes no longer.
    """
    torch._fused_adamw_(
        [p], [g], [m], [v], [], [torch.tensor(10.0)], lr=1e-3, beta1=0.9, beta2=0.999,
        weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


SETS: dict[str, Callable[[], Iterator[Case]]] = {
    "products": products,
    "tuning": tuned,
    "memory": memory_bound,
    "resnet50": partial(convolutions, RESNET50),
    "vgg16": partial(convolutions, VGG16),
}
