"""Paced devices: they return another device's results in the time that a model predicts."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from benchmarks.paced import PACES, Pace, PacedBackend, PacedOpenCL, PacedTorch

from hetpipe.errors import BackendError
from hetpipe.profile.probing import compile_operator, filled_buffer

SIZE = 1024


def test_a_graph_takes_the_longer_of_operations_and_bytes() -> None:
    device = PacedTorch().open(PacedTorch().discover()[0])
    times_s = []
    for pace in (Pace(1e12, 1e9, 0.0), Pace(1e6, 1e12, 0.0), Pace(1e12, 1e12, 0.01)):
        # These paces are not in PACES, so the test sets them directly.
        device._pace = pace  # type: ignore[attr-defined]
        program = compile_operator(device, torch.ops.aten.neg.default, 1, (SIZE,))
        times_s.append(program._seconds)  # type: ignore[union-attr]
    assert times_s == pytest.approx([8 * SIZE / 1e9, SIZE / 1e6, 0.01], rel=1e-6)


@pytest.mark.parametrize("backend", [PacedTorch, PacedOpenCL])
def test_results_are_right_and_take_the_modelled_time(backend: type[PacedBackend]) -> None:
    try:
        infos = backend().discover()
    except BackendError as error:
        pytest.skip(str(error))
    if not infos:
        pytest.skip(f"{backend.of} finds no processor")
    assert {info.id.split(":")[1] for info in infos} == set(PACES)
    device = backend().open(next(i for i in infos if i.id.split(":")[1] == "slow"))
    shape = (4 * SIZE, SIZE)
    program = compile_operator(device, torch.ops.aten.neg.default, 1, shape)
    assert program is not None
    buffer = filled_buffer(device, shape)
    begin_s = time.monotonic()
    (negative,), event, chunks = program.run([buffer])
    event.wait()
    assert time.monotonic() - begin_s >= 2 * buffer.nbytes / PACES["slow"].memory_Bps
    assert not chunks
    result = np.empty(shape, np.float32)
    device.download(negative, result).wait()
    assert (result == -0.5).all()
    device.close()
