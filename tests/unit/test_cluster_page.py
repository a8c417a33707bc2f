"""The file and the error on the page about clusters are those of today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetpipe.cluster import Cluster, cluster
from hetpipe.cluster.cluster import Link
from hetpipe.cluster.transports import TRANSPORTS
from hetpipe.errors import ClusterError

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's cluster file, on a machine with two cores."""
    monkeypatch.setattr(cluster, "available_cores", lambda: (0, 1))
    monkeypatch.chdir(tmp_path)
    block = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    Path("cluster.toml").write_text(block[1], encoding="utf-8")
    return Path("cluster.toml")


def test_the_pages_file_is_a_cluster(example: Path) -> None:
    loaded = Cluster.load(example)
    assert [(member.id, member.speed) for member in loaded.members] == [("fast", 1), ("slow", 0.5)]
    assert loaded.link("slow", "fast") == Link(1e-3, 1.25e8)


def test_the_pages_error_is_the_one_that_is_raised(example: Path) -> None:
    example.write_text(example.read_text().replace('"1 Gb/s"', '"1 Gbps"'))
    with pytest.raises(ClusterError) as caught:
        Cluster.load(example)
    assert f"\n    {caught.value}\n" in PAGE


def test_the_page_names_every_transport() -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith("| `transport`"))
    assert set(TRANSPORTS) <= set(re.findall(r"`([\w-]+)`", row))
