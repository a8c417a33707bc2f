"""Whole steps on one core: the losses are torch's, and all figures are there; none is asserted."""

from __future__ import annotations

import pytest
from opencl_devices import IDS

from hetpipe.bench import stepmodels
from hetpipe.bench.steprates import measure

RUNTIME = next((each for each in IDS if "pocl" in each or "intel-cpu" in each), None)


@pytest.mark.skipif(RUNTIME is None, reason="no OpenCL runtime for CPUs")
def test_a_step_is_measured_beside_torch() -> None:
    rate = measure(RUNTIME, "mlp", 0.001, 2)
    assert rate.loss == pytest.approx(rate.torch_loss, rel=1e-5)
    assert (rate.model, rate.device) == ("mlp", RUNTIME)
    for figure in (rate.operations, rate.time_s, rate.torch_time_s, rate.ceiling_gflops):
        assert 0 < figure < float("inf")
    assert rate.share_of_ceiling == pytest.approx(
        rate.operations / rate.ceiling_gflops / 1e9 / rate.time_s
    )


@pytest.mark.parametrize("name", stepmodels.__all__)
def test_the_models_are_workloads(name: str) -> None:
    workload = getattr(stepmodels, name)()
    x, _ = next(workload.batches(workload.mini_batch, 0))
    assert len(x if not isinstance(x, tuple) else x[0]) == workload.mini_batch
