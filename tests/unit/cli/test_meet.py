"""Commands for one host are refused under torchrun; the other ranks end with status 0."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.errors import ClusterError


@pytest.mark.parametrize(
    "arguments", [("bench",), ("conform", "numpy"), ("kernels", "test"), ("zoo",)]
)
def test_a_command_for_one_host_is_refused_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    variables = {
        "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "h0",
        "MASTER_PORT": "1",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ClusterError)
    assert f"hetpipe {arguments[0]} works on one host" in str(result.exception)
    monkeypatch.setenv("RANK", "1")
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.output) == (0, "")
