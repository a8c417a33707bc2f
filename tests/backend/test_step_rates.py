"""Steps, launches and starts are measured: losses equal torch's and all figures exist.

No time has a required value.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from benchmarks import compiled, launches, loaded, stepmodels
from benchmarks.eagermemory import peak_nbytes
from benchmarks.steprates import Trained, measure
from opencl_devices import IDS
from torch import nn
from torch._inductor.exc import InvalidCxxCompiler

from hetpipe import optim
from hetpipe.capture.program import GRAD, INPUT, PARAM, SAVED, STATE
from hetpipe.sdk.host.registry import open_device
from hetpipe.train.eager import Eager
from hetpipe.zoo.data import RandomModel, language
from hetpipe.zoo.gpt import GPT
from hetpipe.zoo.text import token_loss

RUNTIME = next((each for each in IDS if "pocl" in each or "intel-cpu" in each), None)


@pytest.mark.slow
@pytest.mark.skipif(RUNTIME is None, reason="no OpenCL runtime for CPUs")
def test_a_step_is_measured_beside_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_lacks_compiler", lambda: "none here")  # compiling takes long
    rate = measure(RUNTIME, "mlp", 0.001, 2)
    assert rate.loss == pytest.approx(rate.torch_loss, rel=1e-5)
    assert (rate.model, rate.device) == ("mlp", RUNTIME)
    for figure in (rate.operations, rate.time_s, rate.torch_time_s, rate.ceiling_gflops):
        assert 0 < figure < float("inf")
    assert (rate.not_compiled, rate.compiled_time_s, rate.compile_s) == ("none here", None, None)
    assert rate.memory_nbytes is not None
    assert min(rate.memory_nbytes, rate.torch_memory_nbytes) > 0
    assert rate.share_of_ceiling == pytest.approx(
        rate.operations / rate.ceiling_gflops / 1e9 / rate.time_s
    )


@pytest.mark.skipif(RUNTIME is None, reason="no OpenCL runtime for CPUs")
def test_launches_are_compared_with_the_drivers() -> None:
    device = open_device(RUNTIME)
    executable = device.compile(launches.chain(device, 5))
    assert len(executable.launches) == 5  # none has joined another
    cost = launches.measure(RUNTIME, kernels=5, rounds=2)
    assert 0 < cost.least_graph_s <= cost.graph_s < float("inf")
    assert cost.driver_s is not None
    assert f"{cost.graph_s * 1e6:.2f} us" in str(cost)
    assert f"{cost.driver_s * 1e6:.2f} us" in str(cost)


@pytest.mark.skipif(RUNTIME is None, reason="no OpenCL runtime for CPUs")
def test_a_second_load_exports_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    monkeypatch.setenv(loaded.BEGIN, repr(time.time()))
    for exports in (1, 0):
        told = loaded.load(RUNTIME, "mlp")
        assert told["counts"] == {"exports": exports}
        ends = list(told["phases"].values())
        assert ends == sorted(ends)
        assert loaded.LOADED in told["phases"]


@pytest.mark.skipif(RUNTIME is None, reason="no OpenCL runtime for CPUs")
def test_callers_of_equal_kernels_are_generated_once() -> None:
    from pyopencl import _PYOPENCL_NO_CACHE, invoker

    if not _PYOPENCL_NO_CACHE:
        pytest.skip("pyopencl, imported by an earlier test, has a cache of its own for callers")
    device = open_device(RUNTIME)
    graph = launches.chain(device, 7)
    device.compile(graph)
    before = invoker._generate_enqueue_and_set_args_module.cache_info()
    device.compile(graph)
    after = invoker._generate_enqueue_and_set_args_module.cache_info()
    assert (after.hits - before.hits, after.misses) == (7, before.misses)


@pytest.mark.parametrize("name", stepmodels.__all__)
def test_the_models_are_workloads(name: str) -> None:
    workload = getattr(stepmodels, name)()
    x, _ = next(workload.batches(workload.mini_batch, 0))
    assert len(x if not isinstance(x, tuple) else x[0]) == workload.mini_batch


def _regression(rows: int, width: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(width, 2 * width, bias=False), torch.randn(rows, width), torch.zeros(rows)


def _loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (out.mean(1) - y).square().mean()


def test_the_memory_of_eager_torch_is_counted() -> None:
    """The peak holds weight, momentum and gradient, or the result and its derived tensors."""
    rows, width = 512, 64
    model, x, y = _regression(rows, width)
    eager = Eager(model, _loss, optim.sgd(lr=0.1, momentum=0.9))
    eager.step(x, y, [rows])
    weight, out = 4 * 2 * width * width, 4 * 2 * width * rows
    counted = peak_nbytes(eager, x, y, rows)
    stay = 2 * weight + 4 * rows * (width + 1)
    assert stay + out < counted < stay + 2 * weight + 3 * out


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Dynamo and autograd without inductor, whose C++ takes long to compile."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setattr(compiled, "_lacks_compiler", lambda: "")


@pytest.mark.usefixtures("quick")
def test_a_compiled_step_trains_as_eager_torch() -> None:
    model, x, y = _regression(8, 4)
    rule = optim.sgd(lr=0.1)
    with compiled.compiled(model, _loss, rule, (x, y), 8) as rival:
        assert rival.step is not None
        assert rival.compile_s is not None
        second = rival.step()
    eager = Eager(model, _loss, rule)
    assert second == pytest.approx([eager.step(x, y, [8]) for _ in range(2)][1], rel=1e-5)


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
    model, x, y = _regression(8, 4)
    with compiled.compiled(model, _loss, optim.sgd(lr=0.1), (x, y), 8) as rival:
        assert rival.step is None
        assert "no C++ compiler" in rival.why_not


@pytest.mark.usefixtures("quick")
def test_a_loss_that_cannot_be_compiled_is_reported() -> None:
    def broken(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such loss")

    model, x, y = _regression(8, 4)
    with compiled.compiled(model, broken, optim.sgd(lr=0.1), (x, y), 8) as rival:
        assert rival.step is None
        assert "no such loss" in rival.why_not


@pytest.mark.slow
@pytest.mark.skipif(RUNTIME is None, reason="no OpenCL runtime for CPUs")
def test_gradients_and_intermediates_reuse_saved_tensors() -> None:
    """Both together need less new memory than the gradients alone would."""
    workload = RandomModel(
        lambda: GPT(64, 32, 192, 2, 2), language(64, 32), 16, optim.adamw(lr=1e-3), token_loss
    ).workload("gpt")
    device = open_device(RUNTIME)
    trained = Trained(workload, next(workload.batches(16, 0)))
    trained.trace(device)
    trained.load(device)
    for _ in range(4):
        trained.step()
    nbytes: Counter[str] = Counter()
    for slot in trained._single.stage._binding.slots.values():
        nbytes[slot.role] += slot.nbytes
    stays = nbytes[PARAM] + nbytes[STATE] + nbytes[SAVED] + nbytes[INPUT]
    used = device.memory_used_nbytes()
    assert used is not None
    assert stays < used < stays + nbytes[GRAD]
