"""Operators with an OpenCL kernel are not decomposed; one registration is enough."""

from __future__ import annotations

import pytest
import torch
from hetpipe.backends.opencl import ops  # noqa: F401 - registers the lowerings
from hetpipe.backends.opencl.decompositions import FLOAT32_KERNELS
from hetpipe.backends.opencl.lower.registry import LOWERINGS, Lowering, kept_operators

from hetpipe.sdk.decompositions import VOLUME_CONVOLUTIONS
from hetpipe.sdk.host.registry import get_backend


def test_kept_operators_are_not_decomposed() -> None:
    table = get_backend("opencl").decompositions()
    decomposed = {str(operator) for operator in table}
    assert "hetpipe.lstm.default" in kept_operators()
    assert "aten.native_layer_norm_backward.default" in kept_operators()
    # Some operators also have a decomposition, which leaves float32 to their kernels.
    beside = {str(operator) for operator in (*FLOAT32_KERNELS, *VOLUME_CONVOLUTIONS)}
    assert kept_operators() & decomposed == beside
    x = torch.zeros(2, 3)
    assert table[torch.ops.aten._softmax.default](x, -1, False) is NotImplemented
    assert "aten._adaptive_avg_pool2d.default" not in kept_operators()


def test_a_registration_keeps_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "aten.hardswish.default"
    table = {str(operator) for operator in get_backend("opencl").decompositions()}
    assert name in table
    monkeypatch.setitem(LOWERINGS, name, Lowering(lambda builder, node: None, kept=True))
    table = {str(operator) for operator in get_backend("opencl").decompositions()}
    assert name not in table
