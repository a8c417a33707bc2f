"""The list of refused operators: how a run fills it, and the page made from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import survey
from benchmarks.survey import Survey

LACKING = (
    "aten.cholesky.default (aten.cholesky.default has no OpenCL lowering); "
    "aten.linalg_solve_triangular.default (it has no kernel)"
)
COMPLEX = (
    "aten._fft_r2c.default (no lowering); aten.slice.Tensor (dtype complex64 of slice_1; the "
    "device has float32); aten.clone.default (dtype complex64 of clone; the device has float32)"
)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Survey:
    names = ("acos", "cholesky", "fft_irfft", "rand_like", "nn_functional_relu")
    monkeypatch.setattr(survey, "entries", lambda: dict.fromkeys(names))
    results = [
        {"name": "database/acos", "message": ""},
        {"name": "database/cholesky", "message": f"refused: {LACKING}"},
        {"name": "database/fft_irfft", "message": f"refused: {COMPLEX}"},
        {"name": "database/rand_like", "message": "not asked: its results are random"},
        {"name": "database/nn_functional_relu", "message": "runs, but 1 of 3 samples are refused"},
    ]
    return survey.found(Survey("2.13", {}, {"mine": {}}), "opencl", results)


def test_reasons_become_short() -> None:
    assert survey.cause(LACKING) == "aten.cholesky, aten.linalg_solve_triangular"
    assert survey.cause(COMPLEX) == "dtype complex64"
    assert survey.cause("complex64 is not among its dtypes") == "complex64 is not among its dtypes"


def test_results_of_a_run_are_sorted(example: Survey) -> None:
    assert example.unasked == {"rand_like": "its results are random"}
    assert sorted(example.refused["opencl"]) == ["cholesky", "fft_irfft"]
    assert example.status("opencl", "acos") == example.status("mine", "cholesky") == ""
    assert example.status("opencl", "fft_irfft") == "refused: dtype complex64"
    assert example.status("mine", "rand_like") == "not asked: its results are random"


def test_a_list_survives_writing_and_reading(example: Survey, tmp_path: Path) -> None:
    path = tmp_path / "list.toml"
    path.write_text(survey.text(example), encoding="utf-8")
    assert survey.read(path) == example


def test_the_page_counts_the_operators_that_run(example: Survey) -> None:
    lines = survey.page(example).splitlines()
    assert "| all | 4 | 4 | 2 |" in lines
    assert "| linear algebra | `cholesky` | aten.cholesky, aten.linalg_solve_triangular |" in lines
    assert "| activations, losses, layers | 1 | 1 | 1 |" in lines
    assert "| 1 | its results are random |" in lines


def test_results_of_a_run_are_written_to_the_files(example: Survey, tmp_path: Path) -> None:
    data, page, results = (tmp_path / name for name in ("list.toml", "page.md", "found.json"))
    found = {"name": "database/cholesky", "message": f"refused: {LACKING}"}
    report = {"devices": {"opencl:pocl:0": {"results": [found]}}}
    results.write_text(json.dumps(report), encoding="utf-8")
    survey.main(data, page, results)
    assert survey.read(data).refused == {"opencl": {"cholesky": survey.cause(LACKING)}}
    assert "`cholesky`" in page.read_text(encoding="utf-8")
