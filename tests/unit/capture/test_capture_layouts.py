"""Every layer of `torch.nn` between transposes, on a device of each backend, compared with float64.

A captured graph has no strides: the layer's input, output and incoming gradient are transposed
views, which eager autograd copies for kernels that ignore strides. `nn.LSTM` is absent: torch keeps
its workspace on the device, see tests/engine/test_torch_lstm.py.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_harness import Stages, eager, total
from test_capture_devices import DEVICES, SHARES, SIZES, _run_on, opened
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from hetpipe.capture import Captured
from hetpipe.errors import UnsupportedOperatorError
from hetpipe.sdk.host.registry import get_backend


class First(nn.Module):
    """The first result of a layer, which gets the same tensor for `same` inputs."""

    def __init__(self, layer: nn.Module, same: int = 1, **options: Any) -> None:
        super().__init__()
        self.layer, self.same, self.options = layer, same, options

    def forward(self, x: torch.Tensor) -> Any:
        result = self.layer(*[x] * self.same, **self.options)
        return result[0] if isinstance(result, tuple) else result


class OfSquares(nn.Module):
    """A function of square matrices that are asymmetric and far from singular."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(0.1 * x + torch.eye(x.shape[-1], dtype=x.dtype))


class Between(nn.Module):
    """A layer whose input and output are transposed views of its neighbours' tensors."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.tensor(1.5)), layer
        with torch.no_grad():
            result = layer(torch.rand(2, *shape))
        self.last = nn.Linear(result.shape[1], 3) if result.ndim > 1 else nn.Linear(1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(reversed_view(x * self.scale))
        y = y.unsqueeze(-1) if y.ndim == 1 else reversed_view(y)
        return torch.tanh(self.last(y)).flatten(1)


def reversed_view(x: torch.Tensor) -> torch.Tensor:
    """Return a view with all dimensions after the samples in reverse order."""
    return x.permute(0, *range(x.ndim - 1, 0, -1))


def loss_fn(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out * out * target[:, None]).sum(1).mean()


Make = Callable[[], nn.Module]
ROW, IMAGE, VOLUME = (6, 5), (6, 5, 4), (4, 5, 4, 3)
LAYERS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 7), ROW),
    "linear, weight norm": (lambda: weight_norm(nn.Linear(5, 7)), ROW),
    "linear, weight norm of columns": (lambda: weight_norm(nn.Linear(5, 7), dim=1), ROW),
    "linear, spectral norm": (lambda: spectral_norm(nn.Linear(5, 7)), ROW),
    "bilinear": (lambda: First(nn.Bilinear(5, 5, 3), 2), ROW),
    "conv1d": (lambda: nn.Conv1d(6, 4, 3), ROW),
    "conv1d, weight norm": (lambda: weight_norm(nn.Conv1d(6, 4, 3)), ROW),
    "conv2d": (lambda: nn.Conv2d(6, 4, 3, padding=1), IMAGE),
    "conv2d, depthwise": (lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6), IMAGE),
    "conv2d, 1x1": (lambda: nn.Conv2d(6, 4, 1), IMAGE),
    "conv3d": (lambda: nn.Conv3d(4, 3, 2), VOLUME),
    "conv transpose 1d": (lambda: nn.ConvTranspose1d(6, 4, 3, 2), ROW),
    "conv transpose 2d": (lambda: nn.ConvTranspose2d(6, 4, 3, 2), IMAGE),
    "conv transpose 3d": (lambda: nn.ConvTranspose3d(4, 3, 2), VOLUME),
    "batch norm 1d": (lambda: nn.BatchNorm1d(6), ROW),
    "batch norm 2d": (lambda: nn.BatchNorm2d(6), IMAGE),
    "batch norm 3d": (lambda: nn.BatchNorm3d(4), VOLUME),
    "group norm 1d": (lambda: nn.GroupNorm(3, 6), ROW),
    "group norm 2d": (lambda: nn.GroupNorm(2, 6), IMAGE),
    "group norm without weights": (lambda: nn.GroupNorm(2, 6, affine=False), IMAGE),
    "instance norm 1d": (lambda: nn.InstanceNorm1d(6, affine=True), ROW),
    "instance norm 2d": (lambda: nn.InstanceNorm2d(6), IMAGE),
    "layer norm": (lambda: nn.LayerNorm(5), ROW),
    "layer norm of all": (lambda: nn.LayerNorm([5, 4]), IMAGE),
    "rms norm": (lambda: nn.RMSNorm(5), ROW),
    "local response norm": (lambda: nn.LocalResponseNorm(3), IMAGE),
    "max pool 1d": (lambda: nn.MaxPool1d(2), ROW),
    "max pool 2d": (lambda: nn.MaxPool2d(2, 1), IMAGE),
    "max pool 3d": (lambda: nn.MaxPool3d(2, 1), VOLUME),
    "avg pool 1d": (lambda: nn.AvgPool1d(2), ROW),
    "avg pool 2d": (lambda: nn.AvgPool2d(2, 1), IMAGE),
    "avg pool 3d": (lambda: nn.AvgPool3d(2, 1), VOLUME),
    "adaptive avg pool 1d": (lambda: nn.AdaptiveAvgPool1d(3), ROW),
    "adaptive avg pool 2d": (lambda: nn.AdaptiveAvgPool2d((3, 2)), IMAGE),
    "adaptive avg pool 3d": (lambda: nn.AdaptiveAvgPool3d(2), VOLUME),
    "adaptive max pool 1d": (lambda: nn.AdaptiveMaxPool1d(3), ROW),
    "adaptive max pool 2d": (lambda: nn.AdaptiveMaxPool2d((3, 2)), IMAGE),
    "adaptive max pool 3d": (lambda: nn.AdaptiveMaxPool3d(2), VOLUME),
    "lp pool 1d": (lambda: nn.LPPool1d(2, 2), ROW),
    "lp pool 2d": (lambda: nn.LPPool2d(2, 2), IMAGE),
    "gru": (lambda: First(nn.GRU(5, 4, batch_first=True)), ROW),
    "rnn": (lambda: First(nn.RNN(5, 4, batch_first=True)), ROW),
    "attention": (lambda: First(nn.MultiheadAttention(4, 2, batch_first=True), 3), (5, 4)),
    "attention without weights": (
        lambda: First(nn.MultiheadAttention(4, 2, batch_first=True), 3, need_weights=False),
        (5, 4),
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        (5, 4),
    ),
    "decoder layer": (
        lambda: First(nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True), 2),
        (5, 4),
    ),
    "upsample nearest": (lambda: nn.Upsample(scale_factor=2), IMAGE),
    "upsample linear": (lambda: nn.Upsample(scale_factor=2, mode="linear"), ROW),
    "upsample bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "upsample bicubic": (lambda: nn.Upsample(scale_factor=2, mode="bicubic"), IMAGE),
    "upsample trilinear": (lambda: nn.Upsample(scale_factor=2, mode="trilinear"), VOLUME),
    "pixel shuffle": (lambda: nn.PixelShuffle(2), (8, 3, 2)),
    "pixel unshuffle": (lambda: nn.PixelUnshuffle(2), (2, 4, 6)),
    "channel shuffle": (lambda: nn.ChannelShuffle(2), IMAGE),
    "reflection pad 1d": (lambda: nn.ReflectionPad1d(2), ROW),
    "reflection pad 2d": (lambda: nn.ReflectionPad2d(2), IMAGE),
    "reflection pad 3d": (lambda: nn.ReflectionPad3d(1), VOLUME),
    "replication pad 1d": (lambda: nn.ReplicationPad1d(2), ROW),
    "replication pad 2d": (lambda: nn.ReplicationPad2d(2), IMAGE),
    "replication pad 3d": (lambda: nn.ReplicationPad3d(1), VOLUME),
    "circular pad 2d": (lambda: nn.CircularPad2d(1), IMAGE),
    "zero pad 2d": (lambda: nn.ZeroPad2d(1), IMAGE),
    "unfold": (lambda: nn.Unfold(2), IMAGE),
    "fold": (lambda: nn.Fold((4, 5), 2), (8, 12)),
    "flatten": (lambda: nn.Flatten(), IMAGE),
    "unflatten": (lambda: nn.Unflatten(1, (2, 3)), ROW),
    "glu": (lambda: nn.GLU(1), ROW),
    "softmax": (lambda: nn.Softmax(1), ROW),
    "softmin": (lambda: nn.Softmin(1), ROW),
    "log softmax": (lambda: nn.LogSoftmax(1), ROW),
    "softmax 2d": (lambda: nn.Softmax2d(), IMAGE),
    "cosine similarity": (lambda: First(nn.CosineSimilarity(1), 2), ROW),
    "pairwise distance": (lambda: First(nn.PairwiseDistance(), 2), ROW),
    "prelu": (lambda: nn.PReLU(6), ROW),
    **{
        name: (functools.partial(OfSquares, function), (4, 4))
        for name, function in {
            "determinant": torch.linalg.det,
            "sign and logarithm of the determinant": lambda x: torch.stack(torch.slogdet(x), -1),
            "logarithm of the determinant": lambda x: torch.logdet((x @ x.tril()).mT),
            "inverse": torch.linalg.inv,
            "solve": lambda x: torch.linalg.solve(x, x.tril()),
            "solve from the right": lambda x: torch.linalg.solve(x, x.tril(), left=False),
            "lu": lambda x: torch.cat(torch.linalg.lu(x)[1:], -1),
            "lu factor": lambda x: torch.linalg.lu_factor(x)[0],
            "lu solve": lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(x), x.tril()),
            "cholesky": lambda x: torch.linalg.cholesky((x @ x.mT).mT),
            "cholesky solve": lambda x: torch.cholesky_solve(x, x.tril().mT, upper=True),
            "qr": lambda x: torch.cat(torch.linalg.qr(x), -1),
        }.items()
    },
    **{
        kind.__name__.lower(): (kind, ROW)
        for kind in (
            nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh,
            nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid,
            nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink,
        )
    },
}  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_between_transposes(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    model = Between(make(), shape)
    x = torch.randn(sum(SIZES), *reversed(shape))
    batch = x, torch.rand(len(x))
    captured = Captured(model, loss_fn, batch)
    exact = copy.deepcopy(model).double(), loss_fn, (x.double(), batch[1].double())
    loss, _, expected = eager(*exact, SIZES, SHARES)
    for device_id in DEVICES:
        device = opened(device_id)
        tables = [get_backend(device.info.backend).decompositions()]
        graphs = captured.stage_graphs([], tables, SIZES, None)
        state = Stages(captured, graphs, execute=functools.partial(_run_on, device))
        try:
            found = total(state.step(batch, SIZES, SHARES))
        except UnsupportedOperatorError:
            assert device.info.backend != "pytorch"
            continue
        assert state.loss == pytest.approx(loss, rel=1e-5), device_id
        assert found.keys() == expected.keys()
        largest = max(float(value.abs().max()) for value in expected.values())
        for key, value in expected.items():
            error = float((found[key].double() - value).abs().max())
            assert error <= 1e-5 * largest, (device_id, key, error, largest)


class Flattened(nn.Module):
    """Flat views of results whose decompositions return another memory layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(150, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        results = [h.topk(6, -1)[0], h.sort(-1)[0], h.cumsum(1), h.cumprod(1), h.cummax(1)[0]]
        flat = [result.view(-1) for result in results]
        return self.last(torch.cat([y.view(len(x), -1) for y in flat], 1))


@pytest.mark.slow
def test_a_view_after_a_decomposition() -> None:
    torch.manual_seed(0)
    model, x = Flattened(), torch.randn(sum(SIZES), 5, 4)
    batch = x, torch.rand(len(x))
    captured = Captured(model, loss_fn, batch)
    table = get_backend("opencl").decompositions()
    state = Stages(captured, captured.stage_graphs([], [table], SIZES, None))
    found = total(state.step(batch, SIZES, SHARES))
    loss, _, expected = eager(model, loss_fn, batch, SIZES, SHARES)
    assert state.loss == pytest.approx(loss, rel=1e-5)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)
