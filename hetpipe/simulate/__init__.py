"""Simulation: runs a schedule on a virtual clock, and returns its timeline."""

from typing import TYPE_CHECKING

from hetpipe._lazy import lazy

if TYPE_CHECKING:
    from hetpipe.simulate.simulator import simulate as simulate
    from hetpipe.simulate.timeline import Span as Span
    from hetpipe.simulate.timeline import Timeline as Timeline
    from hetpipe.simulate.times import StageTimes as StageTimes
    from hetpipe.simulate.times import Transfer as Transfer
else:
    __getattr__, __dir__ = lazy(__name__)
