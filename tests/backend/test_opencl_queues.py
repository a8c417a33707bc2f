"""Two passes at once: each queue has its own arena, and kernels overlap on the device."""

from __future__ import annotations

import pytest
import torch
from found_devices import fetch
from opencl_devices import compiled, opencl_device, upload
from opencl_products import OPENCL

from hetpipe.errors import BackendError

TWO = [each for each in OPENCL if opencl_device(each).info.capabilities.queues > 1]


def chain(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x


def operands(size: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, size, generator=generator) / size**0.5 for _ in range(count)]


@pytest.mark.parametrize("device_id", TWO)
def test_a_graph_may_move_from_queue_to_queue(device_id: str) -> None:
    device, inputs = opencl_device(device_id), operands(64, 5)
    executable = compiled(device, chain, *inputs)
    buffers, events = upload(device, *inputs)
    found = []
    for queue in (0, 1, 1, 0):
        (output,), event, _ = executable.run(buffers, after=events, queue=queue)
        found.append((output, event))
    for output, event in found:
        array = torch.from_numpy(fetch(device, output, [event]))
        torch.testing.assert_close(array, chain(*inputs), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("device_id", TWO)
def test_memory_read_by_one_queue_is_not_reused_by_another(device_id: str) -> None:
    """One queue reads memory that is released at once and requested by the other queue."""
    device, inputs = opencl_device(device_id), operands(256, 6)
    reader, writer = compiled(device, chain, *inputs), compiled(device, torch.neg, inputs[0])
    expected = chain(*inputs)
    for _ in range(5):
        buffers, events = upload(device, *inputs)
        (negated,), made, _ = writer.run(buffers[:1], after=events)  # a first run
        (output,), event, _ = reader.run(buffers, after=events, queue=1)
        del buffers
        zero, uploaded = upload(device, torch.zeros(256, 256))
        (negated,), made, _ = writer.run(zero, after=uploaded)
        made.wait()
        array = torch.from_numpy(fetch(device, output, [event]))
        torch.testing.assert_close(array, expected, rtol=0, atol=1e-4)
        del negated


@pytest.mark.parametrize("device_id", OPENCL)
def test_a_missing_queue_is_refused(device_id: str) -> None:
    device, inputs = opencl_device(device_id), operands(4, 1)
    queues = device.info.capabilities.queues
    executable = compiled(device, torch.neg, *inputs)
    buffers, events = upload(device, *inputs)
    with pytest.raises(BackendError, match=f"{queues} passes at once, so it has no queue {queues}"):
        executable.run(buffers, after=events, queue=queues)
