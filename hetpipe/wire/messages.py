"""What the controller and its workers say to each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hetpipe.cluster.cluster import Link, Member
from hetpipe.schedule.action import Schedule
from hetpipe.schedule.closing import Closing
from hetpipe.schedule.weights import FLUSH, WeightPolicy

if TYPE_CHECKING:
    from hetpipe.capture.program import StageGraphs
    from hetpipe.wire.shares import Shares
    from hetpipe.wire.transport import Port
    from hetpipe.wire.wire import Wire

Array = np.ndarray[Any, Any]

SCRIPTS = 16
"""Schedules that a worker remembers; the oldest goes first."""

# To a worker.


@dataclass(frozen=True)
class Meeting:
    """Where processes meet before they can talk: a transport's module, and host and port."""

    module: str
    address: tuple[str, int]


@dataclass(frozen=True)
class Open:
    """First message: who you are. `backend` is `module:Class`, None to ask the registry."""

    member: Member
    backend: str | None
    heartbeat_s: float
    start_timeout_s: float
    rank: int
    world: int
    meeting: Meeting | None = None


@dataclass(frozen=True)
class EdgeEnd:
    """One end of a wire, at the worker that gets this; both, without a port, if both are there."""

    wire: Wire
    port: Port | None
    link: Link
    fds: tuple[int, int]  # its own lie from .. to (excluded) among those of the message


@dataclass(frozen=True)
class Keep:
    """How versions of weights are kept (`hetpipe.worker.weights`), and what they have seen."""

    policy: WeightPolicy = FLUSH
    updates: tuple[int, ...] = ()  # of each stage; empty: none
    lr: float = 0.0  # of the last of them
    check_finite: bool = False  # look at all that leaves a pass


@dataclass(frozen=True)
class StageLoad:
    """A stage and its values."""

    graphs: StageGraphs
    replica: int
    values: Mapping[str, Array]


@dataclass(frozen=True)
class Load:
    """Become these stages."""

    stages: tuple[StageLoad, ...]
    keep: Keep
    state_init: Callable[..., Array]
    edges: tuple[EdgeEnd, ...]
    shares: Shares


@dataclass(frozen=True)
class Clip:
    """Gradients are scaled so that their norm is at most `norm`: of all stages, or of each.

    `skips`: an update whose gradients are not all finite is left out.
    """

    norm: float
    each: bool = False
    skips: bool = False

    def factor(self, square: float) -> float:
        """What to multiply gradients with whose squares sum to `square`; NaN to leave them out."""
        if self.skips and not math.isfinite(square):
            return math.nan
        return min(1.0, self.norm / (math.sqrt(square) + 1e-6))


@dataclass(frozen=True)
class Apply:
    """An update. Without `grad_scale` the controller sends it, once all losses are known."""

    serial: int  # names it between the controller and its workers
    number: int  # of all mini-batches that were trained, from 1
    lr: float
    grad_scale: float | None
    clip: Clip | None


@dataclass(frozen=True)
class Batch(Apply):
    """A mini-batch, and its update, as one worker sees it. Sequences have an entry per micro-batch;
    what differs between stages is by stage. A replica sees its own rows, of what it takes part in.
    """

    samples: tuple[int, ...]
    feeds: Mapping[int, Sequence[Mapping[str, Array]]]
    loss_tangents: tuple[float, ...]
    seed: int
    lag: Mapping[int, Sequence[int]]  # updates between the version that a forward uses and the last
    ahead: Mapping[int, Sequence[int]]  # updates to come before the backward


@dataclass(frozen=True)
class Step:
    """Do a part of a schedule, which comes once per `script`.

    Numbers in it count from mini-batch `first`; `batch` is the mini-batch that begins with it.
    """

    serial: int
    script: int
    schedule: Schedule | None
    rows: tuple[int, ...]  # of the schedule, this worker's: one, or one per lane
    closing: Closing
    first: int
    microbatches: int  # per mini-batch
    begins: int  # the mini-batch that `batch` is
    batch: Apply  # a mini-batch, or an update by itself
    drain: bool  # wait until all is sent; else go on with the next part
    evaluates: bool  # forwards in evaluation


@dataclass(frozen=True)
class Scale:
    """What a mini-batch's gradients are multiplied with: by its counts, or to clip them."""

    serial: int
    clips: bool
    value: float


@dataclass(frozen=True)
class Call:
    """Run `module:function` with the device and `args`."""

    function: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Read:
    """Send the values of these slots."""

    stage: int
    role: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Write:
    """Take these values."""

    stage: int
    role: str
    values: Mapping[str, Array]


@dataclass(frozen=True)
class Stop:
    """Leave."""


# From a worker.


@dataclass(frozen=True)
class Reply:
    """The last command is done."""

    value: Any = None


@dataclass(frozen=True)
class Losses:
    """Every forward of a mini-batch is done: whether its losses are finite, and the counts that
    they are sums over, if they are sums."""

    serial: int
    finite: bool
    counts: tuple[float, ...] | None


@dataclass(frozen=True)
class Norm:
    """The sum of squares of the gradients that a worker has of a mini-batch."""

    serial: int
    square: float


News = Losses | Norm
"""What the controller must answer in the middle of a step."""


@dataclass(frozen=True)
class Beat:
    """Still here, and at what."""

    doing: str


@dataclass(frozen=True)
class Failure:
    """The worker's first error."""

    doing: str
    summary: str
    trace: str


@dataclass(frozen=True)
class StepReport:
    """What a worker says of a part of a schedule.

    Spans: lane, stage, operation and number of an action, start and end by time.monotonic; of
    transfers those that have ended. The rest is by stage.
    """

    losses: tuple[float, ...] | None
    counts: tuple[float, ...] | None
    spans: Sequence[tuple[int, int, str, int, float, float]]
    versions: Mapping[int, int]  # that the last forward used, counted in updates
    live_versions: Mapping[int, int]  # most at once
    memory: Mapping[int, tuple[int, int]]  # most micro-batches in flight, most bytes
