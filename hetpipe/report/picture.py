"""Draws timelines: the row of a lane has passes and waits, with transfers and sums below them.

`hetpipe.report.intervals` defines transfers and waits. A transfer is on its receiver's row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetpipe.errors import HetpipeError
from hetpipe.files import write_beside
from hetpipe.report.intervals import PASSES, Interval, Kind, intervals

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hetpipe.simulate.timeline import Timeline

COLOURS = {
    Kind.FORWARD: "#7fb3d5",
    Kind.BACKWARD: "#f5b971",
    Kind.BACKWARD_INPUT: "#e58b6b",
    Kind.BACKWARD_WEIGHT: "#f7df8e",
    Kind.UPDATE: "#8fbc8f",
    Kind.LOSS: "#d9c7e8",
    Kind.SUM: "#a48fd0",
    Kind.TRANSFER: "#5f6b76",
    Kind.WAIT: "#dedede",
}
BANDS = {Kind.TRANSFER: (0.27, 0.08), Kind.SUM: (0.37, 0.08), Kind.WAIT: (-0.25, 0.3)}
"""The offset of a bar's upper edge from the middle of its row, and the bar's height, in rows."""

PASS_BAND = (-0.42, 0.64)
NUMBERED = 0.011
"""A pass shows the number of its micro-batch if it is at least this fraction of the time axis."""

FORMATS = (".png", ".svg", ".pdf")


def draw_timelines(path: Path, timelines: Sequence[Timeline], title: str = "") -> None:
    """Draw timelines of one workload, one above the other, on the same time axis.

    Each timeline's title begins with its label. Raises `HetpipeError` for a file that is not .png,
    .svg or .pdf, if matplotlib is missing, or if the file cannot be written.
    """
    draw_workloads(path, [timelines], title)


def draw_workloads(path: Path, workloads: Sequence[Sequence[Timeline]], title: str = "") -> None:
    """Draw the timelines of several workloads, with a separate time axis for each workload.

    Raises the same errors as `draw_timelines`.
    """
    _save(path, lambda: figure_of(workloads, title))


def _save(path: Path, draw: Callable[[], Figure]) -> None:
    if path.suffix not in FORMATS:
        raise HetpipeError(f"a picture is one of {', '.join(FORMATS)}, not {path.name!r}")
    try:
        figure = draw()
    except ImportError as error:
        raise HetpipeError("pictures need matplotlib: pip install 'hetpipe[bench]'") from error
    kind = path.suffix.removeprefix(".")
    write_beside(path, lambda file: figure.savefig(file, format=kind, dpi=130))


def figure_of(workloads: Sequence[Sequence[Timeline]], title: str = "") -> Figure:
    """Return the figure: a panel per timeline; the timelines of a workload share a time axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [len(timeline.workers) for timelines in workloads for timeline in timelines]
    figure = Figure(figsize=(12, 1.2 + sum(0.8 + 0.6 * count for count in rows)))
    FigureCanvasAgg(figure)
    panels = iter(figure.add_gridspec(len(rows), 1, height_ratios=rows))
    kinds: set[Kind] = set()
    for timelines in workloads:
        first: Axes | None = None
        shown = [intervals(timeline) for timeline in timelines]
        width_s = max((_width_s(panel) for panel in shown), default=0.0)
        for timeline, panel in zip(timelines, shown, strict=True):
            axes = figure.add_subplot(next(panels), sharex=first)
            first = first or axes
            _draw(axes, timeline, panel, width_s)
            kinds |= {interval.kind for interval in panel}
        if first is not None:
            axes.set_xlabel("time since the step began, ms")
    figure.suptitle(title, x=0.01, ha="left")
    figure.legend(handles=_legend(kinds), loc="upper right", ncols=len(Kind), frameon=False)
    figure.tight_layout()
    return figure


def _draw(axes: Axes, timeline: Timeline, shown: Sequence[Interval], width_s: float) -> None:
    begin_s = _begin_s(shown)
    bars: dict[tuple[Kind, int], list[tuple[float, float]]] = defaultdict(list)
    for kind, worker, action, start_s, end_s in shown:
        bars[kind, worker].append(((start_s - begin_s) * 1e3, (end_s - start_s) * 1e3))
        if kind in _NUMBERED and end_s - start_s >= NUMBERED * width_s:
            centre_ms = ((start_s + end_s) / 2 - begin_s) * 1e3
            middle = worker + PASS_BAND[0] + PASS_BAND[1] / 2
            axes.text(centre_ms, middle, str(action.number), ha="center", va="center", fontsize=7)
    for (kind, worker), spans in bars.items():
        top, height = BANDS.get(kind, PASS_BAND)
        edge = {"edgecolor": "white", "linewidth": 0.4} if kind in _COMPUTE else {"linewidth": 0}
        axes.broken_barh(
            spans, (worker + top, height), facecolor=COLOURS[kind], label=kind.value, **edge
        )
    axes.set_yticks(range(len(timeline.workers)), timeline.workers)
    axes.set_ylim(len(timeline.workers) - 0.5, -0.5)
    axes.set_xlim(0.0, width_s * 1e3 or 1.0)
    axes.set_title(f"{timeline.title}: {timeline.step_s * 1e3:.1f} ms", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


_COMPUTE = frozenset(PASSES.values())
_NUMBERED = _COMPUTE - {Kind.UPDATE, Kind.LOSS}


def _begin_s(shown: Sequence[Interval]) -> float:
    return min((interval.start_s for interval in shown), default=0.0)


def _width_s(shown: Sequence[Interval]) -> float:
    return max((interval.end_s for interval in shown), default=0.0) - _begin_s(shown)


def _legend(kinds: set[Kind]) -> list[Artist]:
    from matplotlib.patches import Patch

    return [Patch(color=COLOURS[kind], label=kind.value) for kind in Kind if kind in kinds]


GROUP_COLOURS = ("#2f6b9a", "#c0504d", "#6a994e", "#8d6cab", "#b8860b")


@dataclass(frozen=True)
class Point:
    """A kernel: operations per byte (`intensity`), GFLOP/s, and a group, which has one colour."""

    label: str
    group: str
    intensity: float
    gflops: float


def draw_roofline(
    path: Path, points: Sequence[Point], peak_gflops: float, copy_gbytes_per_s: float, title: str
) -> None:
    """Draw kernels below the limits of memory and arithmetic, on logarithmic axes.

    Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for
    Multicore Architectures", CACM 2009. Raises the same errors as `draw_timelines`.
    """
    _save(path, lambda: _roofline(points, peak_gflops, copy_gbytes_per_s, title))


def _roofline(
    points: Sequence[Point], peak_gflops: float, copy_gbytes_per_s: float, title: str
) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    left = min(0.1, *(point.intensity / 2 for point in points))
    right = max(100.0, *(point.intensity * 2 for point in points))
    ridge = peak_gflops / copy_gbytes_per_s
    axes.plot(
        [left, ridge, right], [left * copy_gbytes_per_s, peak_gflops, peak_gflops], color="#444444"
    )
    axes.annotate(f"copy {copy_gbytes_per_s:.0f} GB/s", (left, left * copy_gbytes_per_s))
    axes.annotate(f"multiply-adds {peak_gflops:.0f} GFLOP/s", (ridge, peak_gflops * 1.05))
    for number, group in enumerate(dict.fromkeys(point.group for point in points)):
        mine = [point for point in points if point.group == group]
        axes.scatter(
            [point.intensity for point in mine], [point.gflops for point in mine], s=18,
            label=group, color=GROUP_COLOURS[number % len(GROUP_COLOURS)],
        )  # fmt: skip
    axes.set(
        xscale="log", yscale="log", title=title, xlabel="operations per byte", ylabel="GFLOP/s"
    )
    axes.legend(loc="lower right")
    return figure
