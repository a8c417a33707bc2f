"""Batch norms by cuDNN, whose functions are torch's for CPUs here: no machine has a card."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from as_card import AsCard
from benchmarks.operatorcounts import decompositions_of
from hetpipe.backends.pytorch import PyTorchBackend, library, norms, program
from hetpipe.backends.pytorch.choice import why_eager
from hetpipe.backends.pytorch.program import Program
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.capture.precision import Precision
from hetpipe.sdk.backend import Device
from hetpipe.sdk.graph import canonical, graph_inputs

native = torch.ops.aten
HALF, SINGLE, DOUBLE, BRAIN = torch.float16, torch.float32, torch.float64, torch.bfloat16
SHAPES = [(6, 3, 5), (4, 3, 5, 7), (2, 3, 2, 5, 4)]
MASKS = [[True, True, True], [True, False, False], [False, True, True], [True, True, False]]


class Library:
    """Stands for torch's functions of cuDNN on a card, and counts their calls."""

    def __init__(self) -> None:
        self.calls = Counter[str]()
        self.reserve_nbytes = 0

    def select(self, x: Tensor, weight: Tensor, *others: Any) -> SimpleNamespace:
        """Choose as torch does, in `_select_batch_norm_backend`."""
        self.calls["select"] += 1
        *tensors, training, eps = others
        assert all(isinstance(tensor, Tensor) for tensor in tensors)
        dtypes = x.dtype is not BRAIN and (x.dtype is not HALF or weight.dtype is SINGLE)
        fits = x.dim() >= 3 and len(x) <= 880801 and x.numel() < 2**31 - 1
        is_chosen = training and eps >= 0 and weight.dtype is not BRAIN and dtypes and fits
        return SimpleNamespace(name="Cudnn" if is_chosen else "Native")

    def reserve(self, x: Tensor, training: bool) -> int:
        assert training
        return self.reserve_nbytes

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, *how: Any
    ) -> tuple[Tensor, ...]:
        """Compute as `aten.cudnn_batch_norm`, which updates the running statistics in place."""
        self.calls["forward"] += 1
        self.check(x, weight, bias, mean, var)
        *results, new_mean, new_var = native._native_batch_norm_legit_functional(
            x, weight, bias, mean, var, *how
        )
        mean.copy_(new_mean)
        var.copy_(new_var)
        return *results, x.new_empty(0, dtype=torch.uint8)

    def backward(self, x: Tensor, grad: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
        """Compute as `aten.cudnn_batch_norm_backward`: all three gradients."""
        self.calls["backward"] += 1
        *running, mean, inverse_std, eps, reserve = others
        self.check(x, weight, mean, inverse_std)
        assert running == [None, None]
        assert grad.is_contiguous()
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype)
        assert (reserve.shape, reserve.dtype) == ((0,), torch.uint8)
        results: tuple[Tensor, ...] = native.native_batch_norm_backward(
            grad, x, weight, None, None, mean, inverse_std, True, eps, [True, True, True]
        )
        return results

    def check(self, x: Tensor, *channels: Tensor) -> None:
        """Check the arguments as torch does before it calls cuDNN."""
        assert x.is_contiguous()
        assert x.dim() in (2, 3, 4, 5)
        for tensor in channels:
            assert (tensor.shape, tensor.dtype) == (x.shape[1:2], SINGLE)
            assert tensor.is_contiguous()


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Library:
    cudnn = Library()
    names = (each.__name__ for each in library._NORMS)
    functions = {name.partition(".")[0]: getattr(native, name.partition(".")[0]) for name in names}
    functions |= {"cudnn_batch_norm": cudnn.forward, "cudnn_batch_norm_backward": cudnn.backward}
    monkeypatch.setattr(norms, "aten", SimpleNamespace(**functions))
    monkeypatch.setattr(norms, "_choices", {})
    monkeypatch.setattr(torch._C, "_select_batch_norm_backend", cudnn.select)
    monkeypatch.setattr(torch._C, "_get_cudnn_batch_norm_reserve_space_size", cudnn.reserve)
    return cudnn


def inputs_of(
    shape: tuple[int, ...], dtype: torch.dtype = SINGLE, channels: torch.dtype = SINGLE
) -> list[Tensor]:
    """Return x, weight, bias, running mean and running variance."""
    torch.manual_seed(0)
    four = [torch.rand(shape[1]).to(channels) + 0.5 for _ in range(4)]
    return [torch.randn(shape).to(dtype), *four]


def storages(*tensors: Tensor) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("biased", [True, False])
def test_a_norm_returns_new_statistics(
    shape: tuple[int, ...], dtype: torch.dtype, biased: bool, cudnn: Library
) -> None:
    x, weight, bias, *running = inputs_of(shape, dtype)
    given = (x, weight, bias if biased else None, *running)
    before = [tensor.clone() for tensor in (x, weight, bias, *running)]
    wanted = native._native_batch_norm_legit_functional(*given, True, 0.3, 1e-4)
    found = norms.cudnn_norm(*given, True, 0.3, 1e-4)
    torch.testing.assert_close(found, wanted)
    assert not torch.equal(found[3], running[0])
    torch.testing.assert_close([x, weight, bias, *running], before, rtol=0, atol=0)
    assert len(storages(*found, x, weight, bias, *running)) == 10
    torch.testing.assert_close(
        norms.cudnn_norm_without_memory(*given[:3], True, 0.3, 1e-4), wanted[:3]
    )
    assert cudnn.calls["forward"] == 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("mask", MASKS)
def test_a_backward_returns_the_wanted_gradients(
    shape: tuple[int, ...], dtype: torch.dtype, mask: list[bool], cudnn: Library
) -> None:
    x, weight, bias, *running = inputs_of(shape, dtype)
    _, *kept, _, _ = norms.cudnn_norm(x, weight, bias, *running, True, 0.3, 1e-4)
    given = (torch.randn(shape).to(dtype), x, weight, None, None)
    wanted = native.native_batch_norm_backward(*given, *kept, True, 1e-4, [True] * 3)
    found = norms.cudnn_norm_backward(*given, *kept, True, 1e-4, mask)
    for own, grad, want in zip(found, wanted, mask, strict=True):
        assert (own is not None) == want
        torch.testing.assert_close(own if want else grad, grad)
    assert cudnn.calls == {"select": 1, "forward": 1, "backward": 1}


def test_a_backward_reads_values_that_a_graph_keeps_in_half_precision(cudnn: Library) -> None:
    x, weight, bias, *running = inputs_of((4, 3, 5, 7), HALF)
    _, *kept, _, _ = norms.cudnn_norm(x, weight, bias, *running, True, 0.3, 1e-4)
    halves = [each.to(HALF) for each in kept]
    found = norms.cudnn_norm_backward(
        x, x, weight, None, None, *halves, True, 1e-4, [True, True, True]
    )
    wanted = native.native_batch_norm_backward(
        x, x, weight, None, None, *kept, True, 1e-4, [True, True, True]
    )
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-1)
    assert cudnn.calls["backward"] == 1


@pytest.mark.parametrize(
    ("shape", "dtype", "channels", "is_chosen"),
    [
        ((4, 3, 5, 7), SINGLE, SINGLE, True),
        ((4, 3, 5, 7), HALF, SINGLE, True),
        ((4, 1, 5, 7), SINGLE, SINGLE, True),
        ((1, 3, 5), SINGLE, SINGLE, True),
        ((4, 3), SINGLE, SINGLE, False),
        ((2, 3, 2, 2, 2, 2), SINGLE, SINGLE, False),
        ((4, 3, 5, 7), HALF, HALF, False),
        ((4, 3, 5, 7), BRAIN, SINGLE, False),
        ((4, 3, 5, 7), BRAIN, BRAIN, False),
        ((4, 3, 5, 7), DOUBLE, DOUBLE, False),
    ],
)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("reserve_nbytes", [0, 64])
def test_forward_and_backward_choose_the_same(
    shape: tuple[int, ...], dtype: torch.dtype, channels: torch.dtype, is_chosen: bool,
    weighted: bool, biased: bool, reserve_nbytes: int, cudnn: Library,
) -> None:  # fmt: skip
    cudnn.reserve_nbytes = reserve_nbytes
    x, weight, bias, *running = inputs_of(shape, dtype, channels)
    affine = (weight if weighted else None, bias if biased else None)
    _, *kept, _, _ = norms.cudnn_norm(x, *affine, *running, True, 0.1, 1e-5)
    norms.cudnn_norm_without_memory(x, *affine, True, 0.1, 1e-5)
    mask = [True, weighted, weighted and biased]
    norms.cudnn_norm_backward(x, x, affine[0], None, None, *kept, True, 1e-5, mask)
    expected = is_chosen and weighted and reserve_nbytes == 0
    assert (cudnn.calls["forward"], cudnn.calls["backward"]) == ((2, 1) if expected else (0, 0))
    assert cudnn.calls["select"] <= 1


def test_evaluation_is_left_to_torch(cudnn: Library) -> None:
    given = inputs_of((4, 3, 5, 7))
    found = norms.cudnn_norm(*given, False, 0.1, 1e-5)  # type: ignore[arg-type] # three follow
    wanted = native._native_batch_norm_legit_functional(*given, False, 0.1, 1e-5)
    torch.testing.assert_close(found, wanted)
    x, weight, _, *running = given
    gradients = x, x, weight, *running, *running, False, 1e-5, [True, True, True]
    torch.testing.assert_close(
        norms.cudnn_norm_backward(*gradients), native.native_batch_norm_backward(*gradients)
    )
    assert not cudnn.calls


def test_an_empty_batch_is_left_to_torch(cudnn: Library) -> None:
    x, weight, *_ = inputs_of((0, 3, 5, 7))
    assert not norms._has_cudnn(x, weight, 1e-5)
    assert not cudnn.calls


def test_the_installed_torch_has_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the stand-ins, torch chooses its own kernels for the CPU."""
    monkeypatch.undo()
    x, weight, *_ = inputs_of((4, 3, 5, 7))
    assert not norms._is_chosen(x, weight, 1e-5)
    assert callable(torch._C._get_cudnn_batch_norm_reserve_space_size)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kernels", ["cuda", "cpu", "xpu", "mps"])
def test_the_programs_of_a_card_call_cudnn(kernels: str, cudnn: Library) -> None:
    """A compiler gets torch's operators instead, and may compile and replay the program."""
    given = inputs_of((4, 3, 5, 7))

    def norm(*given: Tensor) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = native._native_batch_norm_legit_functional(
            *given, True, 0.1, 1e-5
        )
        return results

    graph = canonical(make_fx(norm)(*given))
    own = Program(graph, frozenset(), torch.device("cpu"), "card", kernels)
    assert why_eager(own, checks=False) == ""
    wanted = list(norm(*given))
    torch.testing.assert_close(own.functional()(given), wanted)
    assert not cudnn.calls
    torch.testing.assert_close(own.call(given), wanted)
    assert cudnn.calls["forward"] == (kernels == "cuda")


def passes_of(precision: str | None) -> list[Any]:
    """Return the graphs of a small network with two norms, one of them without weights."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2, affine=False), nn.Flatten(), nn.Linear(72, 5),
    )  # fmt: skip
    example = torch.randn(8, 3, 6, 6), torch.randint(0, 5, (8,))
    captured = Captured(model, nn.functional.cross_entropy, example, Precision(compute=precision))
    (graphs,) = captured.stage_graphs(
        [], [decompositions_of("pytorch")], [8], hp.optim.sgd(lr=0.1), extras=()
    )
    (passes,) = graphs.passes.values()
    assert passes.backward is not None
    return [passes.forward.graph, passes.backward.graph]


def ran(device: Device, graph: Any) -> list[np.ndarray[Any, Any]]:
    """Return the results of a graph for random inputs."""
    random, buffers, events = np.random.default_rng(0), [], []
    for node in graph_inputs(graph):
        value = node.meta["val"]
        array = random.uniform(0.5, 1.5, tuple(value.shape))
        if not value.is_floating_point():
            array = random.integers(0, 5, tuple(value.shape))
        buffer, event = device.upload(array.astype(str(value.dtype).removeprefix("torch.")))
        buffers.append(buffer)
        events.append(event)
    outputs, end, _ = device.compile(graph).run(buffers, after=events)
    end.wait(20)
    arrays = [np.empty(output.shape, output.dtype) for output in outputs]
    for output, array in zip(outputs, arrays, strict=True):
        device.download(output, array).wait(20)
    return arrays


def test_a_network_on_a_card_has_the_results_of_the_cpu(
    cudnn: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, cpu = AsCard(), PyTorchBackend()
    for graph in passes_of(None):
        wanted = ran(cpu.open(cpu.discover()[0]), graph)
        with monkeypatch.context() as patch:
            patch.setattr(program, "by_library", lambda g, _: library.by_library(g, "cuda"))
            found = ran(card.open(card.discover()[0]), graph)
        for own, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
    assert cudnn.calls == {"select": 1, "forward": 1, "backward": 1}


def test_programs_of_half_precision_call_cudnn(cudnn: Library) -> None:
    """The graphs declare half precision for the kept values. A norm may keep them exactly."""
    forward, backward = passes_of("float16")
    torch.manual_seed(0)
    for graph, name in ((forward, "forward"), (backward, "backward")):
        values = [node.meta["val"] for node in graph_inputs(graph)]
        given = [
            torch.rand(value.shape).add(0.5).to(value.dtype)
            if value.is_floating_point()
            else torch.randint(0, 5, value.shape, dtype=value.dtype)
            for value in values
        ]
        with torch.inference_mode():
            Program(graph, frozenset(), torch.device("cpu"), "card", "cuda").call(given)
        assert cudnn.calls[name] == 1
