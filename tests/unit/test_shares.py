"""Shares of wide tables: together they contain everything, and each has a part of every table."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from shares import SHARES, share_of_tree

TABLE = """
import pytest

@pytest.mark.wide
@pytest.mark.parametrize("n", range(22))
def test_wide(n):
    pass

@pytest.mark.parametrize("n", range(2))
def test_narrow(n):
    pass

@pytest.mark.slow
@pytest.mark.parametrize("n", range(3))
def test_slow(n):
    pass

@pytest.mark.slow
def test_slow_too():
    pass
"""
CONFTEST = """
import shares

pytest_addoption = shares.add_option

def pytest_configure(config):
    config.addinivalue_line("markers", "wide: ")
    config.addinivalue_line("markers", "slow: ")

def pytest_collection_modifyitems(config, items):
    shares.choose(config, items)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "test_table.py").write_text(TABLE)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    return tmp_path


def collect_cases(project: Path, *options: str) -> list[str]:
    """Return the test cases that a run with these options collects."""
    helpers = Path(sys.modules["shares"].__file__ or "").parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *options, str(project),
         "-p", "no:cacheprovider", "-o", f"pythonpath={helpers}", "--rootdir", str(project)],
        capture_output=True, text=True, cwd=project,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_every_share_has_other_wide_cases_and_all_narrow_ones(project: Path) -> None:
    everything = collect_cases(project)
    assert len(everything) == 28
    shares = [collect_cases(project, "--share", str(n)) for n in range(1, SHARES + 1)]
    for kind, counts in (("wide", {1, 2}), ("slow", {0, 1})):
        own = [[case for case in share if kind in case] for share in shares]
        assert sorted(chain(*own)) == sorted(case for case in everything if kind in case)
        assert {len(cases) for cases in own} == counts
    narrow = {case for case in everything if "narrow" in case}
    assert all(narrow <= set(share) for share in shares)


def test_a_tree_has_one_share() -> None:
    shares = [share_of_tree(f"{n:040x}") for n in range(SHARES + 1)]
    assert shares == [*range(1, SHARES + 1), 1]


@pytest.mark.slow
def test_the_files_and_not_the_message_decide_the_share(project: Path) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *who, *arguments], cwd=project, check=True, capture_output=True)

    git("init")
    git("add", ".")
    messages, files = set(), set()
    for number in range(4):
        git("commit", *(["--amend"] if number else []), "-m", f"message {number}")
        messages.add(tuple(collect_cases(project, "--share", "tree")))
    for number in range(4):
        (project / "text").write_text(f"{number}")
        git("add", ".")
        git("commit", "-m", "the same")
        files.add(tuple(collect_cases(project, "--share", "tree")))
    assert len(messages) == 1
    assert len(files | messages) > 1


@pytest.mark.slow
def test_without_a_tree_the_day_chooses(project: Path) -> None:
    shares = [collect_cases(project, "--share", str(n)) for n in range(1, SHARES + 1)]
    assert collect_cases(project, "--share", "tree") in shares
