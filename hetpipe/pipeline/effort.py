"""The work of a pipeline's start, in counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.profile.rounds import Effort


def effort_of(captured: Captured, profiles: Iterable[Effort]) -> dict[str, int]:
    """Return exports and traces of the model; and layers, unlike layers, compilations and runs of
    its profiles, on all devices."""
    counts = {"exports": captured.exports, "traces": captured.traces.count}
    for profile in profiles:
        counts |= {
            "layers": profile.layers,
            "unlike layers": profile.patterns,
            "compilations": profile.compilations,
            "profile runs": profile.runs,
        }
    return counts
