"""The types of OpenCL C that an argument may have."""

from __future__ import annotations

from typing import Any

import numpy as np

CTYPES: dict[str, Any] = {
    "char": np.int8, "uchar": np.uint8, "unsigned char": np.uint8, "short": np.int16,
    "ushort": np.uint16, "unsigned short": np.uint16, "int": np.int32, "uint": np.uint32,
    "unsigned": np.uint32, "unsigned int": np.uint32, "long": np.int64, "ulong": np.uint64,
    "unsigned long": np.uint64, "float": np.float32, "double": np.float64,
}  # fmt: skip
"""The numpy type of each scalar type."""
ELEMENTS = {**{name: np.dtype(kind).name for name, kind in CTYPES.items()}, "half": "float16"}
"""The dtype of an element of each scalar type, in memory."""
