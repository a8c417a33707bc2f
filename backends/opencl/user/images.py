"""Images as arguments of kernels that run alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from hetpipe.sdk.kernels import Array, DeviceLacksError, Flaw, KernelFaultError

from ..lower.signature import Parameter
from ..platform.driver import driver

DIMENSIONS = {"image1d_t": 1, "image2d_t": 2, "image3d_t": 3}
ORDERS = {1: "R", 2: "RG", 4: "RGBA"}
"""The channel orders, by the length of the last dimension."""
TYPES = {
    "float32": "FLOAT", "float16": "HALF_FLOAT", "int32": "SIGNED_INT32", "int16": "SIGNED_INT16",
    "int8": "SIGNED_INT8", "uint8": "UNSIGNED_INT8",
}  # fmt: skip


def is_image(parameter: Parameter) -> bool:
    """Return whether the source declares the parameter as an image."""
    return parameter.ctype.split()[-1] in DIMENSIONS


class ImageRoom:
    """The image of an array [..., width, channels]."""

    def __init__(
        self, place: tuple[Any, Any, str], function: str, name: str, kind: str, array: Array
    ) -> None:
        """Create an image with the content of `array`.

        Raises `KernelFaultError` if the array cannot be an image, and `DeviceLacksError` if the
        device has no images, or none of this format.
        """
        cl = driver()
        context, self._queue, device_id = place
        self._array = array
        rank = DIMENSIONS[kind]
        fits = array.ndim == rank + 1 and array.shape[-1] in ORDERS and array.dtype.name in TYPES
        if not fits or 0 in array.shape:
            text = (
                f"the source declares {kind} {name}, the specification gives {array.dtype.name}"
                f"{list(array.shape)}; it needs {rank} dimensions of 1 or more and then 1, 2 or 4 "
                f"channels, of {', '.join(TYPES)}"
            )
            raise KernelFaultError(Flaw("wrong arguments", function, text))
        if not context.devices[0].image_support:
            raise DeviceLacksError(f"{device_id} has no images")
        order, element = ORDERS[array.shape[-1]], TYPES[array.dtype.name]
        form = cl.ImageFormat(getattr(cl.channel_order, order), getattr(cl.channel_type, element))
        flags, types = cl.mem_flags.READ_WRITE, cl.mem_object_type
        if form not in cl.get_supported_image_formats(
            context, flags, getattr(types, kind.removesuffix("_t").upper())
        ):
            raise DeviceLacksError(f"{device_id} has no images of {order} and {element}")
        self._region = tuple(reversed(array.shape[:-1]))
        self.part = cl.Image(context, flags, form, shape=self._region)
        self._copy(self.part, np.ascontiguousarray(array))

    def _copy(self, target: Any, source: Any) -> None:
        origin = (0,) * len(self._region)
        driver().enqueue_copy(
            self._queue, target, source, origin=origin, region=self._region, is_blocking=True
        )

    def array(self) -> Array:
        array = np.empty_like(self._array, order="C")
        self._copy(array, self.part)
        return array

    def damage(self, name: str, function: str) -> Flaw | None:
        """Return None: a device ignores writes beyond an image."""
        return None
