"""The values of a user's macros: wrong ones are excluded, the others measured, the best kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from opencl_devices import IDS
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.cli.kernels import tune_own
from hetpipe.cli.kernels.tune import chosen_way
from hetpipe.cli.kernels.tune_own import Effort
from hetpipe.cli.output import Output
from hetpipe.errors import HetpipeError
from hetpipe.sdk.formats.kernelspec import read_spec
from hetpipe.workbench.trial import trial_of
from hetpipe.workbench.tuning import Combination, keep

CHECKER = next((each for each in IDS if "oclgrind" in each), None)
POCL = next((each for each in IDS if "pocl" in each), None)

SOURCE = """\
#ifndef TILE
#define TILE 8
#endif
#define FIXED 1
__kernel void twice(__global const float *x, __global float *y, const int n)
{
    const int i = get_global_id(0);
    if (i < n && TILE != 13)
        y[i] = (UNROLL + 1) * x[i];
}
"""
SPEC = """\
# mine
global_size = ["round_up(n, TILE)"]
local_size = ["TILE"]
[define]
TILE = [8, 16]  # work-items of a group
UNROLL = [1]
[argument.x]
shape = ["n"]
[argument.y]
shape = ["n"]
output = true
[argument.n]
value = "n"
[expect]
y = "2.0 * x"
[[case]]
n = 100000
[[case]]
n = 3
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "mine.cl"
    path.write_text(SOURCE)
    path.with_suffix(".toml").write_text(SPEC)
    return path


@pytest.mark.slow
@pytest.mark.skipif(POCL is None, reason="PoCL is not installed")
def test_combinations_are_checked_and_measured(source: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app,
        ["kernels", "tune", str(source), "--grid", "TILE=8,13,32", "--grid", "UNROLL=1,2",
         "--device", str(POCL), "--rounds", "2", "--seconds", "0.001", "--keep",
         "--json", str(tmp_path / "out.json")],
        catch_exceptions=False,
    )  # fmt: skip
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["sizes"] == {"n": 100000}, "the largest case"
    found = report["devices"][POCL]
    right = [each["values"] for each in found["combinations"] if not each["excluded"]]
    assert right == [{"TILE": 8, "UNROLL": 1}, {"TILE": 32, "UNROLL": 1}]
    for each in found["combinations"]:
        assert len(each["rounds_s"]) == (0 if each["excluded"] else 2)
        assert all(seconds > 0 for seconds in each["rounds_s"])
    assert found["first"] == right[0]
    rounds_s = [each["rounds_s"] for each in found["combinations"] if each["rounds_s"]]
    overlap = max(rounds_s[1]) >= min(rounds_s[0])
    assert found["best"] == right[0 if overlap else 1]
    assert "excluded  TILE=8, UNROLL=2: wrong result" in result.output
    assert "excluded  TILE=13, UNROLL=1: not written" in result.output
    assert ("best: TILE=" in result.output) or ("none is better than TILE=8" in result.output)
    defined = read_spec(source.with_suffix(".toml")).define
    assert {name: values[0] for name, values in defined.items()} == found["best"]
    assert "]  # work-items of a group\n" in source.with_suffix(".toml").read_text()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "# a\n[define]\nTILE = [8, 16]  # b\nUNROLL = [1]\n[[case]]\nn = 1\n",
            "# a\n[define]\nTILE = [16, 8]  # b\nUNROLL = [2, 1]\n[[case]]\nn = 1\n",
        ),
        ("a = 1  # a\n", "a = 1  # a\n\n[define]\nTILE = [16]\nUNROLL = [2]\n"),
        (
            "[define]\nUNROLL = [\n  1,\n  2,\n]\n",
            "",  # the list has several lines
        ),
        ("[define]\nTILE = [16]\n", "[define]\nUNROLL = [2]\nTILE = [16]\n"),
        ("define.TILE = [8]\n", ""),
    ],
)
def test_the_best_values_become_the_first(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(before)
    lines = keep(path, {"TILE": 16, "UNROLL": 2})
    assert path.read_text() == (after or before)
    assert (lines == "") == bool(after)
    assert after or lines.startswith("[define]\nTILE = [16")
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--grid", "TIL=8"), "does not use the macro TIL, so its values make no difference; did"),
        (("--grid", "FIXED=8"), "defines FIXED itself, which replaces each value of the grid"),
        (("--grid", "TILE"), "--grid 'TILE': write NAME=VALUES"),
        (("--grid", "TILE="), "--grid 'TILE=': write NAME=VALUES"),
        (("--grid", "TILE=8,x"), "write NAME=VALUES with whole numbers"),
        (("--grid", f"TILE={2**31}"), "is no int of OpenCL"),
        (("--grid", "TILE=8", "--grid", "TILE=9"), "--grid names a macro twice"),
        (("--grid", f"TILE={','.join(map(str, range(1, 202)))}"), "201 * 1 = 201 combinations, at"),
        (("--grid", "n=8"), "define has n, which is a size of a case"),
        (("--device", "opencl:poc:0"), "no device 'opencl:poc:0' runs .cl files"),
        (("--case", "2", "--device", str(POCL)), "no case 2 in"),
    ],
)
def test_wrong_grids_are_refused(source: Path, options: tuple[str, ...], reason: str) -> None:
    result: Any = CliRunner().invoke(app, ["kernels", "tune", str(source), *options])
    assert isinstance(result.exception, HetpipeError), result.output
    assert reason in str(result.exception)


@pytest.mark.skipif(CHECKER is None, reason="Oclgrind is not installed")
def test_a_checker_measures_nothing(source: Path) -> None:
    result: Any = CliRunner().invoke(
        app, ["kernels", "tune", str(source), "--device", str(CHECKER)]
    )
    assert "checks every access, so its times say nothing" in str(result.exception)


def test_a_grid_needs_a_file_and_values(source: Path) -> None:
    result: Any = CliRunner().invoke(app, ["kernels", "tune", "--grid", "TILE=8"])
    assert "--grid is for a kernel of your own" in str(result.exception)
    spec = SPEC.replace("[define]\nTILE = [8, 16]  # work-items of a group\nUNROLL = [1]\n", "")
    source.with_suffix(".toml").write_text(spec)
    result = CliRunner().invoke(app, ["kernels", "tune", str(source)])
    assert "there is nothing to tune: give values of a macro" in str(result.exception)


@pytest.mark.parametrize(
    ("seconds", "best", "last", "first_kept"),
    [
        (((5, 6, 7), (3, 4, 4.9)), 32, "best: TILE=32, 1.50 times as fast as TILE=8", [32, 8]),
        (((5, 6, 7), (3, 4, 5)), 8, "rounds of the two overlap, so they do not differ", [8, 32]),
        (((5, 6, 7), (6, 7, 8)), 8, "best: TILE=8, the first", [8, 32]),
    ],
)
def test_chance_changes_no_specification(
    monkeypatch: pytest.MonkeyPatch,
    source: Path,
    capsys: pytest.CaptureFixture[str],
    seconds: tuple[tuple[float, ...], ...],
    best: int,
    last: str,
    first_kept: list[int],
) -> None:
    spec = source.with_suffix(".toml")
    spec.write_text(SPEC.replace("TILE = [8, 16]", "TILE = [8, 32]"))
    trial = trial_of(source, spec, "")
    tried = [
        Combination({"TILE": tile}, rounds_s)
        for tile, rounds_s in zip((8, 32), seconds, strict=True)
    ]
    monkeypatch.setattr(tune_own, "_tried", lambda *arguments: tried)
    monkeypatch.setattr(tune_own, "_is_emulated", lambda device_id: False)
    output = Output(None)
    before = spec.read_text()
    tune_own.tune_own(output, trial, ["opencl:any:0"], Effort(None, 0.1, 3), keeps=True)
    assert last in capsys.readouterr().out.replace("\n", " ")
    assert list(read_spec(spec).define["TILE"]) == first_kept
    assert (spec.read_text() == before) == (best == 8)


@pytest.mark.parametrize(
    ("shares", "chosen"),
    [
        ({"used": [0.5, 0.6], "other": [0.7, 0.8]}, "other"),
        ({"used": [0.5, 0.6], "other": [0.6, 0.8]}, "used"),
        ({"used": [0.6, 0.6], "other": [0.61, 0.61]}, "used"),
        ({"used": [0.5, 0.6], "other": [0.3, 0.4]}, "used"),
    ],
)
def test_a_way_replaces_the_way_in_use_only_beyond_the_spread(
    shares: dict[str, list[float]], chosen: str
) -> None:
    assert chosen_way(shares) == chosen
