"""The division of work in matrix products: by the processor's properties, or tuned by a user."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from found_devices import infos, run, trace
from hetpipe.backends.opencl import OpenCLBackend
from hetpipe.backends.opencl.platform import tuning
from hetpipe.backends.opencl.platform.runtimes import RUNTIMES
from hetpipe.backends.opencl.platform.tuning import (
    Tuning,
    by_rules,
    candidates,
    lanes_of,
    tuning_of,
)
from opencl_devices import opened_here
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.errors import BackendError

KIB = 1 << 10
NAMES = [i.id for i in infos() if i.backend == "opencl" and not i.capabilities.emulated]
on_processors = pytest.mark.parametrize("device_id", NAMES)
INTEL = next(each for each in RUNTIMES if each.slug == "intel-cpu")
POCL = next(each for each in RUNTIMES if each.slug == "pocl")


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    monkeypatch.delenv(tuning.VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("processor", "lanes", "cache", "narrow", "depth"),
    [
        ("Zen 4, Zen 5", 16, 1024 * KIB, False, 1024),
        ("Skylake-X, Cascade Lake", 16, 1024 * KIB, False, 1024),
        ("Sapphire Rapids", 16, 2048 * KIB, False, 1024),
        ("Zen 2, Zen 3", 8, 512 * KIB, True, 1024),
        ("Haswell to Comet Lake", 8, 256 * KIB, True, 512),
        ("Alder Lake", 8, 1280 * KIB, True, 1024),
        ("a small core", 4, 128 * KIB, True, 256),
    ],
)
def test_the_choice_follows_from_registers_and_cache(
    processor: str, lanes: int, cache: int, narrow: bool, depth: int
) -> None:
    chosen = by_rules(lanes, cache)
    assert chosen == Tuning(narrow, depth), processor
    assert chosen.depth_block * 32 * 4 <= max(cache // 4, 32 * KIB)


def test_lanes_follow_the_runtimes_target_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(native_vector_width_float=16)
    for arch, lanes in {"core-avx2": 8, "skx": 16, "": 16}.items():
        monkeypatch.setattr(tuning, "target_arch", lambda arch=arch: arch)
        assert lanes_of(device, INTEL) == lanes
        assert lanes_of(device, POCL) == 16
    assert lanes_of(SimpleNamespace(native_vector_width_float=0), None) == 1


@pytest.mark.slow
@on_processors
@pytest.mark.parametrize(
    "chosen", [Tuning(True, 1024), Tuning(True, 24), Tuning(False, 24)], ids=str
)
def test_sums_are_right_for_any_tuning(
    device_id: str, chosen: Tuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tuning.VARIABLE, tuning.text_of(chosen))
    device = opened_here(device_id)

    def product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return F.gelu(torch.addmm(c, a, b))

    table = OpenCLBackend().decompositions()
    for m, n, k in (
        (12, 32, 16),
        (13, 33, 17),
        (25, 70, 53),
        (40, 31, 100),
        (4, 40, 30),
        (8, 50, 9),
    ):
        generator = torch.Generator().manual_seed(m)
        inputs = [torch.randn(s, generator=generator) for s in ((m, k), (k, n), (n,))]
        for function in (lambda a, b, c: a @ b, product):
            (actual,) = run(device, trace(function, inputs, table), [t.numpy() for t in inputs])
            wide = function(*(t.double() for t in inputs)).numpy()
            limit = 16 * np.sqrt(k) * np.finfo(np.float32).eps * np.abs(wide).max()
            np.testing.assert_allclose(actual, wide, rtol=0, atol=limit)


@pytest.mark.slow
@on_processors
def test_convolutions_are_right_in_small_blocks(
    device_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tuning.VARIABLE, tuning.text_of(Tuning(True, 8)))
    device = opened_here(device_id)
    for kernel in (1, 3):
        settings = (None, [1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
        generator = torch.Generator().manual_seed(kernel)
        shapes = ((3, 70, 9, 11), (3, 45, 9, 11), (70, 45, kernel, kernel))
        inputs = [torch.randn(shape, generator=generator) for shape in shapes]

        def gradients(
            dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, settings: Any = settings
        ) -> tuple[torch.Tensor, ...]:
            y = torch.ops.aten.convolution(x, w, *settings)
            found = torch.ops.aten.convolution_backward(dy, x, w, *settings, [True, True, False])
            return y, *found[:2]

        results = run(device, trace(gradients, inputs, {}), [t.numpy() for t in inputs])
        for actual, wide in zip(results, gradients(*(t.double() for t in inputs)), strict=True):
            limit = 16 * np.sqrt(630) * np.finfo(np.float32).eps * np.abs(wide.numpy()).max()
            np.testing.assert_allclose(actual, wide.numpy(), rtol=0, atol=limit)


@on_processors
def test_a_tuning_is_kept_for_the_device(device_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = OpenCLBackend()
    cl_device, runtime = backend.place(device_id)
    shipped = tuning_of(cl_device, runtime)
    monkeypatch.setenv(tuning.VARIABLE, "")
    assert tuning_of(cl_device, runtime) == shipped
    runner = backend.kernel_runner()
    ways = runner.tunings(device_id)
    assert len(ways) == len({*candidates(), shipped}) == len(set(ways))
    first, other = list(ways)[:2]
    assert first == str(shipped)
    runner.keep_tuning(device_id, other)
    assert str(tuning_of(cl_device, runtime)) == other
    assert json.loads(ways[other][tuning.VARIABLE]) == json.loads(
        tuning.text_of(tuning_of(cl_device, runtime))
    )
    with pytest.raises(BackendError, match="no tuning 'tile 5'"):
        runner.keep_tuning(device_id, "tile 5")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("narrow", "is no JSON"),
        ('{"narrow": "so"}', "narrow is 'so'"),
        ('{"depth_block": 0}', "depth_block is 0, it should be at least 1"),
        ('{"depth": 5}', "unknown key 'depth'"),
    ],
)
def test_an_invalid_variable_is_refused(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tuning.VARIABLE, text)
    with pytest.raises(BackendError, match=message):
        tuning_of(None, None)


@pytest.mark.skipif(not NAMES, reason="no OpenCL runtime for CPUs")
def test_the_command_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shares are invented; the last but one tuning is best."""
    ways = list(OpenCLBackend().kernel_runner().tunings(NAMES[0]))

    def run_pinned(*_: object, variables: dict[str, str], **__: object) -> list[dict[str, float]]:
        wanted = Tuning(**json.loads(variables[tuning.VARIABLE]))
        return [{"share_of_ceiling": 0.9 if str(wanted) == ways[-2] else 0.8}]

    monkeypatch.setattr("hetpipe.bench.products.run_pinned", run_pinned)
    for expected in ("kept from now on", "in use"):
        done = CliRunner().invoke(app, ["kernels", "tune", "--device", NAMES[0], "--rounds", "1"])
        assert done.exit_code == 0, done.output
        line = next(line for line in done.output.splitlines() if ways[-2] in line)
        assert expected in line
