"""1x1 convolutions without padding, and their input gradients, on CPUs: products of matrices."""

from __future__ import annotations

import math

from ..builder import Builder, Kernel, Value
from ..geometry import Geometry
from ..product import Operand
from .matmul import COLS, pack_rows

ROOM_FLOATS = 1 << 17
"""Of the panels of one work-item: 512 KiB, half of a second-level cache."""
MOST_PANELS = 16
"""As MOST_COLS of the kernel."""


def is_pointwise(g: Geometry) -> bool:
    """Whether a convolution is a product of its weights with pixels on a grid."""
    return g.kernel == (1, 1) and g.padding == (0, 0) and g.stride[0] == g.stride[1]


def pointwise(
    builder: Builder, g: Geometry, x: Value, weight: Value, bias: Value | None, flipped: bool
) -> Value:
    """y [N][Co][OH][OW] of x [N][Ci][H][W]; if `flipped` the input gradient of that, dx of dy."""
    rows, depth = g.channels(flipped)
    size = g.size if flipped else g.out_size
    y = builder.new((g.images, g.groups * rows, *size), "float32")
    stride = g.stride[0]
    x_step, y_step = (1, stride) if flipped else (stride, 1)
    pixels = math.prod(g.out_size)
    all_panels = math.ceil(g.images * pixels / COLS)
    items = builder.device.compute_units
    most = max(1, min(MOST_PANELS, ROOM_FLOATS // (depth * COLS), math.ceil(all_panels / items)))
    panels = math.ceil(all_panels / math.ceil(all_panels / most))
    items = min(items, g.groups * math.ceil(all_panels / panels))
    a = Operand(weight, 0, rows * depth, *((1, rows) if flipped else (depth, 1)))
    left = pack_rows(builder, a, rows, depth, g.groups)
    options = ("-DEPILOGUE", *(("-DINTERPRETED",) if builder.device.checks_memory else ()))
    source = "".join(builder.source(f"cpu/{name}.cl") for name in ("common", "matmul", "pointwise"))
    builder.launch(
        Kernel(source, "pointwise", options), (items,), (1,),
        {
            "left": left, "x": x, "bias": bias or x, "has_bias": int(bias is not None), "y": y,
            "room": builder.new((items, panels, depth, COLS), "float32"), "images": g.images,
            "groups": g.groups, "rows": rows, "depth": depth, "panels": panels, "pixels": pixels,
            "grid_w": g.out_size[1], "x_width": x.shape[3], "x_plane": math.prod(x.shape[2:]),
            "x_step": x_step, "y_width": size[1], "y_plane": math.prod(size), "y_step": y_step,
        },
    )  # fmt: skip
    return y
