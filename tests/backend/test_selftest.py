"""The self-test passes on every device of this machine and fails a device that computes wrongly."""

from __future__ import annotations

from typing import Any

import pytest
from found_devices import infos, opened
from hetpipe.backends.numpy import NumpyDevice

from hetpipe.check import selftest as module
from hetpipe.check.selftest import BURSTS, selftest
from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Buffer


@pytest.mark.slow
@pytest.mark.parametrize("device_id", [info.id for info in infos()])
def test_every_device_passes(device_id: str) -> None:
    result = selftest(opened(device_id))
    assert result.ok, result.message
    assert result.gflops_matmul > 0
    assert result.copy_Bps > 0
    assert "agrees" in result.message


class OffByALittle(NumpyDevice):
    def _run(self, program: Any, inputs: list[Buffer], donate: frozenset[int]) -> list[Buffer]:
        outputs = super()._run(program, inputs, donate)
        for buffer in outputs:
            buffer.array[...] *= 1.001  # type: ignore[attr-defined]  # NumpyBuffer's own
        return outputs


class Broken(NumpyDevice):
    def _run(self, program: Any, inputs: list[Buffer], donate: frozenset[int]) -> list[Buffer]:
        raise BackendError("the board is on fire")


class Forgetful(NumpyDevice):
    def _to_device(self, src: Any) -> Any:
        return super()._to_device(src * 0)


def test_wrong_arithmetic_is_found() -> None:
    result = selftest(OffByALittle(opened("numpy:cpu:0").info))
    assert not result.ok
    assert "off by" in result.message
    assert result.gflops_matmul == 0


def test_an_error_of_the_device_is_reported_as_a_result() -> None:
    result = selftest(Broken(opened("numpy:cpu:0").info))
    assert (result.ok, result.message) == (False, "the board is on fire")


def test_a_lossy_copy_is_found() -> None:
    result = selftest(Forgetful(opened("numpy:cpu:0").info))
    assert not result.ok
    assert "came back changed" in result.message


def test_the_rates_are_the_best_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disturbance of one burst must not lower the figures."""
    fast_s, slow_s = 1e-3, 1.0
    bursts_s = iter([slow_s, slow_s, fast_s, slow_s, slow_s, fast_s])  # copies, products, copies...
    monkeypatch.setattr(module, "_fastest_s", lambda call: next(bursts_s))
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    result = selftest(opened("numpy:cpu:0"))
    assert result.bursts == BURSTS == 3
    assert result.copy_Bps == pytest.approx(2 * 4096 / fast_s)
    assert result.gflops_matmul == pytest.approx(2 * 16**3 / fast_s / 1e9)


@pytest.mark.parametrize(("fastest_s", "sizes"), [(0.010, 3), (0.020, 1)])
def test_larger_products_follow_unless_one_takes_a_second(
    monkeypatch: pytest.MonkeyPatch, fastest_s: float, sizes: int
) -> None:
    """On a busy machine a small product may take 10 ms, 4000 times as long as on a quiet one."""
    monkeypatch.setattr(module, "_fastest_s", lambda call: fastest_s)
    assert len(module._products(opened("pytorch:cpu:0"))) == sizes
