"""The operators that a device lacks for a model, by their share of its time."""

from __future__ import annotations

import json

import pytest
from hetpipe.backends.numpy import NumpyDevice
from torch import fx
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.errors import HetpipeError
from hetpipe.study import coverage


def test_a_device_that_has_all() -> None:
    answer = coverage("mlp", "numpy:cpu:0")
    assert answer.lacking == ()
    assert answer.covered == 1.0
    assert answer.calls > 20


def test_a_device_without_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of a perceptron's time, with the layers and the device's own reason."""
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
