"""Stages that share a device run passes from separate threads without affecting each other."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from found_devices import fetch
from opencl_devices import compiled, opencl_device, upload
from opencl_products import INTERPRETERS, OPENCL

ROUNDS = 60


@pytest.fixture(autouse=True)
def eager_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.slow
@pytest.mark.parametrize("other", [0, 1], ids=["one queue", "two queues"])
@pytest.mark.parametrize("device_id", [each for each in OPENCL if each not in INTERPRETERS])
def test_passes_of_two_threads_do_not_interfere(device_id: str, other: int) -> None:
    """Each pass has intermediates in memory that all passes of a queue share."""
    device = opencl_device(device_id)
    if device.info.capabilities.queues <= other:
        pytest.skip(f"{device_id} has one queue for passes")
    wrong: list[tuple[int, float]] = []

    def chain(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.tanh(x @ weight)
        return x

    def repeat(queue: int, inputs: list[torch.Tensor]) -> Callable[[], None]:
        expected, executable = chain(*inputs), compiled(device, chain, *inputs)
        buffers, events = upload(device, *inputs)

        def run() -> None:
            for index in range(ROUNDS):
                (found,), event, _ = executable.run(buffers, after=events, queue=queue)
                error = (torch.from_numpy(fetch(device, found, [event])) - expected).abs().max()
                if not error < 1e-4:
                    wrong.append((index, float(error)))

        return run

    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(64, 64, generator=generator) / 8 for _ in range(7)] for _ in range(2)]
    pairs = zip((0, other), inputs, strict=True)
    threads = [threading.Thread(target=repeat(queue, given)) for queue, given in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
