"""The operators that a model needs and a device lacks, by their share of the device's time."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hetpipe.backends.numpy import NumpyBackend, NumpyDevice
from torch import fx
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.errors import HetpipeError
from hetpipe.sdk.host import registry
from hetpipe.sdk.info import DeviceInfo
from hetpipe.study import coverage


def test_a_device_with_all_operators() -> None:
    answer = coverage("mlp", "numpy:cpu:0")
    assert answer.lacking == ()
    assert answer.covered == 1.0
    assert answer.calls > 20


def test_a_device_without_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products take most of a perceptron's time; the answer names the layers and the device's
    reason."""
    has = NumpyDevice.supports

    def supports(self: NumpyDevice, node: fx.Node) -> str | None:
        if str(node.target).startswith(("aten.mm", "aten.addmm")):
            return "no products yet"
        return has(self, node)

    monkeypatch.setattr(NumpyDevice, "supports", supports)
    answer = coverage("mlp", "numpy:cpu:0")
    assert {each.operator for each in answer.lacking} == {"aten.mm.default", "aten.addmm.default"}
    assert all(each.reason == "no products yet" and each.layers for each in answer.lacking)
    shares = [each.share for each in answer.lacking]
    assert shares == sorted(shares, reverse=True)
    assert answer.covered == pytest.approx(1 - sum(shares))
    done = CliRunner().invoke(app, ["coverage", "mlp", "numpy:cpu:0", "--json", "-"])
    data = json.loads(done.stdout[done.stdout.index("{") :])
    assert len(data["lacking"]) == 2
    assert data["covered"] == pytest.approx(answer.covered)


def test_an_unknown_device() -> None:
    with pytest.raises(HetpipeError, match="no device 'numpy:cpu:7'"):
        coverage("mlp", "numpy:cpu:7")


def test_operators_on_another_device_have_a_measured_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Lacking(NumpyDevice):
        def supports(self, node: fx.Node) -> str | None:
            is_product = str(node.target).startswith(("aten.mm", "aten.addmm"))
            return "no products yet" if is_product else super().supports(node)

    class LackingBackend(NumpyBackend):
        name, lends = "lacking", "numpy"

        def discover(self) -> list[DeviceInfo]:
            (info,) = super().discover()
            return [replace(info, id="lacking:unit:0", backend="lacking")]

        def open(self, info: DeviceInfo) -> NumpyDevice:
            return Lacking(info)

    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_instances", dict(registry._instances))
    registry.register_backend(LackingBackend)
    answer = coverage("mlp", "lacking:unit:0")
    assert answer.lacking == ()
    assert answer.companion == "numpy:cpu:0"
    assert {each.operator for each in answer.lent} == {"aten.mm.default", "aten.addmm.default"}
    for each in answer.lent:
        assert each.calls > 0
        assert each.nbytes > 0
        assert each.measured_s > 0
        assert each.reason == "no products yet"
    shown = CliRunner().invoke(app, ["coverage", "mlp", "lacking:unit:0"]).output
    assert "numpy:cpu:0 runs for lacking:unit:0" in shown
