"""The suite for pytest: `class TestMine(BackendSuite)` has a test per check and device."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, ClassVar

import pytest

from hetpipe.conformance.check import Check, Level
from hetpipe.conformance.run import checks_of, rig_of, run_check
from hetpipe.errors import BackendError
from hetpipe.sdk.registry import devices_of

if TYPE_CHECKING:
    from hetpipe.conformance.rig import Rig

_opened = cache(rig_of)


class BackendSuite:
    """Inherit it, in a class whose name begins with Test, and say which backend it is for."""

    backend: ClassVar[str]
    """The name of a backend that is installed or registered."""
    device: ClassVar[str | None] = None
    """The id of one device; all that the backend finds without it."""
    level: ClassVar[str] = "training"
    """core, training or full."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """A test per device and check."""
        if "check" not in metafunc.fixturenames:
            return
        try:
            ids = [info.id for info in devices_of(self.backend)]
        except BackendError:
            ids = []  # the test of the devices says why
        chosen = [each for each in ids if self.device in (None, each)]
        pairs = [(each, check) for each in chosen for check in checks_of(Level.named(self.level))]
        metafunc.parametrize(
            ("device_id", "check"), pairs, ids=[f"{each}-{check.name}" for each, check in pairs]
        )

    def test_devices(self) -> None:
        """The backend loads and finds devices, the one that is asked for among them."""
        ids = [info.id for info in devices_of(self.backend)]
        assert ids, f"backend {self.backend!r} finds no device"
        assert self.device in (None, *ids), f"no device {self.device!r}; found: {', '.join(ids)}"

    def test_conformance(self, device_id: str, check: Check) -> None:
        """The device keeps the rule of the check."""
        rig: Rig = _opened(device_id)
        result = run_check(check, rig)
        if result.outcome == "skipped":
            pytest.skip(result.message)
        if result.failed:
            pytest.fail(result.text, pytrace=False)
