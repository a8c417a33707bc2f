"""A kernel with a specification replaces the stock kernel, by a cluster file or in Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hetpipe.backends.opencl import OpenCLBackend
from test_own_kernels import apart, pocl, result  # noqa: F401 - a fixture
from typer.testing import CliRunner

import hetpipe as hp
from hetpipe.cli.app import app
from hetpipe.cluster import Cluster
from hetpipe.errors import BackendError
from hetpipe.sdk.host import registry

SOURCE = """
__kernel void doubled(__global const float *x, __global float *y, const int n, const float factor)
{
    const int i = get_global_id(0);
    if (i < n)
        y[i] = factor * fmax(x[i], 0.0f);
}
"""
SPEC = """
operator = "aten.relu.default"
global_size = ["round_up(n, 8)"]
local_size = [8]
[argument.x]
shape = ["n"]
input = 0
[argument.y]
shape = ["n"]
output = true
result = 0
[argument.n]
value = "n"
[argument.factor]
number = 2.0
[expect]
y = "factor * maximum(x, 0)"
[[case]]
n = 100
"""
PRODUCT = """
__kernel void product(__global const float *a, __global const float *b, __global float *c, int k,
                      int n)
{
    const int row = get_global_id(0), col = get_global_id(1);
    float sum = 1.0f;  // a mark: ours begin with 0
    for (int i = 0; i < k; i++) sum += a[row * k + i] * b[i * n + col];
    c[row * n + col] = sum;
}
"""
PRODUCT_SPEC = """
operator = "aten.mm.default"
global_size = ["m", "n"]
argument.a = { shape = ["m", "k"], input = 0 }
argument.b = { shape = ["k", "n"], input = 1 }
argument.c = { shape = ["m", "n"], output = true, result = 0 }
argument.k = { value = "k" }
argument.n = { value = "n" }
expect.c = "1 + a @ b"
[[case]]
m = 3
k = 4
n = 5
"""
X = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "mine.cl").write_text(SOURCE)
    (tmp_path / "mine.toml").write_text(SPEC)
    return tmp_path / "mine.toml"


@pytest.mark.slow
def test_a_kernel_of_a_cluster_file_runs_in_workers(spec: Path) -> None:
    """Twice the relu equals the relu of a network with a first layer twice as large."""
    pocl("opencl")
    text = '[backend.opencl]\nkernels = ["mine.toml"]\n'
    for device in ("opencl:pocl:0", "pytorch:cpu:0"):
        text += f'[[device]]\ndevice = "{device}"\n'
    path = spec.with_name("cluster.toml")
    path.write_text(text)

    class Doubled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * torch.relu(x)

    def model(doubled: bool) -> torch.nn.Sequential:
        torch.manual_seed(0)
        relu = Doubled() if doubled else torch.nn.ReLU()
        return torch.nn.Sequential(torch.nn.Linear(6, 8), relu, torch.nn.Linear(8, 3))

    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    loss_fn = torch.nn.functional.cross_entropy
    cluster = Cluster.load(path)
    with hp.Pipeline(
        model(doubled=False), loss_fn, (x, y), cluster=cluster, optimizer=hp.optim.sgd(lr=0.1),
        cuts=[1], microbatches=2,
    ) as pipe:  # fmt: skip
        assert pipe.evaluate([(x, y)]).loss == pytest.approx(
            loss_fn(model(True)(x), y).item(), rel=1e-5
        )
        assert pipe.evaluate([(x, y)]).loss != pytest.approx(
            loss_fn(model(False)(x), y).item(), rel=1e-2
        )
        (note,) = [note for note in pipe.plan.notes if "your kernel" in note]
        assert note.startswith("your kernel doubled runs aten.relu.default of 0 on opencl:pocl:0, ")
        assert f"note: {note}" in str(pipe.plan)
    listed = CliRunner().invoke(app, ["devices", "--cluster", str(path), "--backends", "opencl"])
    assert "backend opencl runs your kernel doubled for aten.relu.default" in listed.output
    (info,) = [each for each in registry.devices_of("opencl") if each.id == "opencl:pocl:0"]
    assert "kernels doubled" in info.driver
    plain = Cluster.local(devices=["opencl:pocl:0", "pytorch:cpu:0"])  # without the options
    with hp.Pipeline(
        model(doubled=False), loss_fn, (x, y), cluster=plain, optimizer=hp.optim.sgd(lr=0.1),
        cuts=[1], microbatches=2,
    ) as pipe:  # fmt: skip
        assert pipe.evaluate([(x, y)]).loss == pytest.approx(
            loss_fn(model(False)(x), y).item(), rel=1e-5
        )
        assert not any("your kernel" in note for note in pipe.plan.notes)
    assert all("kernels" not in each.driver for each in registry.devices_of("opencl"))


def test_a_kernel_registered_in_python(spec: Path) -> None:
    backend = type("Mine", (OpenCLBackend,), {"name": "mine"})
    registry.register_backend(backend)
    backend.register_spec(spec)
    device = registry.open_device(pocl("mine"))
    np.testing.assert_array_equal(result(device, torch.relu, X), 2 * X.relu().numpy())
    with pytest.raises(BackendError, match="subclass"):
        OpenCLBackend.register_spec(spec)


def test_sizes_come_from_the_shapes(tmp_path: Path) -> None:
    (tmp_path / "product.cl").write_text(PRODUCT)
    (tmp_path / "product.toml").write_text(PRODUCT_SPEC)
    backend = type("Mine", (OpenCLBackend,), {"name": "mine"})
    registry.register_backend(backend)
    backend.register_spec(tmp_path / "product.toml")
    device = registry.open_device(pocl("mine"))
    w = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
    np.testing.assert_allclose(result(device, torch.mm, X, w), 1 + (X @ w).numpy(), rtol=1e-5)


def test_calls_outside_the_specification_use_the_stock_kernel(tmp_path: Path) -> None:
    """The approximate `gelu` has an argument that the specification does not mention."""
    (tmp_path / "mine.cl").write_text(SOURCE)
    (tmp_path / "mine.toml").write_text(SPEC.replace("relu.default", "gelu.default"))
    backend = type("Mine", (OpenCLBackend,), {"name": "mine"})
    registry.register_backend(backend)
    backend.register_spec(tmp_path / "mine.toml")
    device = registry.open_device(pocl("mine"))
    gelu = torch.nn.functional.gelu
    np.testing.assert_array_equal(result(device, gelu, X), 2 * X.relu().numpy())
    np.testing.assert_allclose(
        result(device, lambda x: gelu(x, approximate="tanh"), X),
        gelu(X, approximate="tanh").numpy(), rtol=0, atol=1e-6,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("operator", "# operator"), "names no operator"),
        (("relu.default", "rely.default"), "torch has no operator 'aten.rely.default'"),
        (("input = 0", ""), r"which input of aten.relu.default is x\?"),
        (("result = 0", ""), r"which result of aten.relu.default is y\?"),
        (("output = true", 'output = true\nvalues = "ones"'), "y is read and written"),
        (("number = 2.0", "local = 8"), "factor is local memory"),
        (
            ("operator", 'function = "tripled"\noperator'),
            r"no kernel 'tripled'; .*\(kernels: doubled\)",
        ),
        (("operator", 'source = "none.cl"\noperator'), "none.cl: cannot be read"),
    ],
)
def test_an_incomplete_specification_is_refused(
    spec: Path, change: tuple[str, str], message: str
) -> None:
    spec.write_text(SPEC.replace(*change, 1))
    with pytest.raises(BackendError, match=message):
        OpenCLBackend().configure({"kernels": [spec.name]}, spec.parent)


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"unknown key .kernel.; did you mean kernels"):
        OpenCLBackend().configure({"kernel": []}, tmp_path)
