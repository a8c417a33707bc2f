"""Draws a roofline: the speed of each kernel, below the limits of memory and arithmetic.

Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
Architectures", CACM 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetpipe.errors import HetpipeError
from hetpipe.files import write_beside

FORMATS = (".png", ".svg", ".pdf")
COLOURS = ("#2f6b9a", "#c0504d", "#6a994e", "#8d6cab", "#b8860b")


@dataclass(frozen=True)
class Point:
    """A kernel: operations per byte, GFLOP/s, and the group that gives its colour."""

    label: str
    group: str
    intensity: float
    gflops: float


def draw_roofline(
    path: Path, points: Sequence[Point], peak_gflops: float, copy_gbytes_per_s: float, title: str
) -> None:
    """Draw kernels below their roof, on logarithmic axes.

    Raises `HetpipeError` for a file that is no .png, .svg or .pdf, if matplotlib is missing, or if
    the file cannot be written.
    """
    if path.suffix not in FORMATS:
        raise HetpipeError(f"a picture is one of {', '.join(FORMATS)}, not {path.name!r}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HetpipeError("pictures need matplotlib: pip install 'hetpipe[bench]'") from error
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
            label=group, color=COLOURS[number % len(COLOURS)],
        )  # fmt: skip
    axes.set(
        xscale="log", yscale="log", title=title, xlabel="operations per byte", ylabel="GFLOP/s"
    )
    axes.legend(loc="lower right")
    write_beside(path, lambda file: figure.savefig(file, format=path.suffix[1:], dpi=120))
