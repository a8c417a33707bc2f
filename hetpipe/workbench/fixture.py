"""The pytest fixture `check_kernel`, available wherever hetpipe is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def check_kernel(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Test a kernel as `hetpipe kernels test` does:

        def test_mine(check_kernel):
            check_kernel("my.cl", "my.toml", devices=["opencl:pocl:0"])

    Paths are relative to the test's file. The default specification has the source's name with the
    suffix .toml. By default the kernel runs on all devices that can run it. The test fails with
    all flaws, their lines, and the commands that repeat them.
    """
    folder = request.path.parent

    def check(
        source: str | Path,
        spec: str | Path | None = None,
        *,
        function: str = "",
        devices: tuple[str, ...] | list[str] = (),
        seed: int = 0,
    ) -> None:
        from hetpipe.workbench.trial import check_sizes, devices_for, outcomes, trial_of

        path = folder / source
        spec_path = path.with_suffix(".toml") if spec is None else folder / spec
        trial = trial_of(path, spec_path, function, seed)
        check_sizes(trial)
        ended = list(outcomes(trial, devices_for(path, devices)))
        if flaws := [text for outcome in ended for text in trial.texts(outcome)]:
            pytest.fail("\n".join(flaws), pytrace=False)
        if ended and all(outcome.skipped for outcome in ended):
            pytest.skip(f"no device runs {trial.function}: {ended[0].skipped}")

    return check
