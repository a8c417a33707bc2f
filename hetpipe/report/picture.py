"""Pictures of timelines: one row per worker, forwards, backwards and updates in their colours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetpipe.errors import HetpipeError
from hetpipe.report.files import write_beside
from hetpipe.schedule.action import Op

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hetpipe.simulate.timeline import Timeline

COLOURS = {Op.FORWARD: "#7fb3d5", Op.BACKWARD: "#f5b971", Op.UPDATE: "#8fbc8f"}
TRANSFER = "#c9c9c9"
FORMATS = (".png", ".svg", ".pdf")


def draw_timelines(path: Path, timelines: Sequence[Timeline], title: str = "") -> None:
    """Draw timelines one above the other on one time axis into a .png, .svg or .pdf file.

    Each says in its own title whether it is measured, emulated or predicted. Raises `HetpipeError`
    if matplotlib is missing or the file cannot be written.
    """
    if path.suffix not in FORMATS:
        raise HetpipeError(f"a picture is one of {', '.join(FORMATS)}, not {path.name!r}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HetpipeError("pictures need matplotlib: pip install 'hetpipe[bench]'") from error
    rows = [len(timeline.workers) for timeline in timelines]
    figure = Figure(figsize=(12, 1.2 + sum(0.8 + 0.55 * count for count in rows)))
    FigureCanvasAgg(figure)
    grid = figure.subplots(
        len(timelines), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": rows}
    )
    for axes, timeline in zip(grid[:, 0], timelines, strict=True):
        _draw(axes, timeline)
    grid[-1, 0].set_xlabel("time since the step began, ms")
    figure.suptitle(title, x=0.01, ha="left")
    figure.legend(handles=_legend(), loc="upper right", ncols=4, frameon=False)
    figure.tight_layout()
    kind = path.suffix.removeprefix(".")
    write_beside(path, lambda beside: figure.savefig(beside, format=kind, dpi=130))


def _draw(axes: Axes, timeline: Timeline) -> None:
    begin_s = min((span.start_s for span in timeline.spans), default=0.0)
    for span in timeline.spans:
        compute = span.action.op in COLOURS
        left_ms, width_ms = (span.start_s - begin_s) * 1e3, (span.end_s - span.start_s) * 1e3
        centre = span.worker if compute else span.worker + 0.43
        axes.barh(
            centre,
            width_ms,
            height=0.7 if compute else 0.1,
            left=left_ms,
            color=COLOURS.get(span.action.op, TRANSFER),
            edgecolor="white",
            linewidth=0.4,
        )
        if compute and span.action.op is not Op.UPDATE:
            axes.text(
                left_ms + width_ms / 2, centre, str(span.action.number),
                ha="center", va="center", fontsize=7, clip_on=True,
            )  # fmt: skip
    axes.set_yticks(range(len(timeline.workers)), timeline.workers)
    axes.set_ylim(len(timeline.workers) - 0.4, -0.5)
    axes.set_title(f"{timeline.label}: {timeline.step_s * 1e3:.1f} ms", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _legend() -> list[object]:
    from matplotlib.patches import Patch

    names = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.UPDATE: "update"}
    shown: list[object] = [Patch(color=COLOURS[op], label=name) for op, name in names.items()]
    return [*shown, Patch(color=TRANSFER, label="transfer")]
