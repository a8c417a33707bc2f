"""The file and the error message on the page about clusters are current."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.cluster import Cluster, member
from hetpipe.cluster.published import published_names
from hetpipe.cluster.topology import SHAPES, Link
from hetpipe.cluster.transports import TRANSPORTS
from hetpipe.errors import ClusterError

PAGES = Path(__file__).parents[3] / "docs"
PAGE = (PAGES / "clusters.md").read_text(encoding="utf-8")


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the page's cluster file, on a machine with two cores."""
    monkeypatch.setattr(member, "available_cores", lambda: (0, 1))
    monkeypatch.chdir(tmp_path)
    block = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    Path("cluster.toml").write_text(block[1], encoding="utf-8")
    return Path("cluster.toml")


def test_the_pages_file_loads(example: Path) -> None:
    loaded = Cluster.load(example)
    assert [(member.id, member.speed) for member in loaded.members] == [("fast", 1), ("slow", 0.5)]
    assert loaded.link("slow", "fast") == Link(1e-3, 1.25e8)


def test_the_file_on_the_page_about_hosts_loads(tmp_path: Path) -> None:
    page = (PAGES / "hosts.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "lab.toml").write_text(block, encoding="utf-8")
    cluster = Cluster.load(tmp_path / "lab.toml")
    assert all(f"`{id}`" in page for id in cluster.ids)
    assert cluster.emulated_link(*cluster.ids) == Link(5e-3, 1.25e8)


def test_the_pages_answers_about_its_described_cluster_are_right(tmp_path: Path) -> None:
    _, block = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "described.toml"
    path.write_text(block, encoding="utf-8")
    cluster = Cluster.load(path)
    assert len(cluster.described) == len(cluster.ids) == 17
    assert [(len(group), group[0]) for group in cluster.groups()] == [
        (8, "v100-sxm-16.0"), (8, "v100-sxm-16.8"), (1, "fpga")
    ]  # fmt: skip
    for call, answer in re.findall(
        r"^    (cluster\.(?:link|way)\(.*\)) +# (.*)$", PAGE, re.MULTILINE
    ):
        assert eval(call) == eval(answer), call
    with pytest.raises(ClusterError, match="1 of 136 pairs have a separate link"):
        cluster.levels()  # because of the FPGA board
    without = tuple(member for member in cluster.members if member.id != "fpga")
    regular = replace(cluster, members=without, links={})
    shown = re.search(r"the levels `(\(\(.*?\)\))`", " ".join(PAGE.split()))
    assert shown is not None
    assert regular.levels() == eval(shown[1])


def test_the_page_names_every_shape_and_every_published_cluster() -> None:
    firsts = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    named = [name for cell in firsts for name in re.findall(r"`([\w-]+)`", cell)]
    assert {*SHAPES, *published_names()} <= set(named)


def test_the_pages_error_message_is_current(example: Path) -> None:
    example.write_text(example.read_text().replace('"1 Gb/s"', '"1 Gbps"'))
    with pytest.raises(ClusterError) as caught:
        Cluster.load(example)
    assert f"\n    {caught.value}\n" in PAGE


def test_the_page_names_every_transport() -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith("| `transport`"))
    assert set(TRANSPORTS) <= set(re.findall(r"`([\w-]+)`", row))
