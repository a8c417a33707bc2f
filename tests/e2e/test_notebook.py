"""A notebook that trains: readable outputs, an interrupt in a step, a cell that runs twice."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

LIMIT_S = 120

MODEL = """
import os, pathlib, psutil, torch
import hetpipe as hp
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
x, y = torch.randn(8, 8), torch.randint(4, (8,))
cluster = hp.Cluster.local(devices=["numpy:cpu:0", "numpy:cpu:0"])
cluster
"""
OPEN = """
options = {"optimizer": hp.optim.sgd(0.1), "cuts": [1], "microbatches": 2, "schedule": "1f1b"}
pipe = hp.Pipeline(model, torch.nn.functional.cross_entropy, (x, y), cluster=cluster, **options)
children = psutil.Process().children(recursive=True)
pathlib.Path("workers").write_text(" ".join(str(child.pid) for child in children))
pipe
"""
STEP = "loss = pipe.step(x, y)\npipe.steps"
ENDLESS = """
def endless():
    while True:
        yield x, y
for result in pipe.run(endless()):
    if result.index == 20:
        pathlib.Path("ready").write_text(str(os.getpid()))
"""
AFTER = "again = pipe.steps\npipe.step(x, y), pipe.steps - again"
CELLS = [MODEL, OPEN, STEP, STEP, ENDLESS, AFTER, "pipe.explain()", "pipe.timeline", "pipe.close()"]


def interrupt_when_ready(folder: Path) -> None:
    """Interrupt the kernel as Jupyter does, after some steps of the endless cell."""
    end_s = time.monotonic() + LIMIT_S
    while not (folder / "ready").exists() or not (folder / "ready").read_text():
        if time.monotonic() > end_s:
            return
        time.sleep(0.02)
    os.kill(int((folder / "ready").read_text()), signal.SIGINT)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Run the notebook, and return its cells."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    notebook.cells[CELLS.index(ENDLESS)].metadata["tags"] = ["raises-exception"]
    thread = threading.Thread(target=interrupt_when_ready, args=(folder,), daemon=True)
    thread.start()
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(
        notebook, timeout=LIMIT_S, kernel_name="python3", resources=resources
    ).execute()
    thread.join()
    notebook.cells[1].workers = [int(pid) for pid in (folder / "workers").read_text().split()]
    return notebook.cells


def result_of(cell: Any, kind: str = "text/plain") -> str:
    (output,) = [each for each in cell.outputs if each.output_type == "execute_result"]
    return str(output.data[kind])


def test_the_start_writes_a_few_lines(cells: list[Any]) -> None:
    streams = [each for each in cells[1].outputs if each.output_type == "stream"]
    assert {stream.name for stream in streams} == {"stderr"}
    lines = "".join(stream.text for stream in streams).splitlines()
    assert lines[0] == "capturing"
    assert any(line.startswith("compiling 2 stages for numpy:cpu:0") for line in lines)
    assert len(lines) < 10


def test_objects_are_shown_as_tables(cells: list[Any]) -> None:
    assert "<table>" in result_of(cells[0], "text/html")
    assert "<b>pipeline</b>: step 0" in result_of(cells[1], "text/html")
    assert "bottleneck" in result_of(cells[6], "text/html")
    assert "<svg" in result_of(cells[7], "text/html")


def test_an_interrupt_ends_the_cell_and_not_the_training(cells: list[Any]) -> None:
    assert [result_of(cells[n]) for n in (2, 3)] == ["1", "2"]
    (error,) = [each for each in cells[4].outputs if each.output_type == "error"]
    assert error.ename == "KeyboardInterrupt"
    assert result_of(cells[5]).endswith(", 1)")


def test_no_worker_is_left(cells: list[Any]) -> None:
    workers = cells[1].workers
    assert len(workers) >= 2
    end_s = time.monotonic() + 20
    while (left := [pid for pid in workers if Path(f"/proc/{pid}").exists()]) and (
        time.monotonic() < end_s
    ):
        time.sleep(0.1)
    assert left == []
