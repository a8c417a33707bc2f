"""`hetpipe boards`: the table of all boards, one board's page, both as JSON, and docs/boards.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.cost.board import boards, read_board
from hetpipe.errors import CostError

PAGE = (Path(__file__).parents[3] / "docs" / "boards.md").read_text(encoding="utf-8")


def run_boards(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["boards", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def cells(text: str) -> dict[str, list[str]]:
    """Return the cells of a printed table's rows, by the first cell of each row."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if row and row[0]}


def test_all_boards_are_in_the_table() -> None:
    rows = cells(run_boards())
    assert set(rows) == set(boards())
    assert rows["v100-sxm-16"] == [
        *("gpu", "16 GiB", "900 GB/s", "15.75 GB/s", "50 GB/s"),
        "15.7 TFLOP/s float32, 125 TFLOP/s float16",
    ]
    assert rows["vcu118"][-2:] == ["12.5 GB/s", "6840 DSP at 250 MHz"]
    assert rows["t4"][4] == "-", "it has no direct link"


def test_a_boards_page_has_every_number_with_its_unit_and_source() -> None:
    text = run_boards("u280")
    rows, there = cells(text), boards()["u280"]
    assert "u280: AMD Alveo U280 (fpga, async)" in text
    assert list(rows) == list(there.sources)
    assert {key: row[0] for key, row in rows.items()} == {
        "memory_nbytes": "8 GiB",
        "memory_Bps": "460 GB/s",
        "launch_s": "10 us",
        "host_Bps": "15.75 GB/s",
        "peer_Bps": "12.5 GB/s",
        "power_w": "225 W",
        "fabric.dsp": "9024 DSP",
        "fabric.clock_Hz": "236 MHz",
        "fabric.on_chip_nbytes": "42.6 MiB",
        "fabric.usable": "85 %",
        "fabric.efficiency": "83 %",
        "fabric.dsp_per_mac.float32": "5 DSP",
        "fabric.dsp_per_mac.float16": "2 DSP",
        "fabric.dsp_per_mac.int16": "1 DSP",
        "offline": "AMD Vitis 2022.1, the last that takes OpenCL C",
    }
    assert all(there.sources[key].startswith(row[1]) for key, row in rows.items())


def test_a_page_has_power_and_price() -> None:
    rows = cells(run_boards("rtx-4090"))
    assert rows["power_w"][0] == "450 W"
    assert rows["price"][0] == "1599 USD, 2022-09-20"


def json_of(*arguments: str) -> Any:
    """Return the JSON of standard output."""
    done = CliRunner().invoke(app, ["boards", *arguments, "--json", "-"])
    return json.loads(done.stdout)


def test_the_json_holds_all_data_of_a_board() -> None:
    every = json_of()
    assert every["version"] == 1
    assert [there["id"] for there in every["boards"]] == list(boards())
    (one,) = json_of("vcu129")["boards"]
    assert one in every["boards"]
    assert one["fabric"]["dsp"] == 12288
    (card,) = json_of("rtx-4090")["boards"]
    assert card["price"] == {"amount": 1599.0, "currency": "USD", "date": "2022-09-20"}
    assert one["sources"]["fabric.dsp"] == boards()["vcu129"].sources["fabric.dsp"]


def test_an_unknown_board_is_refused() -> None:
    done = CliRunner().invoke(app, ["boards", "v100"])
    with pytest.raises(CostError, match="no board 'v100'; did you mean v100-pcie-16, v100-pcie-32"):
        raise done.exception or AssertionError(done.output)


def test_the_command_needs_neither_torch_nor_a_driver() -> None:
    code = (
        "import sys; from hetpipe.cli.app import app\n"
        "try: app(['boards', 'h100'])\n"
        "except SystemExit: pass\n"
        "sys.exit(len({'torch', 'pyopencl', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """Write the documentation page's example board to a file; return its path."""
    block = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    path = tmp_path / "my-card.toml"
    path.write_text(block[1], encoding="utf-8")
    return path


def test_the_pages_example_is_a_valid_board(example: Path) -> None:
    assert read_board(example).id == "my-card"
    assert cells(run_boards("--folder", str(example.parent))).keys() == {"my-card"}


def test_the_pages_error_message_is_current(example: Path) -> None:
    example.write_text(example.read_text().replace("900e9", "-900e9"))
    with pytest.raises(CostError) as caught:
        read_board(example)
    assert f"\n    {caught.value}\n".replace(f"{example.parent}/", "") in PAGE


def test_the_page_explains_every_key() -> None:
    explained = set(re.findall(r"^\| `([\w.]+)` \|", PAGE, re.MULTILINE))
    kinds = {key for there in boards().values() for key in there.sources}
    tables = {"peak_flops", "fabric.dsp_per_mac"}
    keys = {key.rpartition(".")[0] if key.rpartition(".")[0] in tables else key for key in kinds}
    assert explained == keys | {"name", "kind", "execution"}
