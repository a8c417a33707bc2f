"""Objects travel between hosts whose Python and numpy differ."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetpipe.packing import Packed, pack

ARRAY = np.arange(6, dtype=np.int32).reshape(2, 3)
VALUES = {
    "array": ARRAY,
    "in the order of columns": ARRAY.T,
    "a part of an array": ARRAY[:, ::2],
    "empty": np.zeros((0, 3)),
    "without dimensions": np.array(2.5),
    "complex": np.full(2, 1j, np.complex64),
    "float32": np.float32(0.1),
    "bool": np.bool_(True),
    "dtype": np.dtype("int16"),
    "path": Path("a/b"),
}


class Names(pickle.Unpickler):
    """Notes the modules that a pickle names."""

    def __init__(self, packed: Packed) -> None:
        from io import BytesIO

        super().__init__(BytesIO(packed.parts[0]), buffers=packed.parts[1:])
        self.modules: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.modules.add(module)
        return super().find_class(module, name)


@pytest.mark.parametrize("name", VALUES)
def test_values_travel_without_the_modules_of_a_version(name: str) -> None:
    value = VALUES[name]
    names = Names(pack({"value": value}))
    arrived = names.load()["value"]
    assert type(arrived) is type(value)
    assert names.modules <= {"hetpipe.packing", "numpy"}  # not numpy._core, pathlib._local
    if isinstance(value, (np.ndarray, np.generic)):
        assert arrived.dtype == value.dtype
        np.testing.assert_array_equal(arrived, value)
    else:
        assert arrived == value


def test_an_array_is_not_copied_into_the_pickle() -> None:
    large = np.zeros(1 << 16)
    head, data = pack(large).parts
    assert len(head) < 1000
    assert data.nbytes == large.nbytes


def test_other_arrays_travel_as_numpy_packs_them() -> None:
    assert pack(np.array(["a", "b"])).unpack().tolist() == ["a", "b"]


CYCLE = """
import gc
import numpy as np
from hetpipe.packing import pack

cycle = [pack(np.zeros((3, 6)))]
cycle.append(cycle)
del cycle
gc.collect()
"""


def test_a_packed_array_in_a_reference_cycle_is_freed() -> None:
    """As after an error, whose traceback refers to itself. Python 3.11 may crash there."""
    ended = subprocess.run([sys.executable, "-c", CYCLE], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
