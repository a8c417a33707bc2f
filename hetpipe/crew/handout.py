"""Makes a worker's part of a request, and remembers the schedules that workers have (stations 2 and
3 of docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.crew.assembly import Assembly
from hetpipe.crew.request import Request, UpdateRequest
from hetpipe.schedule.action import Schedule
from hetpipe.wire import messages as say
from hetpipe.wire.shares import Replica


def batch_of(
    request: Request, serial: int, own: Sequence[Replica], assembly: Assembly
) -> say.Apply:
    """Return a worker's part of a request. `own` are its replicas that take part."""
    if isinstance(request, UpdateRequest):
        return say.Apply(serial, request.number, request.lr, request.grad_scale, request.clip)
    none = (0,) * len(request.samples)
    return say.Batch(
        serial=serial,
        number=request.number,
        lr=request.lr,
        grad_scale=None if request.guards else request.grad_scale,
        clip=request.clip,
        samples=request.samples,
        feeds={r.stage: assembly.feeds_of(r, request.feeds, request.samples) for r in own},
        loss_tangents=request.loss_tangents,
        seed=request.seed,
        guards=request.guards,
        counted=assembly.has_count,
        lag={n: request.lag.get(n, none) for n, _ in own},
        ahead={n: request.ahead.get(n, none) for n, _ in own},
    )


class Scripts:
    """The schedules that workers have, by number. Both sides forget the oldest first."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, Schedule]] = {}  # by identity, which is kept alive

    def send(self, schedule: Schedule, serial: int) -> tuple[int, Schedule | None]:
        """Return the schedule's number, and the schedule itself if the workers lack it."""
        if (sent := self._sent.get(id(schedule))) is not None:
            return sent[0], None
        if len(self._sent) >= say.SCRIPTS:
            self._sent.pop(next(iter(self._sent)))
        self._sent[id(schedule)] = (serial, schedule)
        return serial, schedule

    def clear(self) -> None:
        """Forget all schedules, since workers have other stages now."""
        self._sent.clear()
