"""Results that OpenCL computes only from weights are kept from their second run until an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from found_devices import fetch, trace
from opencl_devices import compiled, opencl_device
from opencl_products import OPENCL

from hetpipe.sdk.graph import canonical, graph_inputs
from hetpipe.sdk.host.registry import get_backend

CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "mm": (torch.mm, (40, 50), (50, 60)),
    "linear": (lambda x, w: torch.mm(x, w.t()), (40, 50), (60, 50)),
    "weight first": (lambda x, w: torch.mm(w, x), (50, 60), (40, 50)),
    "convolution": (lambda x, w: torch.conv2d(x, w, padding=1), (2, 16, 64, 64), (40, 16, 3, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device_id", OPENCL)
def test_new_weights_are_never_missed(
    device_id: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers are the same again, another one, the first again, and a new one in its memory."""
    fn, x_shape, w_shape = CASES[case]
    generator = torch.Generator().manual_seed(0)
    x, one, other, third = (
        torch.randn(shape, generator=generator) for shape in (x_shape, w_shape, w_shape, w_shape)
    )
    graph = trace(fn, (x, one), get_backend("opencl").decompositions())
    graph_inputs(graph)[1].meta["steady"] = True
    device = opencl_device(device_id)
    executable: Any = device.compile(canonical(graph))
    launched: list[int] = []
    enqueue = executable._enqueue

    def counted(steps: Any, waits: Any) -> Any:
        launched.append(len(steps))
        return enqueue(steps, waits)

    monkeypatch.setattr(executable, "_enqueue", counted)
    buffers = [device.upload(tensor.numpy())[0] for tensor in (x, one, other)]

    def run(weight: int, value: torch.Tensor) -> None:
        (found,), event, _ = executable.run([buffers[0], buffers[weight]])
        torch.testing.assert_close(
            torch.from_numpy(fetch(device, found, [event])), fn(x, value), rtol=1e-4, atol=1e-4
        )

    run(2, other)
    run(1, one)
    assert not executable._kept
    for weight, value in ((1, one), (1, one), (2, other), (2, other), (1, one), (1, one)):
        run(weight, value)
    assert executable._kept
    # An update donates the weight; the new weight may have the same memory.
    change = compiled(device, lambda weight, difference: weight + difference, one, third - one)
    difference, _ = device.upload((third - one).numpy())
    (buffers[1],), event, _ = change.run([buffers[1], difference], donate=frozenset({0}))
    event.wait()
    run(1, third)
    most, less = launched[0], launched[3]
    assert less == most - 1
    # Two weights take turns. From the first weight's second use on, only its dependents run.
    assert launched == [most, most, most, less, most, less, most, less, most]
