"""Streams on a simulated card: waits, freed memory, precision, lack of memory, indices."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from as_card import AsCard, CardDevice
from found_devices import trace
from hetpipe.backends.pytorch.device import TorchBuffer, host_array
from hetpipe.backends.pytorch.lanes import Lane, StreamEvent

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Buffer

Array = np.ndarray[Any, Any]


def card(memory_nbytes: int = 1 << 30, **options: Any) -> CardDevice:
    backend = AsCard()
    backend.memory_nbytes = memory_nbytes
    backend.configure(options, Path())
    device = backend.open(backend.discover()[0])
    assert isinstance(device, CardDevice)
    return device


def put(device: CardDevice, array: Array) -> Buffer:
    buffer, event = device.upload(array)
    event.wait(20)
    return buffer


def get(device: CardDevice, buffer: Buffer) -> Array:
    array = np.empty(buffer.shape, buffer.dtype)
    device.download(buffer, array).wait(20)
    return array


A = np.arange(12, dtype=np.float32).reshape(3, 4)


def chain(device: CardDevice) -> Array:
    """Return A * 2 + 1 from two runs, each queued behind its inputs; drop inputs at once."""
    double = device.compile(trace(lambda x: x * 2, [torch.zeros(3, 4)], {}))
    add = device.compile(trace(lambda x: x + 1, [torch.zeros(3, 4)], {}))
    buffer, uploaded = device.upload(A)
    outputs, ran, _ = double.run([buffer], after=[uploaded])
    del buffer
    outputs, ran, _ = add.run(outputs, after=[ran])
    ran.wait(20)
    return get(device, outputs[0])


def test_queued_runs_follow_their_inputs() -> None:
    np.testing.assert_array_equal(chain(card()), A * 2 + 1)


def test_a_missing_wait_shows_in_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lane, "order", lambda self, after: None)
    assert np.isnan(chain(card())).all()


def test_a_use_that_the_allocator_does_not_know_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CardDevice, "keep_for", lambda self, tensor, lane: None)
    with pytest.raises(BackendError, match="that was freed"):
        chain(card())


def ending(touch: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> int:
    """Return how a process ends that touches a tensor: 0, or minus the number of a signal."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        touch(tensor)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    "touch",
    [
        lambda tensor: host_array(tensor)[1, 2].item(),
        lambda tensor: host_array(tensor.view(-1)[3:]).fill(0),
        lambda tensor: tensor.fill_(1),
        lambda tensor: torch.empty(3, 4).copy_(tensor),
        lambda tensor: tensor.copy_(torch.empty(3, 4), non_blocking=True),
    ],
    ids=["numpy reads", "numpy writes", "fill", "copy out", "copy in"],
)
def test_the_host_cannot_touch_the_memory_of_a_card(
    touch: Callable[[torch.Tensor], object],
) -> None:
    buffer = put(card(), A)
    assert isinstance(buffer, TorchBuffer)
    assert ending(touch, buffer.tensor) == -signal.SIGSEGV
    assert ending(touch, torch.zeros(3, 4)) == 0


def test_memory_of_a_card_returns_to_the_system() -> None:
    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    device = card()
    before = mappings()
    kept = [put(device, A) for _ in range(200)][::2]  # every second, so that no two are merged
    assert mappings() > before + 90
    del kept
    assert mappings() < before + 20


def test_waits_sleep_where_torch_can() -> None:
    event = card().upload(A)[1]
    assert isinstance(event, StreamEvent)
    assert event.native.blocking


def product(device: CardDevice) -> Array:
    a = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    multiply = device.compile(trace(lambda x: x @ x, [torch.zeros(64, 64)], {}))
    outputs, ran, _ = multiply.run([put(device, a)])
    ran.wait(20)
    result: Array = get(device, outputs[0]) - (a.astype(np.float64) @ a.astype(np.float64))
    return np.abs(result).max()


def test_products_are_exact_unless_tf32_is_allowed() -> None:
    before = torch._C._get_fp32_precision_getter("cuda", "conv")
    assert product(card()) < 1e-4
    assert product(card(tf32=True)) > 1e-3
    assert torch._C._get_fp32_precision_getter("cuda", "conv") == before


def test_costs_with_tf32_are_other_costs() -> None:
    exact, rounded = AsCard(), AsCard()
    rounded.configure({"tf32": True}, None)  # type: ignore[arg-type]
    assert exact.discover()[0].driver != rounded.discover()[0].driver
    with pytest.raises(BackendError, match=r"the options of backend as-card.*tf23"):
        exact.configure({"tf23": True}, None)  # type: ignore[arg-type]


def test_a_lack_of_memory_has_both_numbers_and_the_card_still_works() -> None:
    device = card(1 << 20)
    large = np.broadcast_to(np.float32(1), (1 << 40,))  # the host could not hold it either
    with pytest.raises(BackendError, match=r"uploading 4398046511104 bytes .* 1048576"):
        device.upload(large)
    spread = device.compile(trace(lambda x: x.repeat(1, 100_000), [torch.zeros(3, 4)], {}))
    buffer = put(device, A)
    with pytest.raises(BackendError, match=r"repeat.* 4800000 bytes.* 1048576"):
        spread.run([buffer])
    np.testing.assert_array_equal(get(device, buffer), A)


def test_used_memory_counts_what_torch_has_reserved() -> None:
    device = card()
    before = device.memory_used_nbytes() or 0
    buffer = put(device, A)
    assert device.memory_used_nbytes() == before + buffer.nbytes
    device.trim()
    assert device.module.trims == 1


def test_an_index_out_of_range_is_refused_and_the_card_still_works() -> None:
    device = card()
    index = torch.tensor([2, 0])

    def pick(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.index_select(table, 0, index)

    executable = device.compile(trace(pick, [torch.zeros(3, 4), index], {}))
    table = put(device, A)
    for bad in (3, -1):
        _, ran, _ = executable.run([table, put(device, np.array([0, bad]))])
        with pytest.raises(BackendError, match=f"index {bad} is out of range for size 3"):
            ran.wait(20)
    outputs, ran, _ = executable.run([table, put(device, index.numpy())])
    ran.wait(20)
    np.testing.assert_array_equal(get(device, outputs[0]), A[[2, 0]])


def test_an_ignored_class_is_in_range() -> None:
    device = card()
    target = torch.tensor([0, -100, 3])

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.nll_loss(x, target, reduction="none")

    executable = device.compile(trace(loss, [torch.zeros(3, 4), target], {}))
    outputs, ran, _ = executable.run([put(device, A), put(device, target.numpy())])
    ran.wait(20)
    np.testing.assert_array_equal(get(device, outputs[0]), [0, 0, -11])


def test_copies_of_registered_memory_are_not_staged() -> None:
    device = card()
    memory = np.zeros(4096, np.uint8)
    unpin = device.pin(memory)
    sent, received = memory[:48].view(np.float32).reshape(3, 4), memory[64:112].view(np.float32)
    sent[:] = A
    buffer = put(device, sent)
    event = device.download(buffer, received.reshape(3, 4))
    assert not received.any()
    event.wait(20)
    np.testing.assert_array_equal(received.reshape(3, 4), A)
    assert device.staged == 0
    unpin()
    assert not device.module.driver.registered
    put(device, sent)
    put(device, np.float32(1))  # type: ignore[arg-type] # a learning rate may be a scalar
    assert device.staged == 2


def test_empty_tensors_and_unused_statistics_can_be_downloaded() -> None:
    """torch's norms in eval mode return statistics that have elements on a card only."""
    device = card()
    x, *channels = torch.randn(2, 4, 3), *[torch.rand(4) + 0.5 for _ in range(4)]
    norm = torch.ops.aten._native_batch_norm_legit_no_training.default
    inputs = [x, *channels]
    executable = device.compile(trace(lambda *args: norm(*args, 0.1, 1e-5), inputs, {}))
    outputs, ran, _ = executable.run([put(device, tensor.numpy()) for tensor in inputs])
    ran.wait(20)
    found, mean, _ = (get(device, output) for output in outputs)
    np.testing.assert_allclose(found, norm(*inputs, 0.1, 1e-5)[0].numpy(), rtol=1e-5, atol=1e-6)
    assert mean.shape == (0,)
    square = torch.zeros(0, 0)
    scatter = trace(lambda a: a.diagonal_scatter(a.flatten() * 2), [square], {})
    outputs, ran, _ = device.compile(scatter).run([put(device, square.numpy())])
    ran.wait(20)
    assert get(device, outputs[0]).shape == (0, 0)


def test_a_view_that_conjugates_later_keeps_its_mark() -> None:
    """Queued work computed with the numbers of the memory, not with their conjugates."""
    device = card()
    conjugated = trace(lambda a: torch.fft.hfft2(a.transpose(0, 1)), [torch.from_numpy(A)], {})
    outputs, ran, _ = device.compile(conjugated).run([put(device, A)])
    ran.wait(20)
    expected = torch.fft.hfft2(torch.from_numpy(A).T).numpy()
    np.testing.assert_allclose(get(device, outputs[0]), expected, rtol=1e-4, atol=1e-4)


def test_the_room_of_a_card_excludes_other_processes_and_a_reserve() -> None:
    """The planned capacity was the whole memory of the card."""
    device = card(memory_nbytes=16 << 30)
    reserve_nbytes = int(0.05 * (16 << 30)) + (512 << 20)
    assert device.memory_available_nbytes() == (16 << 30) - reserve_nbytes
    kept = put(device, np.zeros(1 << 20, np.float32))  # this process may reuse its own memory
    assert device.memory_available_nbytes() == (16 << 30) - reserve_nbytes
    device.module.card.foreign_nbytes = 10 << 30
    assert device.memory_available_nbytes() == (6 << 30) - reserve_nbytes
    device.module.card.foreign_nbytes = 16 << 30
    assert device.memory_available_nbytes() == 0
    del kept
