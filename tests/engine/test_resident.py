"""During a step on OpenCL, only cuts, the batch and the loss cross to or from the host."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hetpipe.backends.opencl import device as opencl_device
from hetpipe.backends.opencl.run import memory as opencl_memory
from models import CASES
from plans import unpriced

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member

MICROBATCHES = 4
STEPS = 3
COPIES = (
    "enqueue_copy", "enqueue_map_buffer", "enqueue_read_buffer", "enqueue_write_buffer",
    "_enqueue_read_buffer", "_enqueue_write_buffer", "enqueue_svm_memcpy",
)  # fmt: skip


@pytest.fixture
def crossings(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """Count crossings by (direction, shape), and copies outside upload and download as "behind"."""
    pyopencl = pytest.importorskip("pyopencl")
    seen: Counter[Any] = Counter()
    inside: list[str] = []  # "upload" or "download" while one runs; all in one thread

    def counted(name: str, at: int) -> None:
        true = getattr(opencl_device.OpenCLDevice, name)

        def call(self: Any, *args: Any, **options: Any) -> Any:
            seen[name, tuple(args[at].shape)] += 1
            inside.append(name)
            try:
                return true(self, *args, **options)
            finally:
                inside.pop()

        monkeypatch.setattr(opencl_device.OpenCLDevice, name, call)

    counted("upload", 0)
    counted("download", 1)

    def watched(name: str) -> None:
        true = getattr(pyopencl, name)

        def call(*args: Any, **options: Any) -> Any:
            if not inside:
                seen["behind", name] += 1
            return true(*args, **options)

        monkeypatch.setattr(pyopencl, name, call)

    for name in COPIES:
        if hasattr(pyopencl, name):
            watched(name)

    def host(self: Any) -> Any:
        if not inside:
            seen["behind", "host memory"] += 1
        return self.piece.host

    monkeypatch.setattr(opencl_memory.Memory, "host", property(host))
    return seen


def opencl_ids() -> list[str]:
    infos, _ = hp.discover_devices(["opencl"])
    return [info.id for info in infos if not info.capabilities.reference]


@pytest.mark.wide
@pytest.mark.parametrize("device", opencl_ids())
@pytest.mark.parametrize("stages", [1, 2])
def test_only_cuts_batch_and_loss_cross(device: str, stages: int, crossings: Counter[Any]) -> None:
    case = CASES["residual_cnn"]
    torch.manual_seed(0)
    model = case.model()
    generator = torch.Generator().manual_seed(0)
    batches = [case.batch(generator) for _ in range(STEPS + 2)]
    captured = Captured(model, case.loss_fn, batches[0])
    members = (Member("first", device), Member("second", "pytorch:cpu:0"))[:stages]
    plan, costs = unpriced(captured, [m.id for m in members], "1f1b", case.mini_batch, MICROBATCHES)
    with hp.Pipeline(
        model,
        case.loss_fn,
        batches[0],
        cluster=Cluster(members=members, transport="local"),
        optimizer=hp.optim.sgd(lr=0.01, momentum=0.9),
        captured=captured,
        plan=plan,
        costs=costs,
    ) as pipe:
        for x, y in batches[:2]:  # the first steps upload constant scalars and allocate memory
            pipe.step(x, y)
        crossings.clear()
        for x, y in batches[2:]:
            pipe.step(x, y)
        found = Counter(crossings)
    each = STEPS * MICROBATCHES
    samples = case.mini_batch // MICROBATCHES
    x_shape, y_shape = ((samples, *leaf.shape[1:]) for leaf in batches[0])
    expected = Counter({("upload", tuple(x_shape)): each})
    expected["download", ()] += STEPS  # the sum of the gradients, to see if all are finite
    if stages == 1:
        expected["upload", tuple(y_shape)] += each
        expected["download", ()] += each  # losses
    else:
        graphs = captured.stage_graphs(plan.cuts, [{}, {}], [samples], hp.optim.sgd(lr=0.01))
        passes = graphs[0].passes[samples]
        for slot in passes.forward.outputs:
            if slot.role == "cut":
                expected["download", slot.shape] += each
        assert passes.backward is not None
        for slot in passes.backward.inputs:
            if slot.role == "tangent":
                expected["upload", slot.shape] += each
    assert found == expected
