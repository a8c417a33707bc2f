"""Generators: the order of passes on each worker, as pure functions; `generate` adds the rest.

A generator says only which forward or backward comes when. Transfers, tied parameters and the
update follow from that order, so they are added here, once, for every schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Op, Schedule
from hetpipe.schedule.asp import asp, one_by_one
from hetpipe.schedule.complete import Tied, flushed, tied_pairs, with_transfers, with_updates
from hetpipe.schedule.fbp import fbp
from hetpipe.schedule.interleaved import interleaved
from hetpipe.schedule.lanes import laned_stages
from hetpipe.schedule.straight import (
    data_parallel,
    gpipe,
    naive,
    one_f_one_b,
    one_f_one_b_sno,
    one_f_one_b_so,
    pipedream,
)
from hetpipe.schedule.turns import in_turn, noam
from hetpipe.schedule.validate import validate
from hetpipe.schedule.zerobubble import zb_h1, zb_v

Generator = TypeVar("Generator", bound=Callable[..., Schedule])
"""(stages, microbatches, in_flight per stage or None) -> per worker its passes in order.

An asynchronous one is given the micro-batches of several mini-batches as one number; a chunked one
the number of workers as well.
"""


_generators: dict[str, Callable[..., Schedule]] = {}
_asynchronous: set[str] = set()
_chunked: set[str] = set()
_one_by_one = {"asp"}  # replicas apply the gradient of each mini-batch by itself


def register_schedule(
    name: str, *, asynchronous: bool = False, chunked: bool = False
) -> Callable[[Generator], Generator]:
    """Make a generator known as `name`; a decorator.

    An `asynchronous` schedule does not flush between mini-batches: each stage updates its weights
    as soon as it has done the last backward of a mini-batch. A `chunked` one may give a worker
    several stages. Raises `ScheduleError` if another generator has the name.
    """

    def register(generator: Generator) -> Generator:
        if _generators.setdefault(name, generator) is not generator:
            raise ScheduleError(f"schedule {name!r} is registered already; choose another name")
        if asynchronous:
            _asynchronous.add(name)
        if chunked:
            _chunked.add(name)
        return generator

    return register


register_schedule("naive")(naive)
register_schedule("gpipe")(gpipe)
register_schedule("1f1b")(one_f_one_b)
register_schedule("1f1b-sno")(one_f_one_b_sno)
register_schedule("1f1b-as")(one_f_one_b_sno)
register_schedule("1f1b-so")(one_f_one_b_so)
register_schedule("fbp")(fbp)
register_schedule("zb-h1")(zb_h1)
register_schedule("zb-v", chunked=True)(zb_v)
register_schedule("interleaved", chunked=True)(interleaved)
register_schedule("data-parallel", chunked=True)(data_parallel)
register_schedule("pipedream", asynchronous=True)(pipedream)
register_schedule("asp", asynchronous=True)(asp)


def schedule_names() -> list[str]:
    """Names of the registered schedules, in order."""
    return sorted(_generators)


def is_asynchronous(name: str) -> bool:
    """Whether the schedule goes on from one mini-batch to the next without a flush."""
    return name in _asynchronous


def is_chunked(name: str) -> bool:
    """Whether the schedule may give a worker several stages."""
    return name in _chunked


def averages(name: str) -> bool:
    """Whether replicas apply the mean of a round's gradients, not each mini-batch's by itself."""
    return name not in _one_by_one


def mini_batches_per_update(name: str, replicas: Sequence[int]) -> tuple[int, ...]:
    """Of each stage: without flushes those of a round, unless each is applied by itself."""
    return tuple(count if is_asynchronous(name) and averages(name) else 1 for count in replicas)


def generate(
    name: str,
    stages: int,
    microbatches: int,
    *,
    in_flight: Sequence[int] | None = None,
    tied: Tied = (),
    mini_batches: int = 1,
    workers: int | None = None,
    replicas: Sequence[int] = (),
) -> Schedule:
    """The complete, validated schedule: passes, transfers, tied parameters and updates.

    A receive stands before the pass that needs it, a send behind the pass that makes it. Between
    an owner and another stage all tied parameters travel together, as one message each way.
    `microbatches` are those of one mini-batch; of `mini_batches` an asynchronous schedule takes any
    number, the others one at a time. `workers`: as many as stages unless the schedule is chunked.
    `replicas` of each stage (default 1) all do the stage's row; without flushes they take turns and
    have a row each, see `hetpipe.schedule.turns`; `in_flight` is of each replica.
    Raises `ScheduleError` for an unknown name, impossible numbers or an invalid schedule.
    """
    if name not in _generators:
        raise ScheduleError(f"no schedule {name!r}; known: {', '.join(schedule_names())}")
    workers = stages if workers is None else workers
    _check_numbers(name, stages, microbatches, in_flight, mini_batches, workers)
    pairs = tied_pairs(stages, tied)
    if pairs and is_asynchronous(name):
        owner, other = pairs[0]
        raise ScheduleError(
            f"stages {owner} and {other} share parameters, which {name} would update at different "
            "times; cut so that one stage has them, or use a synchronous schedule"
        )
    more = (workers,) if is_chunked(name) else ()
    if is_asynchronous(name) and max(replicas, default=1) > 1:
        depths = in_flight or noam(replicas)
        if averages(name):
            rows = in_turn(
                lambda count: _generators[name](stages, count, depths, *more),
                microbatches,
                mini_batches,
                replicas,
            )
        else:
            passes = _generators[name](stages, microbatches * mini_batches, depths, *more)
            rows = one_by_one(passes, microbatches, mini_batches, replicas[0])
        schedule = tuple(tuple(with_transfers(row, stages)) for row in rows)
        validate(schedule, microbatches, in_flight, mini_batches, replicas)
        return schedule
    passes = _generators[name](stages, microbatches * mini_batches, in_flight, *more)
    if is_asynchronous(name):
        updated = (list(with_updates(row, microbatches)) for row in passes)
        schedule = tuple(tuple(with_transfers(row, stages)) for row in updated)
    else:
        schedule = tuple(tuple(flushed(row, stages, pairs, replicas)) for row in passes)
    validate(schedule, microbatches, in_flight, mini_batches)
    return schedule


def max_in_flight(schedule: Schedule) -> list[int]:
    """Per stage, the most forwards that wait for their backward at any time.

    A backward in halves ends with the second, the gradients of the weights. Where backwards are on
    another lane, a place is free when the forwards' lane hears of it.
    """
    laned = laned_stages(schedule)
    waiting: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in (action for row in schedule for action in row):
        ends = (Op.RECV_VACANT,) if action.stage in laned else (Op.BACKWARD, Op.BACKWARD_WEIGHT)
        change = (action.op is Op.FORWARD) - (action.op in ends)
        waiting[action.stage] = waiting.get(action.stage, 0) + change
        most[action.stage] = max(most.get(action.stage, 0), waiting[action.stage])
    return [most[stage] for stage in sorted(most)]


def _check_numbers(
    name: str,
    stages: int,
    microbatches: int,
    in_flight: Sequence[int] | None,
    mini_batches: int,
    workers: int,
) -> None:
    if stages < 1 or microbatches < 1:
        raise ScheduleError(
            f"{stages} stages, {microbatches} micro-batches: each must be 1 or more"
        )
    if in_flight is not None and (len(in_flight) != stages or min(in_flight) < 1):
        raise ScheduleError(
            f"in_flight {list(in_flight)}: give one number, at least 1, for each of {stages} stages"
        )
    if mini_batches < 1 or (mini_batches > 1 and not is_asynchronous(name)):
        raise ScheduleError(
            f"{mini_batches} mini-batches: {name} flushes behind each, so it takes one at a time"
            if mini_batches > 1
            else f"{mini_batches} mini-batches: must be 1 or more"
        )
    if workers != stages and not (is_chunked(name) and 1 <= workers <= stages):
        raise ScheduleError(
            f"{stages} stages on {workers} workers: {name} takes "
            + ("from one stage per worker up" if is_chunked(name) else "one stage per worker")
        )
