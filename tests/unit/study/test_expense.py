"""Power and price of described clusters, and the throughput for them in `hetpipe whatif`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from profile_files import write_profile
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.board import Price, board
from hetpipe.cost.pipedream_profile import ProfileGraph, ProfileNode
from hetpipe.plan.proposal import PlannerOptions
from hetpipe.study import expense
from hetpipe.study.changes import whatif
from hetpipe.study.expense import UNSTATED, Expense, expense_of
from hetpipe.study.subject import of_profile

MEMBERS = """
[[device]]
board = "rtx-3090"
count = 2
server = "a"
[[device]]
board = "rtx-4060"
server = "a"
[[server]]
name = "a"
inside = { shape = "point-to-point", bandwidth = "12 GB/s", latency = "5 us" }
"""
LAYERS, SAMPLES, MINI_BATCH = 6, 16, 64


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a cluster file, and beside it a profile of equal layers."""
    nodes = tuple(
        ProfileNode(f"node{n}", f"Linear{n}", 0.01, 0.02, 2**22, 2**24) for n in range(LAYERS)
    )
    edges = tuple((f"node{n}", f"node{n + 1}") for n in range(LAYERS - 1))
    write_profile(ProfileGraph(nodes, edges), tmp_path / "equal.txt")
    path = tmp_path / "cards.toml"
    path.write_text(MEMBERS, encoding="utf-8")
    return path


def more(file: Path, text: str) -> Cluster:
    """Return the cluster of the file with one more device."""
    file.write_text(f"{MEMBERS}\n[[device]]\n{text}\n", encoding="utf-8")
    return Cluster.load(file)


def test_a_clusters_power_and_price_are_sums(file: Path) -> None:
    assert expense_of(Cluster.load(file)) == Expense(2 * 350 + 115, 2 * 1499 + 299, "USD")


def test_a_member_that_states_nothing_leaves_no_sum(file: Path) -> None:
    assert expense_of(more(file, 'board = "vcu118"')) == UNSTATED
    assert expense_of(more(file, 'id = "host"\ndevice = "numpy:cpu:0"')) == UNSTATED
    without_price = expense_of(more(file, 'board = "a100-40"'))
    assert without_price == Expense(2 * 350 + 115 + 400)


def test_prices_in_two_currencies_have_no_sum(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_euros(id: str) -> object:
        known = board(id)
        return known if id != "rtx-4060" else replace(known, price=Price(329, "EUR", "2023-05-18"))

    monkeypatch.setattr(expense, "board", in_euros)
    assert expense_of(Cluster.load(file)) == Expense(2 * 350 + 115)


def test_throughput_is_divided_by_power_and_price(file: Path) -> None:
    subject = of_profile(file.with_name("equal.txt"), SAMPLES, MINI_BATCH)
    options = PlannerOptions(MINI_BATCH, (8,))
    changes = ["-rtx-4060.0", "+vcu118@a"]
    answer = whatif(subject, Cluster.load(file), changes, options, "exact")
    less, unstated = answer.changes
    for row, power_w, price in ((answer.now, 815, 3297), (less, 700, 2998)):
        assert row.plan is not None
        assert row.samples_per_J == pytest.approx(row.plan.samples_per_s / power_w)
        assert row.samples_per_s_per_price == pytest.approx(row.plan.samples_per_s / price)
    assert unstated.plan is not None
    assert (unstated.samples_per_J, unstated.samples_per_s_per_price) == (None, None)
    refused = replace(less, plan=None)
    assert (refused.samples_per_J, refused.samples_per_s_per_price) == (None, None)


def run_whatif(file: Path, *arguments: str) -> str:
    profile = ["--profile", str(file.with_name("equal.txt")), "--samples", str(SAMPLES)]
    asked = ["whatif", *profile, "--cluster", str(file), "--planner", "exact", *arguments]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, asked, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_table_has_columns_only_for_stated_values(file: Path) -> None:
    text = run_whatif(file, "--change", "+a100-40@a")
    assert "throughput per W" in text
    assert "throughput per 1000 USD" in text
    now, changed = (line.split("│") for line in text.splitlines() if "ms modelled" in line)
    assert now[-2].strip().endswith("/s")
    assert changed[-3].strip().endswith("/s")
    assert changed[-2].strip() == "-", "an A100 has no price"
    more(file, 'board = "vcu118"\nserver = "a"')
    assert "throughput" not in run_whatif(file, "--change", "-rtx-4060.0")


def test_the_json_has_power_price_and_rates(file: Path) -> None:
    data = json.loads(run_whatif(file, "--change", "+a100-40@a", "--json", "-"))
    now, changed = data["rows"]
    assert (now["power_w"], now["price"], now["currency"]) == (815, 3297, "USD")
    rate = now["samples_per_J"] * now["power_w"]
    assert rate == pytest.approx(now["plan"]["mini_batch"] / now["step_s"])
    assert now["samples_per_s_per_price"] * now["price"] == pytest.approx(rate)
    assert (changed["power_w"], changed["price"], changed["currency"]) == (1215, None, "")
