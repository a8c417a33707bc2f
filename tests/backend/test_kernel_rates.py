"""The benchmark of kernels: results are right, all figures and a picture exist.

No figure has a required value.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from opencl_devices import IDS
from typer.testing import CliRunner

from hetpipe.bench.kernelcases import (
    RESNET50,
    Case,
    Layer,
    convolutions,
    memory_bound,
    product,
)
from hetpipe.bench.kernelrates import measure
from hetpipe.cli.app import app
from hetpipe.cli.kernels import bench
from hetpipe.errors import HetpipeError

RUNTIME = next((each for each in IDS if "pocl" in each or "intel-cpu" in each), None)
SMALL = (Layer(3, 8, 9, 3, 2), Layer(4, 6, 5, 1))


def small_cases() -> list[Case]:
    return [product("mm", 5, 7, 9, torch.mm), *convolutions(SMALL)]


@pytest.mark.slow
@pytest.mark.skipif(RUNTIME is None, reason="no OpenCL runtime for CPUs")
def test_every_kernel_is_measured_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetpipe.bench.kernelcases.ROWS", 16)
    monkeypatch.setattr("hetpipe.bench.kernelcases.WIDTH", 24)
    monkeypatch.setattr("hetpipe.bench.kernelcases.STEP", 64)
    cases = [*small_cases(), *memory_bound()]
    rates = measure(RUNTIME, cases, 0.001, 2)
    assert [(rate.kernel, rate.shape) for rate in rates] == [(c.kernel, c.shape) for c in cases]
    for rate in rates:
        assert rate.error < 1e-5, rate
        for figure in (rate.time_s, rate.gflops, rate.gbytes_per_s, rate.torch_time_s):
            assert figure > 0
        assert rate.torch_way in {"eager", "oneDNN"}
        assert rate.ceiling_gflops > 0
        assert rate.copy_gbytes_per_s > 0


def test_operations_and_bytes_of_a_convolution() -> None:
    """The first layer of ResNet-50 has 118 million multiply-adds per image (He et al., 2016)."""
    forward, by_input, by_weight = convolutions(RESNET50[:1])
    assert forward.operations == 2 * 8 * 112 * 112 * 64 * 3 * 49
    assert forward.operations == by_input.operations == by_weight.operations
    assert forward.nbytes == 4 * 8 * (3 * 224 * 224 + 64 * 112 * 112) + 4 * 64 * 3 * 49
    assert len(list(convolutions(RESNET50))) == 3 * 23
    total = sum(case.operations for case in convolutions(RESNET50) if case.kernel == "forward")
    assert total / 8 / 2 < 4.1e9  # each shape once is less than the network


def test_the_command_writes_figures_and_a_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = {
        "kernel": "mm", "shape": "8 x 8 x 8", "device": "some:cpu:0", "time_s": 2e-3,
        "gflops": 50.0, "gbytes_per_s": 5.0, "share_of_ceiling": 0.5, "torch_time_s": 3e-3,
        "torch_way": "eager",
        "group": "products", "spread": 0.01, "error": 1e-7, "ceiling_gflops": 100.0,
        "copy_gbytes_per_s": 20.0,
    }  # fmt: skip
    infos = list(bench.processors([]))[:1] if RUNTIME else []
    if not infos:
        pytest.skip("no OpenCL runtime for CPUs")
    row["device"] = infos[0].id
    monkeypatch.setattr("hetpipe.bench.products.run_pinned", lambda *_, **__: [row, row])
    out, picture = tmp_path / "out.json", tmp_path / "roof.svg"
    command = ["kernels", "bench", "--device", infos[0].id, "--json", str(out)]
    done = CliRunner().invoke(app, [*command, "--picture", str(picture)])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text()) == [row, row]
    assert "1.50 times torch's speed" in done.output
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--set", "producs"],
            "no set of kernels 'producs'; did you mean products?",
        ),
        (["--device", "numpy:cpu:7"], "no device 'numpy:cpu:7'; did you mean numpy:cpu:0?"),
    ],
)
def test_refusals(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["kernels", "bench", *arguments])
    assert isinstance(done.exception, HetpipeError)
    assert message in str(done.exception)
