"""Boards: every number has a source and a plausible size, and an error names its place."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from mutations import spoilt

from hetpipe.cost.board import Board, Fabric, Price, board, boards, read_board
from hetpipe.errors import CostError
from hetpipe.toml import Lines

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GPUS = (
    *("v100-pcie-16", "v100-pcie-32", "v100-sxm-16", "v100-sxm-32", "p100", "t4"),
    *("rtx-2080-ti", "gtx-1080-ti", "titan-x", "a100-40", "a100-80", "h100", "h200"),
    *("rtx-3060", "rtx-3070", "rtx-3080", "rtx-3090", "rtx-4060", "rtx-4070", "rtx-4080"),
    *("rtx-4090", "rtx-5070", "rtx-5080", "rtx-5090", "rtx-a4000", "rtx-a5000", "rtx-a6000"),
    *("rtx-6000-ada", "a10", "l4", "l40s", "b200", "mi210", "mi250x", "mi300x", "mi325x"),
    *("arc-a770", "arc-b580", "gaudi-2", "gaudi-3", "jetson-agx-orin", "jetson-orin-nano"),
    *("m1-ultra", "m2-max", "m2-ultra", "m3-max", "m4-max"),
)
FPGAS = (
    *("vcu118", "vcu129", "vck190", "alveo-u50", "u200", "u250", "u280", "u55c"),
    *("stratix-10-gx2800", "pac-d5005", "agilex-agf027"),
)
IDS = (*GPUS, *FPGAS, "desktop-cpu")

FPGA = """\
# an FPGA board of somebody's own
name = "Own board"
kind = "fpga"
execution = "async"
memory_nbytes = { value = 4_000_000_000, source = "the board's manual" }
memory_Bps = { value = 38.4e9, source = "the board's manual" }
launch_s = { value = 1e-5, source = "estimate: a pipeline's depth" }
host_Bps = { value = 16e9, source = "the board's manual" }

[fabric]
dsp = { value = 100, source = "the device's data sheet" }
clock_Hz = { value = 250e6, source = "our own designs" }
on_chip_nbytes = { value = 1000, source = "the device's data sheet" }
usable = { value = 1, source = "our own designs" }
efficiency = { value = 0.8, source = "our own designs" }

[fabric.dsp_per_mac]
float32 = { value = 5, source = "our own designs" }
"""
GPU = """\
name = "Own card"
kind = "gpu"
execution = "sync"
memory_nbytes = { value = 16_000_000_000, source = "the card's data sheet" }
memory_Bps = { value = 900e9, source = "the card's data sheet" }
launch_s = { value = 5e-6, source = "measured on the card" }
host_Bps = { value = 16e9, source = "the card's data sheet" }
peer_Bps = { value = 50e9, source = "the card's data sheet" }
power_w = { value = 300, source = "the card's data sheet" }
price = { amount = 999.5, currency = "EUR", date = "2024-02-29", source = "the shop's bill" }
peak_flops.float32 = { value = 15.7e12, source = "the card's data sheet" }
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "own-board.toml"


def numbers(node: object, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of a board with its key in the file."""
    if isinstance(node, (Board, Fabric)):
        node = {each.name: getattr(node, each.name) for each in fields(node)}
    if isinstance(node, dict):
        for name, value in node.items():
            yield from numbers(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, (int, float)):
        yield key, node


def raw_values(table: dict[str, Any]) -> Iterator[Any]:
    """Yield the values of a TOML file's keys; a value and its source are one value."""
    for value in table.values():
        if isinstance(value, dict) and "source" not in value:
            yield from raw_values(value)
        else:
            yield value


def test_the_included_boards_are_known() -> None:
    assert set(boards()) == set(IDS)


@pytest.mark.parametrize("id", IDS)
def test_every_number_has_a_source(id: str) -> None:
    there = board(id)
    others = {key for key in ("offline", "price") if getattr(there, key) is not None}
    assert set(there.sources) == {key for key, _ in numbers(there)} | others
    raw = tomllib.loads((files("hetpipe.boards") / f"{id}.toml").read_text(encoding="utf-8"))
    for value in raw_values(raw):
        if isinstance(value, dict):
            assert len(value["source"]) >= 12, value
        else:
            assert isinstance(value, str), f"{value} has no source"


PLAUSIBLE = {
    "memory_nbytes": (4e9, 300e9),
    "memory_Bps": (20e9, 10e12),
    "launch_s": (1e-6, 50e-6),
    "host_Bps": (5e9, 400e9),
    "peer_Bps": (10e9, 900e9),
    "power_w": (20, 1000),
    "peak_flops.float32": (0.5e12, 300e12),
    "peak_flops.tensorfloat32": (10e12, 1.2e15),
    "peak_flops.float16": (10e12, 2.3e15),
    "peak_flops.bfloat16": (20e12, 2.3e15),
    "fabric.dsp": (1000, 20000),
    "fabric.clock_Hz": (200e6, 400e6),
    "fabric.on_chip_nbytes": (20e6, 80e6),
    "fabric.usable": (0.4, 1.0),
    "fabric.efficiency": (0.4, 1.0),
    "fabric.dsp_per_mac.float32": (1, 5),
    "fabric.dsp_per_mac.float16": (0.5, 2),
    "fabric.dsp_per_mac.int16": (0.5, 1),
}
"""Least and most; no range spans a factor of 1000, so that a wrong unit is found."""


@pytest.mark.parametrize("id", IDS)
def test_numbers_are_plausible(id: str) -> None:
    there = board(id)
    for key, number in numbers(there):
        least, most = PLAUSIBLE[key]
        assert least <= number <= most, key
    assert there.execution == ("async" if there.kind == "fpga" else "sync")
    assert (there.fabric is None) == bool(there.peak_flops) == (there.kind != "fpga")
    if there.kind == "gpu":
        assert 5 < there.peak_flops["float32"] / there.memory_Bps < 120
        assert there.host_Bps < (there.peer_Bps or there.memory_Bps) < there.memory_Bps * 1.01
    else:
        assert there.host_Bps < there.memory_Bps


@pytest.mark.parametrize("id", GPUS)
def test_shorter_dtypes_are_not_slower(id: str) -> None:
    peaks = board(id).peak_flops
    exact, rough = peaks["float32"], peaks.get("tensorfloat32")
    halves = {peaks[dtype] for dtype in ("float16", "bfloat16") if dtype in peaks}
    assert all(half >= (rough or exact) >= exact for half in halves)
    if id != "gaudi-3":
        assert len(halves) < 2, "both have the same rate"
        assert rough is None or list(halves) == [pytest.approx(2 * rough, rel=0.02)]


@pytest.mark.parametrize(
    ("ids", "factor"),
    [
        ([id for id in GPUS if re.fullmatch(r"rtx-[345]0\d0", id)], 2),
        (["rtx-a4000", "rtx-a5000", "rtx-a6000", "rtx-6000-ada", "a10", "l4", "l40s"], 4),
    ],
)
def test_rates_are_without_sparsity_and_with_sums_in_float32(ids: list[str], factor: int) -> None:
    """Makers also publish two and four times these rates."""
    for id in ids:
        peaks = board(id).peak_flops
        assert peaks["float16"] == pytest.approx(factor * peaks["float32"], rel=0.02), id


GT_PER_S = {3: 8, 4: 16, 5: 32}
"""Transfers of a lane in each second, by generation of PCI Express; 128 of 130 bits are data."""


def test_links_to_the_host_have_the_rate_of_their_generation() -> None:
    found = []
    for id in IDS:
        there = board(id)
        text = there.sources["host_Bps"]
        match = re.match(r"PCI Express (\d)\.0 base specification: (\d+) lanes of (\d+) GT/s", text)
        if match is not None:
            generation, lanes, GT = map(int, match.groups())
            assert GT_PER_S[generation] == GT
            assert there.host_Bps == pytest.approx(GT * 1e9 * lanes * 128 / 130 / 8, rel=1e-3)
            found.append((generation, lanes))
        else:
            assert text.startswith("estimate: ")
    assert set(found) == {(3, 16), (4, 8), (4, 16), (5, 16)}


def test_prices_are_in_order() -> None:
    prices = {id: there.price for id, there in boards().items() if there.price is not None}
    assert all(100 <= price.amount <= 3000 for price in prices.values())
    assert all("2016" < price.date < "2026" for price in prices.values())
    for series in (3, 4, 5):
        amounts = [prices[f"rtx-{series}0{card}0"].amount for card in (7, 8, 9)]
        assert amounts == sorted(amounts)


def test_no_plausible_range_hides_a_unit_error() -> None:
    assert all(most / least < 1000 for least, most in PLAUSIBLE.values())


def test_variants_of_a_card_differ_only_in_memory() -> None:
    for bus in ("pcie", "sxm"):
        small, large = (board(f"v100-{bus}-{gigabytes}") for gigabytes in (16, 32))
        assert 2 * small.memory_nbytes == large.memory_nbytes
        assert replace(small, id="", name="", memory_nbytes=0, sources={}) == replace(
            large, id="", name="", memory_nbytes=0, sources={}
        )
    assert board("v100-pcie-16").peer_Bps is None
    assert board("h100").peak_flops == board("h200").peak_flops


@pytest.fixture
def expected() -> Path:
    if not (folder := os.environ.get("HETPIPE_DATA")):
        pytest.skip("HETPIPE_DATA is unset: it names the folder of the papers' figures")
    return Path(folder) / "expected"


@pytest.mark.parametrize("id", ["vcu118", "vcu129"])
def test_bapipes_boards_match_its_table(expected: Path, id: str) -> None:
    published = tomllib.loads((expected / "bapipe.toml").read_text())["boards"][id]
    there = board(id)
    assert there.fabric is not None
    assert there.fabric.dsp == published["dsp"]
    assert there.fabric.on_chip_nbytes == pytest.approx(
        published["on_chip_Mb"] * 2**20 / 8, rel=0.002
    )
    assert there.memory_Bps == pytest.approx(published["ddr_GBps"] * 1e9, rel=0.05)


@pytest.mark.parametrize(
    ("id", "name", "clock_MHz"),
    [
        ("stratix-10-gx2800", "BittWare 520N", 273),
        ("u280", "Alveo U280, HBM", 236),
        ("pac-d5005", "Intel PAC D5005", 225),
        ("vcu118", "VCU1525", 250),
    ],
)
def test_fabrics_reach_the_measured_speed(
    expected: Path, id: str, name: str, clock_MHz: int
) -> None:
    rows = tomllib.loads((expected / "fpga_gemm.toml").read_text())["board"]
    (row,) = (row for row in rows if row["name"].startswith(name))
    fabric = board(id).fabric
    assert fabric is not None
    assert (fabric.dsp, fabric.clock_Hz) == (row["dsp"], row["clock_MHz"] * 1e6)
    macs = fabric.dsp * fabric.usable / fabric.dsp_per_mac["float32"]
    flops = 2 * fabric.clock_Hz * macs * fabric.efficiency
    assert flops == pytest.approx(row["gflops"] * 1e9, rel=0.02)


def test_a_users_folder(path: Path) -> None:
    path.write_text(FPGA)
    path.with_name("own-card.toml").write_text(GPU)
    path.with_name("notes.txt").write_text("no board")
    own = boards(path.parent)
    assert list(own) == ["own-board", "own-card"]
    assert own["own-board"].fabric == Fabric(100, 250e6, 1000, {"float32": 5.0}, 1.0, 0.8)
    assert own["own-board"].sources["fabric.dsp_per_mac.float32"] == "our own designs"
    assert own["own-card"].peak_flops == {"float32": 15.7e12}
    assert own["own-card"].peer_Bps == 50e9
    assert own["own-board"].peer_Bps is None
    assert own["own-card"].power_w == 300.0
    assert own["own-card"].price == Price(999.5, "EUR", "2024-02-29")
    assert own["own-card"].sources["price"] == "the shop's bill"
    assert (own["own-board"].power_w, own["own-board"].price) == (None, None)


def test_a_missing_folder_is_refused(path: Path) -> None:
    with pytest.raises(CostError, match="is no folder; name a folder with a TOML file"):
        boards(path)


@pytest.mark.parametrize(
    ("text", "old", "new", "line", "message"),
    [
        (FPGA, '"async"', '"asynchronous"', 4, "execution is 'asynchronous', it should be 'sync'"),
        (FPGA, '"fpga"', '"board"', 3, "kind is 'board', it should be 'gpu', 'fpga' or 'cpu'"),
        (FPGA, 'kind = "fpga"\n', "", 1, "lacks the key 'kind'"),
        (FPGA, "memory_Bps", "memory_GBps", 1, "lacks the key 'memory_Bps'; write memory_Bps = "),
        (FPGA, "4_000_000_000", "4e9", 5, "memory_nbytes.value is 4.*, it should be a whole numb"),
        (FPGA, "38.4e9", "-38.4e9", 6, "memory_Bps.value is -38.*, it should be above 0"),
        (FPGA, "38.4e9", "inf", 6, "memory_Bps.value is inf, it should be a finite number"),
        (
            FPGA,
            '{ value = 1e-5, source = "estimate: a pipeline\'s depth" }',
            "1e-5",
            7,
            r"launch_s is 1e-05, .*; write launch_s = \{ value = NUMBER, source = ",
        ),
        (FPGA, ', source = "the device\'s data sheet"', "", 11, "fabric.dsp lacks the key 'source"),
        (FPGA, "our own designs", "", 12, "clock_Hz.source is '', it should be text that is not"),
        (FPGA, "value = 0.8", "value = 80", 15, "efficiency.value is 80, it should be at most 1"),
        (FPGA, "efficiency", "speed", 10, "fabric lacks the key 'efficiency'; write efficiency = "),
        (FPGA, "usable", "speed = 1\nusable", 14, "fabric has an unknown key 'speed'; known: dsp"),
        (FPGA, "float32", "float23", 18, "has an unknown key 'float23'; did you mean float"),
        (FPGA, "float32", "float16", 17, "fabric.dsp_per_mac lacks the key 'float32'"),
        (FPGA, "name", "cores = 4\nname", 2, "unknown key 'cores'; known: name, kind, execution"),
        (GPU, "value = 300,", "value = 0,", 9, "power_w.value is 0, it should be above 0"),
        (GPU, '"EUR"', '"euro"', 10, "price.currency is 'euro', it should be 'USD' or 'EUR'"),
        (GPU, "02-29", "2-29", 10, "price.date.*'2024-2-29' is no date; write it as 2022-09-20"),
        (GPU, "2024-02-29", "2023-02-29", 10, "price.date.*'2023-02-29' is no date"),
        (GPU, "amount = 999.5,", "", 10, "price lacks the key 'amount'"),
        (GPU, "peak_flops.float32", "peak_flops.int8", 11, "peak_flops has an unknown key 'int8'"),
        (GPU, "peak_flops", "fabric.dsp = 1\npeak_flops", 11, "unknown key 'fabric'; known: name"),
        (GPU, "peak_flops.float32", "peak", 1, "lacks the key 'peak_flops'"),
        (GPU, "900e9,", "900e9", 5, "Unclosed inline table"),
    ],
)  # fmt: skip
def test_errors_name_the_line(
    path: Path, text: str, old: str, new: str, line: int, message: str
) -> None:
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(CostError, match=message) as caught:
        read_board(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")


def refusal(path: Path) -> str | None:
    """Return the error message for a file that is no board, or None."""
    try:
        read_board(path)
    except CostError as error:
        return str(error)
    return None


@pytest.mark.parametrize("text", [FPGA, GPU])
def test_a_damaged_file_gives_one_error_with_its_place(path: Path, text: str) -> None:
    rng, refusals = random.Random(0), []
    for _ in range(200):
        path.write_bytes(spoilt(text.encode(), rng))
        if (message := refusal(path)) is not None:
            refusals.append(message)
    assert len(refusals) > 100
    assert all(re.match(rf"{re.escape(str(path))}:\d+: ", message) for message in refusals)


@pytest.mark.parametrize(
    ("id", "near"),
    [("v100", "v100-sxm-32"), ("Alveo-U280", "did you mean u280"), ("vcu119", "vcu118")],
)
def test_the_error_of_an_unknown_board_suggests_similar_names(id: str, near: str) -> None:
    with pytest.raises(CostError, match=f"no board '{id}'.*{near}.*`hetpipe boards` lists all 59"):
        board(id)


def test_the_error_of_a_nonsense_name_suggests_nothing() -> None:
    with pytest.raises(CostError, match="no board '#####'; `hetpipe boards` lists"):
        board("#####")


def test_callers_cannot_change_the_boards() -> None:
    boards().clear()
    assert boards()


def test_lines_of_nested_tables() -> None:
    lines = Lines(
        """top = 1
[[device]]
id = "a"
  [device.limits]
  memory = 1
[[device]]
"id" = "b"
[device."odd name"]
x . y = 2
[[device.core]]
[[device.core]]
number = 3"""
    )
    places: dict[tuple[str | int, ...], int] = {
        ("top",): 1,
        ("device",): 2,
        ("device", 0): 2,
        ("device", 0, "id"): 3,
        ("device", 0, "limits"): 4,
        ("device", 0, "limits", "memory"): 5,
        ("device", 0, "absent"): 2,
        ("device", 1): 6,
        ("device", 1, "id"): 7,
        ("device", 1, "odd name", "x", "y"): 9,
        ("device", 1, "core", 0): 10,
        ("device", 1, "core", 1): 11,
        ("device", 1, "core", 1, "number"): 12,
        ("absent",): 1,
        (): 1,
    }
    assert {place: lines.at(place) for place in places} == places
