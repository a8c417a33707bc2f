"""The page of an explanation in a browser, for a training on a processor and on OpenCL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browsers import chromium
from crews import Crews
from found_devices import infos
from priced import losses, open_planned
from tables import make_table, plan_by
from torch import nn

import hetpipe as hp
from hetpipe.explain.explanation import explain
from hetpipe.plan.proposal import Proposal

DEVICES = ("pytorch:cpu:0", "opencl:pocl:0")


@pytest.fixture
def report(crews: Crews, priced: None, tmp_path: Path) -> Path:
    """Train four mini-batches by invented costs, and return the page."""
    if DEVICES[1] not in {info.id for info in infos()}:
        pytest.skip("PoCL is not installed")
    path = tmp_path / "page.html"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 20))
    options = {"optimizer": hp.optim.sgd(0.1), "cuts": [1], "priced": True}
    with open_planned(crews(DEVICES), model, **options) as pipe:
        losses(pipe, 0, 4)
        pipe.explain().to_html(path)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


def test_long_times_have_no_exponent(browser: Any, tmp_path: Path) -> None:
    table = make_table({"a": 0.001, "b": 0.001})
    plan = plan_by({4: table}, Proposal((4,), (("a",), ("b",)), "1f1b", 4), 16)
    explain(plan, table).to_html(tmp_path / "page.html")
    page = browser.new_page(viewport={"width": 800, "height": 700})
    page.goto((tmp_path / "page.html").as_uri())
    box = page.locator("#timeline").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 90, box["y"] + 60)
    assert "starts at 0 us, takes 4000 s" in page.locator("#tip").inner_text()
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_reader_zooms_and_reads_a_bar(report: Path, browser: Any, scheme: str) -> None:
    page = browser.new_page(viewport={"width": 800, "height": 700}, color_scheme=scheme)
    requests: list[str] = []
    faults: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(report.as_uri())
    canvas = page.locator("#timeline")
    whole = canvas.screenshot()
    box = canvas.bounding_box()
    assert box is not None
    assert box["width"] <= 800

    page.mouse.move(box["x"] + 300, box["y"] + 60)  # the row of the first device, measured
    page.mouse.wheel(0, -600)
    page.wait_for_timeout(50)
    zoomed = canvas.screenshot()
    assert zoomed != whole

    page.keyboard.press("Tab")
    page.locator("#all").click()
    tip = page.locator("#tip")
    told = ""
    for right in range(88, int(box["width"]) - 12, 4):
        page.mouse.move(box["x"] + right, box["y"] + 60)
        if tip.is_visible() and "micro-batch" in (told := tip.inner_text()):
            break
    assert "forward 0F0" in told
    assert "stage 0: layer 0 (" in told
    assert "micro-batch 0" in told
    assert "takes" in told

    canvas.focus()
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    page.mouse.move(2, 2)
    moved = canvas.screenshot()
    page.keyboard.press("0")
    assert moved != canvas.screenshot()
    assert page.evaluate("document.documentElement.scrollWidth") <= 800
    assert page.locator("table").count() >= 4
    assert requests == [report.as_uri()]
    assert faults == []
    page.close()
