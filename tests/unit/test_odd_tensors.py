"""Tensors whose elements are not in memory, in an example batch and in a later one."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from hetpipe.capture.example import Example
from hetpipe.errors import CaptureError


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


ODD = {
    "sparse": (lambda: torch.eye(3).to_sparse(), r"torch\.sparse_coo; make it dense"),
    "meta": (lambda: torch.ones(3, 3, device="meta"), "on the meta device, .* make it on the CPU"),
    "nested": (nested, "a nested tensor; pad"),
    "objects": (lambda: np.array([[None] * 3] * 3), "an array of object; convert"),
}


@pytest.mark.parametrize("odd", ODD)
def test_a_batch_of_such_tensors_is_refused(odd: str) -> None:
    make, why = ODD[odd]
    with pytest.raises(CaptureError, match=f"^x of the batch is .*{why}"):
        Example(make(), torch.zeros(3))
    example = Example(torch.zeros(3, 3), {"a": torch.zeros(3)})
    with pytest.raises(CaptureError, match=f"^x of the batch is .*{why}"):
        example.leaves(make(), {"a": torch.zeros(3)})
    with pytest.raises(CaptureError, match=r"^y\.a of the batch is"):
        example.leaves(torch.zeros(3, 3), {"a": make()})
