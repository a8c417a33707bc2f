"""The messages between the controller and its workers (stations 3, 13 and 15 of
docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hetpipe.cluster.member import BackendOptions, Member
from hetpipe.schedule.action import Schedule
from hetpipe.schedule.complete import Closing
from hetpipe.schedule.weights import FLUSH, WeightPolicy

if TYPE_CHECKING:
    from hetpipe.capture.program import StageGraphs
    from hetpipe.wire.shares import Drawn, Replica, Shares
    from hetpipe.wire.wire import Content

Array = np.ndarray[Any, Any]

Feeds = Mapping[int, Sequence[Mapping[str, Array]]]
"""The leaves that a worker's stages read, by stage, micro-batch and name."""

SCRIPTS = 16
"""Number of schedules that a worker remembers; it forgets the oldest first."""

# To a worker.


@dataclass(frozen=True)
class Meeting:
    """The place where processes meet before they talk: a transport's module, and (host, port)."""

    module: str
    address: tuple[str, int]


STATUS = struct.Struct("<i")
"""At a worker's start, its process id; at its end, its exit status, or minus the number of the
signal that killed it."""


@dataclass(frozen=True)
class Fork:
    """To a fork server: a request for a worker.

    The message carries descriptors: the worker's channel, the controller's standard output and
    error, and a pipe for one `STATUS` at the worker's start and one at its end.
    """

    cores: tuple[int, ...]
    folder: str
    path: tuple[str, ...]  # Python's search path for modules
    variables: dict[str, str]  # the whole environment


@dataclass(frozen=True)
class Open:
    """The first message: the worker's member, rank and meeting place.

    `backend` is `module:Class`; None if the registry has the backend. The backend gets the
    `options`. `shares_core` says whether other workers may run on the worker's cores.
    """

    member: Member
    backend: str | None
    heartbeat_s: float
    start_timeout_s: float
    rank: int
    world: int
    shares_core: bool = False
    meeting: Meeting | None = None
    options: BackendOptions | None = None


@dataclass(frozen=True)
class Keep:
    """How versions of weights are kept (`hetpipe.worker.weights`), and the updates so far."""

    policy: WeightPolicy = FLUSH
    updates: tuple[int, ...] = ()  # of each stage; empty before the first update
    rates: Mapping[str, float] = field(default_factory=dict)  # learning rates of the last update
    check_finite: bool = False  # check the outputs of every pass
    # Gradients exist only from backward to update, which needs one backward per update.
    late_gradients: bool = False


@dataclass(frozen=True)
class StageLoad:
    """A stage. Parameters and buffers that are not `held` follow in `Write`s."""

    graphs: StageGraphs
    replica: int
    held: tuple[tuple[str, str], ...] = ()  # role and name of values that the worker has already


@dataclass(frozen=True)
class Load:
    """Prepare to load these stages. `Begin` frees earlier stages, except the stages in `stay`.

    The reply says which stages the device cannot run; nothing changes before `Begin`.
    """

    stages: tuple[StageLoad, ...]
    keep: Keep
    state_init: Callable[..., Array]
    shares: Shares
    stay: tuple[int, ...] = ()
    groups: Mapping[int, str] = field(default_factory=dict)
    """By stage, the folder where its replicas meet to sum gradients without the host."""


@dataclass(frozen=True)
class Begin:
    """Load the stages of the last `Load`, or forget them if a worker cannot run its stages."""

    loads: bool


@dataclass(frozen=True)
class Clip:
    """Scale gradients so that their norm is at most `norm`, for all stages together or for `each`.

    With `skips`, an update is left out if its gradients are not all finite; with `undoes`, the
    buffers are restored as well. Without `skips`, such gradients are applied and reported. With an
    infinite `norm` nothing is clipped, so stages sum the gradients instead of the squares. If a
    gradient is not finite, neither is the sum.
    """

    norm: float
    each: bool = False
    skips: bool = False
    undoes: bool = False

    @property
    def takes_norms(self) -> bool:
        """Whether gradients are clipped, not only checked."""
        return self.norm < math.inf

    def factor(self, square: float) -> float:
        """Return the factor for gradients whose squares sum to `square`; NaN to skip the update."""
        if self.skips and not math.isfinite(square):
            return math.nan
        if not self.takes_norms:
            return 1.0
        return min(1.0, self.norm / (math.sqrt(square) + 1e-6))


@dataclass(frozen=True)
class Apply:
    """An update. If `grad_scale` is None, a `Scale` follows when the controller has all losses."""

    serial: int  # identifies the update
    number: int  # number of the trained mini-batch, from 1
    rates: Mapping[str, float]  # learning rates by the scalar's name
    grad_scale: float | None
    clip: Clip | None


@dataclass(frozen=True)
class Batch(Apply):
    """A mini-batch and its update, for one worker.

    Sequences have an entry for each micro-batch, mappings an entry for each stage. `feeds` contain
    only the rows that the worker's replica computes.
    """

    samples: tuple[int, ...]
    feeds: Feeds
    loss_tangents: tuple[float, ...]
    seed: int
    guards: bool  # updates wait until losses are known to be finite
    counted: bool  # losses are sums
    awaits: bool  # backwards of the last stage wait for the mini-batch's loss
    lag: Mapping[int, Sequence[int]]  # age of a forward's version, in updates
    ahead: Mapping[int, Sequence[int]]  # updates by which a forward predicts ahead
    fed: int = 0  # the number of the `Feed` that has the feeds instead
    drawn: Drawn | None = None  # the worker's source has the feeds instead


@dataclass(frozen=True)
class Step:
    """Run a part of a schedule. The schedule itself, and its `closing`, come only the first time
    that `script` runs.

    The schedule's numbers are relative to mini-batch `first` of the stream. The part begins with
    `batch`, mini-batch number `begins` of the stream.
    """

    serial: int
    script: int
    schedule: Schedule | None
    rows: tuple[int, ...]  # this worker's rows of the schedule: one per lane
    closing: Closing
    first: int
    microbatches: int  # per mini-batch
    begins: int  # the number of `batch` in the stream
    batch: Apply  # a mini-batch, or only an update
    drain: bool  # wait until all messages are sent
    forwards: Content  # which forwards run: of training, evaluation or inference
    keeps_output: bool  # report the model's output


@dataclass(frozen=True)
class Feed:
    """The feeds of a later `Batch`, by its number in `fed`; a worker keeps the latest two."""

    number: int
    feeds: Feeds


@dataclass(frozen=True)
class Speed:
    """Set the emulated speed from the next action on. The worker does not reply."""

    value: float


@dataclass(frozen=True)
class Scale:
    """A factor for a mini-batch's gradients: it makes them a mean or, if `clips`, clips them."""

    serial: int
    clips: bool
    value: float
    feeds: Mapping[int, Sequence[Mapping[str, Array]]] = field(default_factory=dict)
    """The gradients of the mini-batch's loss, by stage and micro-batch, if backwards await it."""


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
    """Replace the values of these slots."""

    stage: int
    role: str
    values: Mapping[str, Array]


@dataclass(frozen=True)
class Swap:
    """Exchange the values of the slots of each pair; a slot is a role and a name."""

    stage: int
    pairs: tuple[tuple[tuple[str, str], tuple[str, str]], ...]


@dataclass(frozen=True)
class Stop:
    """End the worker."""


# From a worker.


@dataclass(frozen=True)
class Reply:
    """The last command is done."""

    value: Any = None


@dataclass(frozen=True)
class Losses:
    """A stage has done all its forwards of a mini-batch.

    If updates wait for the losses, the stage that computes the loss says whether all losses are
    finite. If losses are sums, the stage that computes the counts (perhaps another stage) reports
    the counts. If the mini-batch has one loss, each replica of the last stage reports its outputs.
    """

    serial: int
    finite: bool | None
    counts: tuple[float, ...] | None
    outputs: Mapping[Replica, Sequence[Mapping[str, Array]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Norm:
    """The sum of the squares of a worker's gradients of a mini-batch or, without a clip, the sum of
    the gradients; see `Clip`.

    `culprit` names a gradient that is not finite.
    """

    serial: int
    square: float
    culprit: str = ""


News = Losses | Norm
"""Messages that the controller answers in the middle of a step."""


@dataclass(frozen=True)
class Beat:
    """A sign of life, with the worker's present action."""

    doing: str


@dataclass(frozen=True)
class Failure:
    """The worker's first error."""

    doing: str
    summary: str
    trace: str


@dataclass(frozen=True)
class StepReport:
    """The results of a worker for a part of a schedule.

    A span has an action's lane, stage, operation and number, then its start and end by
    `time.monotonic`. A transfer is reported once it has ended. The keys of mappings are stages.
    """

    losses: tuple[float, ...] | None
    counts: tuple[float, ...] | None
    spans: Sequence[tuple[int, int, str, int, float, float]]
    versions: Mapping[int, int]  # of the last forward, counted in updates
    live_versions: Mapping[int, int]  # most versions at once
    memory: Mapping[int, tuple[int, int]]  # most micro-batches in flight, and most bytes
    device_nbytes: int | None  # in use now, by the device's own count
    culprit: str = ""  # a gradient that was applied and is not finite
    outputs: Mapping[Replica, Sequence[Mapping[str, Array]]] = field(default_factory=dict)
    """The tensors of the model's output, by micro-batch and number."""
