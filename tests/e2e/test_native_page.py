"""The page for vendors: its commands and scripts run as printed, and its tables are right."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx

from hetpipe.cluster import Cluster
from hetpipe.sdk.formats.serialised import DTYPES, serialise
from hetpipe.sdk.graph import canonical

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "native.md").read_text(encoding="utf-8")
HEADER = (ROOT / "backends" / "native" / "hetpipe_backend.h").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def shell(folder: Path, commands: str) -> str:
    """Run commands of the page with the `python` and `hetpipe` of this interpreter."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", commands], cwd=folder, env={**os.environ, "PATH": path},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(
    shutil.which("make") is None or shutil.which("cc") is None, reason="no compiler"
)
def test_the_commands_and_scripts_of_the_page_run(tmp_path: Path) -> None:
    train, dump = blocks("python")
    (tmp_path / "train.py").write_text(train)
    (tmp_path / "dump.py").write_text(dump)
    begin, run, conform = blocks("sh")
    said = shell(tmp_path, begin)
    assert "native:example.cpu:1" in said
    assert "has operators for 100.0 % of the" in said
    losses = re.search(r"losses \[(.*)\]", said)
    assert losses is not None
    first, *_, last = map(float, losses[1].split(","))
    assert last < first
    said = shell(tmp_path, f"python dump.py\n{run.replace('10000', '50')}")
    assert "50 cycles; from cycle 5 on the process has grown by" in said
    said = shell(tmp_path, conform)
    assert re.search(r"native:example\.cpu:0: \d+ passed, \d+ skipped", said), said


def test_the_pages_cluster_file_is_valid(tmp_path: Path) -> None:
    (block,) = blocks("toml")
    (tmp_path / "cluster.toml").write_text(block)
    options = Cluster.load(tmp_path / "cluster.toml").options["native"]
    assert options.values == {"libraries": ["mydevice/libexample.so"]}
    assert options.folder == tmp_path


def test_the_bytes_on_the_page_are_a_graph() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.create_node("call_function", torch.ops.aten.relu.default, (x,), name="y")
    x.meta["val"] = y.meta["val"] = torch.empty(2, device="meta")
    graph.output((y,))
    (block,) = blocks("hex")
    shown = bytes.fromhex(block)
    assert shown == serialise(canonical(graph))
    assert f"has {len(shown)} bytes" in PAGE


def test_the_page_names_every_function_and_dtype_with_its_code() -> None:
    named = re.findall(r"\(\*(\w+)\)\(", HEADER)
    table = PAGE.partition("| member of the table |")[2].partition("\n\n")[0]
    assert [name for name in named if f"`{name}`" not in table] == []
    codes = [f"{number} {name}" for number, name in enumerate(DTYPES, 1)]
    assert ", ".join(codes) in PAGE.replace("\n", " ")
    enums = dict(re.findall(r"HETPIPE_(\w+) = (\d+)", HEADER))
    assert [enums[name.upper()] for name in DTYPES] == [str(n) for n, _ in enumerate(DTYPES, 1)]
