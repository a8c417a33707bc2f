"""What the controller and its workers say to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hetpipe.capture.program import StageGraphs
from hetpipe.cluster.cluster import Link, Member
from hetpipe.schedule.action import Schedule

if TYPE_CHECKING:
    from hetpipe.engine.transport import Port
    from hetpipe.engine.wiring import Wire

Array = np.ndarray[Any, Any]

SCRIPTS = 16
"""Schedules that a worker remembers; the oldest goes first."""

# To a worker.


@dataclass(frozen=True)
class Open:
    """First message: who you are. `backend` is `module:Class`, None to ask the registry."""

    member: Member
    backend: str | None
    path: tuple[str, ...]  # sys.path of the controller
    heartbeat_s: float
    start_timeout_s: float
    rank: int
    world: int
    store: tuple[str, int] | None = None  # where processes meet for torch.distributed


@dataclass(frozen=True)
class EdgeEnd:
    """One end of a wire, at the worker that gets this."""

    wire: Wire
    port: Port
    link: Link
    fds: tuple[int, int]  # its own lie from .. to (excluded) among those of the message


@dataclass(frozen=True)
class Load:
    """Become a stage."""

    stage: StageGraphs
    values: Mapping[str, Array]
    state_init: Callable[..., Array]
    edges: tuple[EdgeEnd, ...]


@dataclass(frozen=True)
class Step:
    """Do one mini-batch. `schedule` comes once per `script`."""

    serial: int
    script: int
    schedule: Schedule | None
    samples: tuple[int, ...]
    feeds: Sequence[Mapping[str, Array]]
    loss_tangents: tuple[float, ...]
    lr: float
    number: int
    seed: int
    grad_scale: float | None


@dataclass(frozen=True)
class Scale:
    """The gradient scale of step `serial`, once the counts are known."""

    serial: int
    value: float


@dataclass(frozen=True)
class Call:
    """Run `module:function` with the device and `args`."""

    function: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Read:
    """Send the values of these slots."""

    role: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Write:
    """Take these values."""

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
class Counts:
    """Every forward of step `serial` is done; what its losses are sums over."""

    serial: int
    counts: tuple[float, ...]


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
    """What a worker says of a step. Spans: (index in its list, start, end), time.monotonic."""

    losses: tuple[float, ...] | None
    counts: tuple[float, ...] | None
    spans: Sequence[tuple[int, float, float]]
