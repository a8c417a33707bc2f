"""The digits CNN, with stages on the FPGA emulator and on torch, has the losses of torch."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from plans import unpriced
from reference import train

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member
from hetpipe.zoo.load import load_workload

pytestmark = pytest.mark.slow

STEPS, MINI_BATCH, MICROBATCHES = 20, 64, 4


def test_digits_on_fpga_emulator_and_torch() -> None:
    found, _ = hp.discover_devices(["opencl"])
    emulators = [d.id for d in found if d.kind == "fpga" and d.capabilities.emulated]
    if not emulators:
        pytest.skip("no FPGA emulator: install the extra `emulators`")
    workload = load_workload("digits")
    batches = list(islice(workload.batches(MINI_BATCH, 0), STEPS))
    expected = train(
        workload.model, workload.loss_fn, batches, MICROBATCHES,
        lambda p: torch.optim.SGD(p, lr=0.003, momentum=0.9),
    ).losses  # fmt: skip

    captured = Captured(workload.model, workload.loss_fn, batches[0])
    plan, costs = unpriced(captured, ["fpga", "cpu"], "1f1b", MINI_BATCH, MICROBATCHES)
    members = (Member("fpga", emulators[0], cores=(0,)), Member("cpu", "pytorch:cpu:0", cores=(1,)))
    with hp.Pipeline(
        workload.model,
        workload.loss_fn,
        batches[0],
        cluster=Cluster(members=members),
        optimizer=hp.optim.sgd(lr=0.003, momentum=0.9),
        captured=captured,
        plan=plan,
        costs=costs,
    ) as pipe:
        losses = [pipe.step(x, y) for x, y in batches]
    assert losses == pytest.approx(expected, rel=1e-4)
