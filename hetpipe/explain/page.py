"""Page: an explanation as one HTML file, with a timeline to zoom; it needs no network."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import version
from importlib.resources import files
from math import isfinite
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np

import hetpipe
from hetpipe.explain.use import COMPUTING
from hetpipe.files import user_path, write_beside
from hetpipe.html import lines_html
from hetpipe.report.intervals import Interval, Kind, intervals
from hetpipe.words import words

if TYPE_CHECKING:
    from hetpipe.plan.plan import Plan
    from hetpipe.report.tables import Table
    from hetpipe.simulate.outcome import MemoryUse
    from hetpipe.simulate.timeline import Timeline

MOST_BARS = 15_000
"""A timeline with more bars ends earlier on the page, which then says so."""
KINDS = tuple(Kind)


@dataclass(frozen=True)
class Page:
    """The contents of a page: text, tables, timelines by label, memory over time, and losses."""

    title: str
    lines: Sequence[str]
    tables: Sequence[Table]
    plan: Plan
    timelines: Mapping[str, Timeline]
    memory: Mapping[str, MemoryUse]
    losses: Sequence[tuple[int, float]]

    def write(self, path: str | Path) -> None:
        """Write the page beside its path, and rename it. Raises `HetpipeError` if that fails."""
        write_beside(user_path(path), self.text().encode(errors="replace"))

    def text(self) -> str:
        """Return the page as HTML."""
        shown, left_out = {}, 0
        for label, timeline in self.timelines.items():
            timed = (each for each in intervals(timeline) if isfinite(each.start_s + each.end_s))
            every = sorted(timed, key=lambda each: each.start_s)
            shown[label] = every[:MOST_BARS]
            left_out += len(every) - len(shown[label])
        names = dict.fromkeys(_names(self.timelines))
        tables = [f'<div class="table">{table._repr_html_()}</div>' for table in self.tables]
        return Template(_source("page.html")).substitute(
            css=_source("page.css"),
            js=_source("page.js"),
            title=escape(self.title),
            summary=lines_html(self.lines),
            label=escape(f"timeline of {words(names)}; the tables below have its numbers"),
            cutoff=f" {left_out} later bars are left out." if left_out else "",
            tables="".join(tables),
            losses=_losses(self.losses),
            made=_made(),
            data=_script(_data(self, shown)),
        )


def _source(name: str) -> str:
    return files("hetpipe.explain").joinpath(name).read_text(encoding="utf-8")


def _script(data: Mapping[str, Any]) -> str:
    """Return JSON that cannot end its script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _names(timelines: Mapping[str, Timeline]) -> list[str]:
    """Return the device of each row."""
    return [row.partition(" lane ")[0] for each in timelines.values() for row in each.workers]


def _data(page: Page, shown: Mapping[str, Sequence[Interval]]) -> dict[str, Any]:
    plan, timelines = page.plan, page.timelines
    begins_s = {
        label: min((each.start_s for each in own), default=0.0) for label, own in shown.items()
    }
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for label, timeline in timelines.items():
        bars: dict[int, list[list[Any]]] = defaultdict(list)
        for each in shown[label]:
            bars[each.worker].append(_bar(each, begins_s[label]))
        for number, name in enumerate(timeline.workers):
            device, _, lane = name.partition(" lane ")
            text = f"{label} {lane}" if lane else label
            rows[device].append({"label": text, "bars": bars[number]})
    memory = {device: _memory(use) for device, use in page.memory.items() if use.peak_nbytes}
    return {
        "end": max((bar[1] + bar[2] for own in rows.values() for row in own for bar in row["bars"]),
                   default=0.0),
        "kinds": [{"name": kind.value, "css": _css(kind), "pass": kind in COMPUTING}
                  for kind in KINDS],
        "stages": [{"layers": layers_of(plan, number)} for number in range(len(plan.stages))],
        "cuts": list(plan.cut_nbytes),
        "devices": [
            {"name": device, "layers": _own_layers(plan, device), "rows": own,
             "memory": memory.get(device)}
            for device, own in rows.items()
        ],
    }  # fmt: skip


def _bar(each: Interval, begin_s: float) -> list[Any]:
    start_us, lasts_us = 1e6 * (each.start_s - begin_s), 1e6 * (each.end_s - each.start_s)
    return [KINDS.index(each.kind), round(start_us, 2), round(lasts_us, 2), str(each.action)]


def _css(kind: Kind) -> str:
    return kind.value.replace(":", "").replace(" ", "-")


def layers_of(plan: Plan, number: int) -> str:
    """Return the numbers and names of a stage's layers."""
    stage = plan.stages[number]
    names = words(plan.layers[stage.lo : stage.hi])
    return (
        f"layers {stage.lo} to {stage.hi - 1} ({names})"
        if stage.hi - stage.lo > 1
        else (f"layer {stage.lo} ({names})")
    )


def _own_layers(plan: Plan, device: str) -> str:
    own = [stage for stage in plan.stages if device in stage.devices]
    return "layers " + ", ".join(f"{stage.lo}-{stage.hi - 1}" for stage in own)


def _memory(use: MemoryUse) -> dict[str, Any]:
    """Return the predicted bytes over time."""
    times_us = np.round(1e6 * (use.seconds - use.seconds[0]), 2).tolist()
    points = [*zip(times_us, map(int, use.nbytes.tolist()), strict=True)]
    return {"points": points, "peak": use.peak_nbytes, "end": times_us[-1]}


def _losses(known: Sequence[tuple[int, float]]) -> str:
    """Return a curve of the losses, as SVG; nothing if there are fewer than two."""
    losses = [pair for pair in known if abs(pair[1]) < 1e30]
    if len(losses) < 2:
        return ""
    (first, first_loss), (last, last_loss) = losses[0], losses[-1]
    low, high = min(loss for _, loss in losses), max(loss for _, loss in losses)
    wide, tall, left = 800, 180, 70

    def place(number: int, loss: float) -> str:
        x = left + (wide - left - 10) * (number - first) / max(last - first, 1)
        y = 10 + (tall - 40) * ((high - loss) / (high - low) if high > low else 0.5)
        return f"{x:.1f},{y:.1f}"

    told = (
        f"The loss was {first_loss:.4g} in mini-batch {first} and {last_loss:.4g} in mini-batch "
        f"{last}; the least was {low:.4g}."
    )
    base = tall - 30
    return (
        '<section aria-labelledby="losses-head"><h2 id="losses-head">Losses</h2>'
        f'<svg viewBox="0 0 {wide} {tall}" role="img" aria-label="{escape(told)}">'
        f'<path class="axis" d="M{left},10V{base}H{wide - 10}" fill="none"/>'
        f'<text x="{left - 8}" y="16" text-anchor="end">{high:.4g}</text>'
        f'<text x="{left - 8}" y="{base}" text-anchor="end">{low:.4g}</text>'
        f'<text x="{left}" y="{tall - 10}">mini-batch {first}</text>'
        f'<text x="{wide - 10}" y="{tall - 10}" text-anchor="end">{last}</text>'
        f'<polyline class="curve" points="{" ".join(place(*pair) for pair in losses)}"/></svg>'
        f'<p class="hint">{escape(told)}</p></section>'
    )


def _made() -> str:
    """Return a list with the versions and the command line."""
    facts = {
        "command": shlex.join(sys.argv),
        "hetpipe": hetpipe.__version__,
        "torch": version("torch"),
        "Python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f"<dl>{''.join(rows)}</dl>"
