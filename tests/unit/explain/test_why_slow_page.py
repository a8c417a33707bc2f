"""The Python code of the page on slow trainings runs, in one process, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


def blocks(name: str, language: str) -> list[str]:
    text = (DOCS / name).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.slow
def test_the_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lab.toml").write_text(blocks("planning.md", "toml")[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    code = blocks("why-slow.md", "python")
    assert len(code) == 3
    names: dict[str, object] = {}
    for block in code:
        exec(compile(block, "why-slow.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "nothing was measured yet" in printed
    assert ", measured; " in printed
    assert printed.count("bottleneck: ") == 3
    assert (tmp_path / "report.html").stat().st_size > 10_000
