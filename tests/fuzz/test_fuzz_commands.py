"""Commands with a damaged file: they print it or raise a `HetpipeError`, nothing else."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from damage import TEXTS, changed, dumped
from documents import COSTS
from fuzzing import ACCEPTED, REFUSED, check_both_ends, outcomes, result_of
from hypothesis import strategies as st
from invented import NAMES
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.cluster.cluster_file import BandwidthWarning
from hetpipe.cost import CostTable
from hetpipe.errors import HetpipeError
from hetpipe.plan.planner import make_plan

KINDS = tuple(HetpipeError.__subclasses__())
CASES = 40  # a command takes a hundred times as long as a reader
ONE, OTHER = COSTS["devices"]
TABLE = CostTable.from_json(COSTS)
PLAN = make_plan(TABLE, [ONE, OTHER], mini_batch=8, microbatches=2)
KEPT = json.loads(json.dumps(PLAN.to_json() | {"costs": TABLE.to_json()}))


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exit_code == 0:
        return ACCEPTED
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    raise AssertionError(f"exit code {result.exit_code}: {result.output}")


def attempt(*arguments: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BandwidthWarning)
        done = result_of(lambda: run(*arguments), KINDS)
    return ACCEPTED if done == ACCEPTED else REFUSED


def renamed(document: Any, names: dict[str, str]) -> Any:
    """Return the document with other names for model, layers and devices."""
    if isinstance(document, dict):
        return {names.get(k, k): renamed(value, names) for k, value in document.items()}
    if isinstance(document, list):
        return [renamed(entry, names) for entry in document]
    return names.get(document, document) if isinstance(document, str) else document


def with_names(document: Any) -> st.SearchStrategy[Any]:
    others = st.dictionaries(
        st.sampled_from([ONE, OTHER, *KEPT["layers"], KEPT["model"], "measured", KEPT["origin"]]),
        NAMES | TEXTS,
        max_size=3,
    )
    return others.map(lambda names: renamed(document, names))


def test_simulate(tmp_path: Path) -> None:
    def check(content: bytes) -> str:
        (tmp_path / "p.json").write_bytes(content)
        trace = str(tmp_path / "trace.json")
        return attempt("simulate", str(tmp_path / "p.json"), "--trace", trace, "--json", "-")

    files = (with_names(KEPT) | with_names(KEPT) | changed(st.just(KEPT))).map(dumped)
    check_both_ends(outcomes(files, check, CASES))


@pytest.mark.slow
def test_plan_by_costs(tmp_path: Path) -> None:
    rows = [f'[[device]]\nid = "{id}"\ndevice = "soft:cpu:0"\n' for id in (ONE, OTHER)]
    (tmp_path / "c.toml").write_text("".join(rows))

    def check(content: bytes) -> str:
        (tmp_path / "c.json").write_bytes(content)
        given = ["--profile", str(tmp_path / "c.json"), "--cluster", str(tmp_path / "c.toml")]
        return attempt("plan", *given, "--planner", "dapple", "--out", str(tmp_path / "p.json"))

    files = (with_names(COSTS) | with_names(COSTS) | changed(st.just(COSTS))).map(dumped)
    check_both_ends(outcomes(files, check, CASES))


@pytest.mark.slow
def test_compare_on_a_cluster(tmp_path: Path) -> None:
    profile = tmp_path / "g.txt"
    costs = "forward_compute_time=1, backward_compute_time=2, activation_size=9, parameter_size=9"
    profile.write_text(f"node1 -- Linear -- {costs}\nnode2 -- Linear -- {costs}\n\tnode1 -- node2")

    def check(names: list[str]) -> str:
        rows = [
            f'[[device]]\nid = {json.dumps(name, ensure_ascii=False)}\nboard = "v100-pcie-16"\n'
            for name in names
        ]
        text = "".join(rows).replace("\x7f", "\\u007f") + '[network]\nbandwidth = "25 Gb/s"\n'
        (tmp_path / "c.toml").write_text(text, encoding="utf-8", errors="replace")
        cluster = ["--cluster", str(tmp_path / "c.toml")]
        return attempt("compare", "--profile", str(profile), *cluster, "--samples", "8")

    check_both_ends(outcomes(st.lists(NAMES | TEXTS, min_size=1, max_size=3), check, CASES))


def test_a_schedule_in_a_file(tmp_path: Path) -> None:
    """A file that is not text is refused with its line, like any other."""

    def check(content: bytes) -> str:
        (tmp_path / "drawn.txt").write_bytes(content)
        return attempt("train", "mlp", "--schedule", str(tmp_path / "drawn.txt"), "--cuts", "x")

    assert set(outcomes(st.binary(max_size=20), check, CASES)) == {REFUSED}
