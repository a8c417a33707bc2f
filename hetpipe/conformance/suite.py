"""The suite for pytest: `class TestMine(BackendSuite)` gets one test per check and device."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, ClassVar

import pytest

from hetpipe.conformance.check import Check, Level
from hetpipe.conformance.run import checks_of, rig_of, run_check
from hetpipe.errors import BackendError
from hetpipe.sdk.host.registry import devices_of

if TYPE_CHECKING:
    from hetpipe.conformance.rig import Rig

_opened = cache(rig_of)


class BackendSuite:
    """Base class of a backend's tests: derive a class `Test...` and set `backend`."""

    backend: ClassVar[str]
    """The name of a backend that is installed or registered."""
    device: ClassVar[str | None] = None
    """The id of a device; None tests all devices of the backend."""
    level: ClassVar[str] = "training"
    """The level of checks: core, training or full."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Generate one test per device and check."""
        if "check" not in metafunc.fixturenames:
            return
        try:
            ids = [info.id for info in devices_of(self.backend)]
        except BackendError:
            ids = []  # test_devices reports the error
        chosen = [each for each in ids if self.device in (None, each)]
        pairs = [(each, check) for each in chosen for check in checks_of(Level.named(self.level))]
        metafunc.parametrize(
            ("device_id", "check"), pairs, ids=[f"{each}-{check.name}" for each, check in pairs]
        )

    def test_devices(self) -> None:
        """Test that the backend loads and finds devices, including `device`."""
        ids = [info.id for info in devices_of(self.backend)]
        assert ids, f"backend {self.backend!r} finds no device"
        assert self.device in (None, *ids), f"no device {self.device!r}; found: {', '.join(ids)}"

    def test_conformance(self, device_id: str, check: Check) -> None:
        """Test that the device keeps the rule of the check."""
        rig: Rig = _opened(device_id)
        result = run_check(check, rig)
        if result.outcome == "skipped":
            pytest.skip(result.message)
        if result.failed:
            pytest.fail(result.text, pytrace=False)
