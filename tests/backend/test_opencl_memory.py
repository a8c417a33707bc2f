"""Transfers, donation, the memory pool, events, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from found_devices import fetch
from hetpipe.backends.opencl.run.memory import OpenCLBuffer
from opencl_devices import IDS, compiled, opencl_device, upload

from hetpipe.errors import BackendError, UnsupportedOperatorError
from hetpipe.sdk.backend import Buffer, DoneEvent

pytestmark = pytest.mark.parametrize("device_id", IDS)

DTYPES = ["float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"]


def memory_of(buffer: Buffer) -> object:
    assert isinstance(buffer, OpenCLBuffer)
    return buffer.memory


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(device_id: str, dtype: str, shape: tuple[int, ...]) -> None:
    device = opencl_device(device_id)
    array = np.asarray(np.random.default_rng(1).integers(0, 2, shape)).astype(dtype)
    buffer, event = device.upload(array)
    assert (buffer.shape, buffer.dtype) == (shape, dtype)
    np.testing.assert_array_equal(fetch(device, buffer, [event]), array)


def test_a_strided_array_is_uploaded_row_major(device_id: str) -> None:
    device = opencl_device(device_id)
    array = np.arange(24, dtype=np.float32).reshape(4, 6).T[::2]
    buffer, event = device.upload(array)
    np.testing.assert_array_equal(fetch(device, buffer, [event]), array)


def test_donated_memory_is_reused_and_other_memory_is_not(device_id: str) -> None:
    device = opencl_device(device_id)
    x, y = torch.arange(40.0), torch.ones(40)
    executable = compiled(device, lambda a, b: (a * 2 + b, a - b), x, y)
    buffers, events = upload(device, x, y)
    kept, event, _ = executable.run(buffers, after=events)
    assert all(memory_of(out) is not memory_of(b) for out in kept for b in buffers)
    np.testing.assert_array_equal(fetch(device, buffers[0], [event]), x.numpy())
    taken, event, _ = executable.run(buffers, donate=frozenset({0}))
    assert memory_of(buffers[0]) in [memory_of(out) for out in taken]
    np.testing.assert_array_equal(fetch(device, taken[0], [event]), (x * 2 + y).numpy())
    np.testing.assert_array_equal(fetch(device, taken[1]), (x - y).numpy())
    np.testing.assert_array_equal(fetch(device, buffers[1]), y.numpy())


def test_memory_with_later_reads_is_not_reused(device_id: str) -> None:
    device = opencl_device(device_id)
    x = torch.arange(30.0).view(5, 6)
    # The transposed read of `a` mixes elements: overwriting `a` in its kernel would be wrong.
    executable = compiled(device, lambda a: (a.t().reshape(5, 6) + 1, a.sum(0)), x)
    buffers, events = upload(device, x)
    outputs, event, _ = executable.run(buffers, donate=frozenset({0}), after=events)
    np.testing.assert_array_equal(fetch(device, outputs[0], [event]), x.t().reshape(5, 6) + 1)
    np.testing.assert_array_equal(fetch(device, outputs[1]), x.sum(0))


def test_a_buffer_given_twice_is_not_donated(device_id: str) -> None:
    device = opencl_device(device_id)
    x = torch.arange(20.0)
    executable = compiled(device, lambda a, b: ((a + 1), (b * 3).flip(0)), x, x.clone())
    (buffer,), events = upload(device, x)
    outputs, event, _ = executable.run([buffer, buffer], donate=frozenset({0}), after=events)
    np.testing.assert_array_equal(fetch(device, outputs[1], [event]), (x * 3).flip(0))


def test_outputs_share_no_memory(device_id: str) -> None:
    device = opencl_device(device_id)
    x = torch.arange(12.0).view(3, 4)

    def fn(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b = a + 1
        return b, b.view(12), a.view(2, 6), a, torch.zeros(5), torch.zeros(5)

    buffers, events = upload(device, x)
    outputs, event, _ = compiled(device, fn, x).run(buffers, after=events)
    assert outputs[3] is buffers[0]
    assert len({id(memory_of(out)) for out in outputs}) == len(outputs)
    for found, want in zip(outputs, fn(x), strict=True):
        np.testing.assert_array_equal(fetch(device, found, [event]), want.numpy())


def test_a_repeated_output_is_one_buffer(device_id: str) -> None:
    device = opencl_device(device_id)
    x = torch.arange(12.0)

    def fn(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b = a + 1
        return b, b, a

    buffers, events = upload(device, x)
    outputs, event, _ = compiled(device, fn, x).run(buffers, after=events)
    assert outputs[0] is outputs[1]
    assert outputs[2] is buffers[0]
    np.testing.assert_array_equal(fetch(device, outputs[0], [event]), x + 1)


def test_a_steady_state_allocates_nothing(device_id: str) -> None:
    device = opencl_device(device_id)
    x = torch.arange(64.0)
    executable = compiled(device, lambda a: (a * 2, (a.sum() + a).exp().sum()), x)

    def step() -> None:
        buffers, events = upload(device, x)
        outputs, event, _ = executable.run(buffers, after=events)
        fetch(device, outputs[0], [event])

    for _ in range(3):
        step()
    held = device.memory_used_nbytes()
    for _ in range(10):
        step()
    assert device.memory_used_nbytes() == held


def test_trim_frees_unused_memory(device_id: str) -> None:
    device = opencl_device(device_id)
    x = torch.arange(4096.0)
    buffers, events = upload(device, x, x)
    before = device.memory_used_nbytes() or 0
    del buffers[0]
    device.trim()
    assert (device.memory_used_nbytes() or 0) <= before - 4 * 4096
    np.testing.assert_array_equal(fetch(device, buffers[0], events), x)


def test_a_pass_waits_for_its_events(device_id: str) -> None:
    device = opencl_device(device_id)
    x = torch.arange(64.0)
    executable = compiled(device, lambda a: a * 2, x)
    buffers, events = upload(device, x)
    outputs, event, chunks = executable.run(buffers, after=[*events, DoneEvent()])
    event.wait(60)
    assert event.done()
    assert not chunks
    np.testing.assert_array_equal(fetch(device, outputs[0]), x * 2)


def test_wrong_inputs_are_refused(device_id: str) -> None:
    device = opencl_device(device_id)
    x = torch.arange(6.0)
    executable = compiled(device, lambda a: a * 2, x)
    (buffer,), _ = upload(device, x)
    (other,), _ = upload(device, x.view(2, 3))
    with pytest.raises(BackendError, match="takes 1 inputs, got 2"):
        executable.run([buffer, buffer])
    with pytest.raises(BackendError, match=r"float32\[2, 3\].*float32\[6\]"):
        executable.run([other])
    with pytest.raises(BackendError, match=r"float32\[6\].*float64\[6\]"):
        device.download(buffer, np.zeros(6))
    with pytest.raises(BackendError, match="writable"):
        device.download(buffer, np.zeros((6, 2), np.float32)[:, 0])
    foreign = OpenCLBuffer(device, (6,), "float32", memory_of(buffer))  # type: ignore[arg-type] # its memory
    foreign.device = object()  # type: ignore[assignment] # any other device
    with pytest.raises(BackendError, match="not on"):
        executable.run([foreign])


def test_memory_beyond_the_limit_of_one_allocation_is_refused(device_id: str) -> None:
    device = opencl_device(device_id)
    most = device.context.devices[0].max_mem_alloc_size
    used = device.memory_used_nbytes()
    for allocate in (device.memory.take, lambda n: device.arena(n, device.pass_queues[0])):
        with pytest.raises(BackendError, match=rf"{most + 128} bytes.* {most} bytes.*stages"):
            allocate(most + 128)
    assert device.memory_used_nbytes() == used


def test_an_unknown_operator_is_refused_with_its_name(device_id: str) -> None:
    device = opencl_device(device_id)
    with pytest.raises(UnsupportedOperatorError, match=r"aten\._fft_r2c"):
        compiled(device, lambda a: torch.fft.rfft(a).real, torch.arange(8.0))


def test_a_dtype_without_kernels_is_refused(device_id: str) -> None:
    device = opencl_device(device_id)
    with pytest.raises(UnsupportedOperatorError, match="dtype float16"):
        compiled(device, lambda a: a * 2, torch.arange(8.0).half())
