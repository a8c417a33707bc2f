"""The comparison with CLBlast reports a missing, failing or wrong library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import clblast
from opencl_devices import IDS

from hetpipe.errors import BackendError


def test_a_missing_library_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(clblast, "load", lambda: None)
    clblast.main("opencl:pocl:0", 0.001, 1)
    assert capsys.readouterr().out.startswith("CLBlast is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("device", [each for each in IDS if "pocl" in each or "intel-cpu" in each])
def test_errors_and_wrong_results_of_the_library_are_reported(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answering(status: int) -> Any:
        return SimpleNamespace(CLBlastSgemm=lambda *_: status)

    monkeypatch.setattr(clblast, "load", lambda: answering(-1007))
    with pytest.raises(BackendError, match=r"cannot multiply 8 x 8 matrices: its code is -1007"):
        clblast.measure(device, 8, 0.001, 1)
    monkeypatch.setattr(clblast, "load", lambda: answering(0))  # the library writes no result
    with pytest.raises(BackendError, match=r"product of 8 x 8 matrices has an error of nan"):
        clblast.measure(device, 8, 0.001, 1)
