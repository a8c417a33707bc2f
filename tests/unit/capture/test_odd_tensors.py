"""Unusual tensors and arrays, in an example batch and in a later one."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from hetpipe.capture.export.example import Example
from hetpipe.errors import CaptureError


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


ODD = {
    "sparse": (lambda: torch.eye(3).to_sparse(), r"torch\.sparse_coo; make it dense"),
    "meta": (lambda: torch.ones(3, 3, device="meta"), "on the meta device, .* make it on the CPU"),
    "nested": (nested, "a nested tensor; pad"),
    "objects": (lambda: np.array([[None] * 3] * 3), "an array of object; convert"),
    "long": (lambda: np.ones((3, 3), np.longdouble), "an array of float128; convert"),
    "masked": (lambda: np.ma.masked_array(np.ones((3, 3))), r"a masked array; .*\.filled\(0\)"),
    "bfloat16": (lambda: torch.ones(3, 3).bfloat16(), r"of bfloat16, .* with \.float\(\)"),
    "float8": (lambda: torch.ones(3, 3).to(torch.float8_e5m2), "of float8_e5m2, which numpy lacks"),
}


@pytest.mark.parametrize("odd", ODD)
def test_a_batch_of_odd_tensors_is_refused(odd: str) -> None:
    make, why = ODD[odd]
    with pytest.raises(CaptureError, match=f"^x of the batch is .*{why}"):
        Example(make(), torch.zeros(3))
    example = Example(torch.zeros(3, 3), {"a": torch.zeros(3)})
    with pytest.raises(CaptureError, match=f"^x of the batch is .*{why}"):
        example.leaves(make(), {"a": torch.zeros(3)})
    with pytest.raises(CaptureError, match=r"^y\.a of the batch is"):
        example.leaves(torch.zeros(3, 3), {"a": make()})


TURNED = np.arange(9, dtype="float32").reshape(3, 3)[::-1]
COMPLEX = torch.arange(9.0).reshape(3, 3).to(torch.complex64)


def read_only() -> np.ndarray:
    array = TURNED.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("odd", "plain"),
    [
        (TURNED, TURNED.copy()),
        (TURNED.astype(">f4"), TURNED.copy()),
        (read_only(), TURNED.copy()),
        (np.matrix(TURNED), TURNED.copy()),
        ((1j * COMPLEX).conj(), (-1j * COMPLEX).numpy()),
        ((1j * COMPLEX).conj().imag, -np.arange(9, dtype="float32").reshape(3, 3)),
    ],
    ids=["negative strides", "big-endian", "read-only", "matrix", "conjugate", "negative"],
)
def test_a_batch_in_an_odd_form_has_the_same_numbers(
    odd: torch.Tensor | np.ndarray, plain: np.ndarray
) -> None:
    """torch itself cannot convert most of these to a tensor or an array."""
    label = np.zeros(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        example = Example(odd, label)
    assert np.array_equal(example.tensors(3)[0].numpy(), plain)
    assert np.array_equal(example.leaves(odd, label)["x"], plain)
