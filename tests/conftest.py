"""Fixtures and settings of all tests."""

from __future__ import annotations

import functools
import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import shares
from cache_folders import new_cache

# `python -m pytest` puts the project's folder on the path, where Python would import `kernels` and
# `backends` as packages of other projects (transformers looks for one called `kernels`).
ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

# The tests capture hundreds of models, with graphs of many thousand nodes. Each capture asks torch
# for the same list of operators about fifty times, and each garbage collection visits all graphs.
# So the list is cached and garbage is collected less often. A torch without this function is not
# patched.
with suppress(ImportError, AttributeError):
    import torch._export.utils as _export

    _export._materialize_cpp_cia_ops = functools.cache(_export._materialize_cpp_cia_ops)
gc.set_threshold(50_000, 20, 100)

# A shell lets the commands that it starts in the background ignore Ctrl-C, and tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all tests' captures; a capture's key covers everything it depends on."""
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="module", autouse=True)
def module_cache(captures: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep costs and plans for the tests of one file."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "captures").symlink_to(captures)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETPIPE_CACHE", new_cache(folder))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    shares.add_option(parser)


def pytest_report_header(config: pytest.Config) -> str:
    share = shares.share_of(config)
    taken = "all cases" if share is None else f"share {share} of {shares.SHARES}"
    return f"wide and slow tests: {taken}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shares.choose(config, items)
