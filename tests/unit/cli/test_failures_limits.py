"""`hetpipe failures` refuses trainings that it cannot simulate, before it plans."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from hetpipe.cli.app import app

WRONG = [
    (["--seed", "-1"], "greater than or equal to 0"),
    (["--hours", "inf"], "less than or equal to 1000000"),
    (["--hours", "nan"], "less than or equal to 1000000"),
    (["--hours", "1e6"], "1.2e+09 failures, more than 1e+06"),
    (["--repeats", "1000000"], "1.44e+09 failures, more than 1e+06"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_limits(options: list[str], message: str) -> None:
    found = CliRunner().invoke(app, ["failures", "digits", "--cluster", "none.toml", *options])
    text = " ".join((found.output + str(found.exception)).replace("│", " ").split())
    assert found.exit_code != 0
    assert message in text
