"""Output for people and programs: tables, pictures of timelines, traces in JSON."""

from typing import TYPE_CHECKING

from hetpipe._lazy import lazy

if TYPE_CHECKING:
    from hetpipe.report.picture import draw_timelines as draw_timelines
    from hetpipe.report.trace import write_trace as write_trace
else:
    __getattr__, __dir__ = lazy(__name__)
