"""Saved tensors share one memory block; a pass that gets them donated computes in that block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from found_devices import fetch, trace
from hetpipe.backends.opencl.run import placement
from hetpipe.backends.opencl.run.memory import Memory, OpenCLBuffer, Part
from hetpipe.backends.opencl.run.placement import Where
from opencl_devices import opencl_device, upload
from opencl_products import OPENCL

from hetpipe.sdk.backend import Buffer
from hetpipe.sdk.host.registry import get_backend

ROWS, COLS, LAYERS = 32, 64, 4
NBYTES = 4 * ROWS * COLS
Tensors = tuple[torch.Tensor, ...]

pytestmark = pytest.mark.parametrize("device_id", OPENCL)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "LEAST_NBYTES", 1)


def forward(x: torch.Tensor) -> Tensors:
    """Return the last layer's sum and every layer's tensor, a running mean of the previous one."""
    saved = []
    for _ in range(LAYERS):
        x = torch.cumsum(torch.sin(x), 1) / COLS
        saved.append(x)
    return x.sum(), *saved


def backward(tangent: torch.Tensor, *saved: torch.Tensor) -> Tensors:
    """Compute backwards from the last tensor to the first; each layer reads its own tensor last."""
    gradients = []
    for tensor in reversed(saved):
        tangent = torch.cumsum(tangent * torch.cos(tensor), 1) / COLS
        gradients.append(tangent.sum(0))
    return tangent, *gradients


def executable(device_id: str, fn: Any, together: Sequence[int], *inputs: torch.Tensor) -> Any:
    graph = trace(fn, inputs, get_backend("opencl").decompositions())
    graph.graph.output_node().meta["together"] = frozenset(together)
    return opencl_device(device_id).compile(graph)


def programs(device_id: str) -> tuple[Any, Any]:
    x = torch.zeros(ROWS, COLS)
    results = range(1, LAYERS + 1)
    return (
        executable(device_id, forward, results, x),
        executable(device_id, backward, results, *(x.clone() for _ in range(LAYERS + 1))),
    )


def tensors(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, COLS, generator=generator), torch.randn(
        ROWS, COLS, generator=generator
    )


def memory_of(buffer: Buffer) -> Memory | Part:
    assert isinstance(buffer, OpenCLBuffer)
    return buffer.memory


def whole_of(buffer: Buffer) -> Memory:
    memory = memory_of(buffer)
    assert isinstance(memory, Part)
    return memory.whole


DONATED = frozenset(range(1, LAYERS + 1))


def check(device_id: str, found: Sequence[Buffer], x: torch.Tensor, tangent: torch.Tensor) -> None:
    _, *saved = forward(x.double())
    device = opencl_device(device_id)
    for buffer, want in zip(found, backward(tangent.double(), *saved), strict=True):
        bound = 16 * (ROWS * COLS) ** 0.5 * 2.0**-24 * float(want.abs().max())
        np.testing.assert_allclose(fetch(device, buffer), want, rtol=0, atol=bound)


@pytest.mark.slow
def test_a_backward_reuses_saved_tensors_after_their_last_read(device_id: str) -> None:
    device = opencl_device(device_id)
    first, second = programs(device_id)
    x, tangent = tensors(0)
    buffers, events = upload(device, x, tangent)
    (total, *saved), event, _ = first.run(buffers[:1], after=events)
    assert isinstance(memory_of(total), Memory)
    assert len({id(whole_of(each)) for each in saved}) == 1
    assert whole_of(saved[0]).nbytes == LAYERS * NBYTES
    found, done, _ = second.run([buffers[1], *saved], DONATED, [event])
    done.wait(60)
    check(device_id, found, x, tangent)
    assert isinstance(memory_of(found[0]), Memory)  # a neighbour's: it must not keep the block
    assert {id(whole_of(each)) for each in found[1:]} == {id(whole_of(saved[0]))}
    (plan,) = second._plans.values()
    inside = [spot for spot in plan.spots.values() if spot.where is Where.DONATED]
    # In the first layer no tensor is free yet, so its intermediates are in the arena.
    assert len(inside) > LAYERS
    assert plan.new_nbytes == 0
    assert plan.arena_nbytes <= 2 * NBYTES


def test_tensors_that_are_not_donated_keep_their_values(device_id: str) -> None:
    device = opencl_device(device_id)
    first, second = programs(device_id)
    x, tangent = tensors(1)
    buffers, events = upload(device, x, tangent)
    (_, *saved), event, _ = first.run(buffers[:1], after=events)
    before = [fetch(device, each, [event]) for each in saved]
    for donated in (frozenset[int](), frozenset({2, 4})):
        found, done, _ = second.run([buffers[1], *saved], donated, [event])
        done.wait(60)
        check(device_id, found, x, tangent)
        for index in DONATED - donated:
            np.testing.assert_array_equal(fetch(device, saved[index - 1]), before[index - 1])


def test_micro_batches_in_flight_have_separate_blocks(device_id: str) -> None:
    """Two forwards run, then their backwards in reverse order; gradients outlive the next pass."""
    device = opencl_device(device_id)
    first, second = programs(device_id)
    held = []
    for round_ in range(3):
        pairs = [tensors(2 * round_ + seed) for seed in (10, 11)]
        flying = []
        for x, tangent in pairs:
            buffers, events = upload(device, x, tangent)
            outputs, event, _ = first.run(buffers[:1], after=events)
            flying.append((x, tangent, [buffers[1], *outputs[1:]], event))
        assert whole_of(flying[0][2][1]) is not whole_of(flying[1][2][1])
        for x, tangent, inputs, event in reversed(flying):
            found, done, _ = second.run(inputs, DONATED, [event])
            done.wait(60)
            held.append((found, x, tangent))
        del inputs, flying
    for found, x, tangent in held:
        check(device_id, found, x, tangent)


def test_a_steady_state_allocates_no_memory(device_id: str) -> None:
    device = opencl_device(device_id)
    first, second = programs(device_id)
    x, tangent = tensors(3)
    buffers, events = upload(device, x, tangent)
    held = []
    for _ in range(6):
        (_, *saved), event, _ = first.run(buffers[:1], after=events)
        inputs = [buffers[1], *saved]
        del saved
        found, done, _ = second.run(inputs, DONATED, [event])
        done.wait(60)
        del inputs
        check(device_id, found, x, tangent)
        del found
        held.append(device.memory_used_nbytes())
    assert held[2:] == [held[2]] * 4


def test_with_alternating_blocks_intermediates_stay_in_the_arena(device_id: str) -> None:
    """Setting all arguments again for every micro-batch would take as long as small kernels."""
    device = opencl_device(device_id)
    first, second = programs(device_id)
    x, tangent = tensors(4)
    buffers, events = upload(device, x, tangent)
    (_, *other), event, _ = first.run(buffers[:1], after=events)
    for _ in range(8):
        (_, *saved), event, _ = first.run(buffers[:1], after=[event])
        found, done, _ = second.run([buffers[1], *other], DONATED, [event])
        done.wait(60)
        check(device_id, found, x, tangent)
        other = saved
    last = list(second._plans.values())[-1]
    results = {output.value.id for output in second._lowered.outputs}
    assert {spot.where for key, spot in last.spots.items() if key not in results} == {Where.ARENA}
    assert {spot.where for key, spot in last.spots.items() if key in results} == {Where.DONATED}
