"""Under torchrun a command that needs no other host runs on the first one alone."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.cli.meet import places
from hetpipe.errors import BackendError
from hetpipe.sdk.host.registry import devices_of


@pytest.mark.parametrize(
    ("arguments", "words"), [(("boards",), "vcu118"), (("kernels", "list"), "attention")]
)
def test_a_command_for_one_host_runs_on_the_first_one_alone(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    variables = {
        "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "h0",
        "MASTER_PORT": "1",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert words in result.output
    monkeypatch.setenv("RANK", "1")
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.output) == (0, "")


def test_a_device_without_a_host_stands_for_each_host_that_has_it() -> None:
    numpy, torch = (list(devices_of(name)) for name in ("numpy", "pytorch"))
    found = {"a": numpy + torch, "b": numpy, "c": []}
    both = ["a/numpy:cpu:0", "b/numpy:cpu:0"]
    assert [place.id for place in places(found, ["numpy:cpu:0"])] == both
    assert [place.id for place in places(found, ["b/numpy:cpu:0"])] == both[1:]
    assert {place.host for place in places(found, [])} == {"a", "b"}
    assert [place.id for place in places({"": numpy}, ["numpy:cpu:0"])] == ["numpy:cpu:0"]
    with pytest.raises(BackendError, match=r"no device 'c/numpy:cpu:0'; did you mean"):
        places(found, ["c/numpy:cpu:0"])
