"""Generators: the order of passes on each worker, as pure functions; `generate` adds the rest.

A generator says only which forward or backward comes when. Transfers, tied parameters and the
update follow from that order, so they are added here, once, for every schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Op, Schedule
from hetpipe.schedule.validate import validate

Generator = Callable[[int, int, Sequence[int] | None], Schedule]
"""(stages, microbatches, in_flight per stage or None) -> per worker its passes in order.

An asynchronous one is given the micro-batches of several mini-batches as one number.
"""

Tied = Sequence[tuple[int, Sequence[int]]]
"""Parameters that stages share: (owner stage, the other stages)."""

_generators: dict[str, Generator] = {}
_asynchronous: set[str] = set()


def register_schedule(
    name: str, *, asynchronous: bool = False
) -> Callable[[Generator], Generator]:
    """Make a generator known as `name`; a decorator.

    An `asynchronous` schedule does not flush between mini-batches: each stage updates its weights
    as soon as it has done the last backward of a mini-batch. Raises `ScheduleError` if another generator has the name.
    """

    def register(generator: Generator) -> Generator:
        if _generators.setdefault(name, generator) is not generator:
            raise ScheduleError(f"schedule {name!r} is registered already; choose another name")
        if asynchronous:
            _asynchronous.add(name)
        return generator

    return register


def schedule_names() -> list[str]:
    """Names of the registered schedules, in order."""
    return sorted(_generators)


def is_asynchronous(name: str) -> bool:
    """Whether the schedule goes on from one mini-batch to the next without a flush."""
    return name in _asynchronous


@register_schedule("gpipe")
def gpipe(stages: int, microbatches: int, in_flight: Sequence[int] | None = None) -> Schedule:
    """All forwards, then all backwards (GPipe; here 3 stages, 3 micro-batches).

        0  F0 F1 F2  .  .  .  . B0 B1 B2
        1   . F0 F1 F2  .  . B0 B1 B2
        2   .  . F0 F1 F2 B0 B1 B2

    Every stage keeps all micro-batches. Backwards run in ascending order, as in the other
    schedules, so that gradients are summed in the same order and agree bit for bit.
    """
    if in_flight is not None and min(in_flight) < microbatches:
        raise ScheduleError(
            f"gpipe keeps all {microbatches} micro-batches in flight, but {min(in_flight)} is the "
            f"limit; use 1f1b or {min(in_flight)} micro-batches"
        )
    return one_f_one_b(stages, microbatches, [microbatches] * stages)


@register_schedule("1f1b")
def one_f_one_b(stages: int, microbatches: int, in_flight: Sequence[int] | None = None) -> Schedule:
    """Stage n starts with K_n forwards, then one backward, one forward, ...

        0  F0 F1 F2  .  .  .  . B0  - F3 B1  -  . B2  -  . B3  -
        1   . F0 F1  .  . B0  - F2 B1  - F3 B2  -  . B3  -  .  .
        2   .  . F0 B0  - F1 B1  - F2 B2  - F3 B3  -  .  .  .  .

    K_n = min(N-n, M) (DAPPLE, section 3, P_A; PipeDream's 1F1B with a flush), or what `in_flight`
    gives per stage. min(2(N-n)-1, M) (P_B) hides transfers and keeps about twice as much.
    """
    depth = in_flight or [stages - stage for stage in range(stages)]
    return tuple(
        tuple(_alternate(stage, microbatches, min(depth[stage], microbatches)))
        for stage in range(stages)
    )


@register_schedule("pipedream", asynchronous=True)
def pipedream(stages: int, microbatches: int, in_flight: Sequence[int] | None = None) -> Schedule:
    """1F1B without a flush (PipeDream, section 3.2; here 3 stages, mini-batches of 1 micro-batch).

        0  F0 F1 F2  .  .  .  . B0 U0 F3 B1 U1 F4 B2 U2 ...
        1   . F0 F1  .  . B0 U0 F2 B1 U1 F3 B2 U2 F4 ...
        2   .  . F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3 ...

    Without `in_flight` the depth is NOAM: N-n forwards in flight at stage n.
    """
    return one_f_one_b(stages, microbatches, in_flight)


def generate(
    name: str,
    stages: int,
    microbatches: int,
    *,
    in_flight: Sequence[int] | None = None,
    tied: Tied = (),
    mini_batches: int = 1,
) -> Schedule:
    """The complete, validated schedule: passes, transfers, tied parameters and updates.

    A receive stands before the pass that needs it, a send behind the pass that makes it. Between
    an owner and another stage all tied parameters travel together, as one message each way.
    `microbatches` are those of one mini-batch; of `mini_batches` an asynchronous schedule takes any
    number, the others one at a time. Raises `ScheduleError` for an unknown name, impossible numbers or an invalid schedule.
    """
    if name not in _generators:
        raise ScheduleError(f"no schedule {name!r}; known: {', '.join(schedule_names())}")
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
    pairs = _tied_pairs(stages, tied)
    if pairs and is_asynchronous(name):
        owner, other = pairs[0]
        raise ScheduleError(
            f"stages {owner} and {other} share parameters, which {name} would update at different "
            "times; cut so that one stage has them, or use a synchronous schedule"
        )
    passes = _generators[name](stages, microbatches * mini_batches, in_flight)
    if is_asynchronous(name):
        passes = tuple(tuple(_with_updates(row, microbatches)) for row in passes)
        schedule = tuple(tuple(_transfers(row, stages)) for row in passes)
    else:
        schedule = tuple(tuple(_complete(row, stages, pairs)) for row in passes)
    validate(schedule, microbatches, in_flight, mini_batches)
    return schedule


def max_in_flight(schedule: Schedule) -> list[int]:
    """Per stage, the most forwards that wait for their backward at any time."""
    waiting: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in (action for row in schedule for action in row):
        change = {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_WEIGHT: -1}.get(action.op, 0)
        waiting[action.stage] = waiting.get(action.stage, 0) + change
        most[action.stage] = max(most.get(action.stage, 0), waiting[action.stage])
    return [most[stage] for stage in sorted(most)]


def _alternate(stage: int, microbatches: int, depth: int) -> Iterator[Action]:
    for number in range(depth):
        yield Action(stage, Op.FORWARD, number)
    for number in range(microbatches):
        yield Action(stage, Op.BACKWARD, number)
        if number + depth < microbatches:
            yield Action(stage, Op.FORWARD, number + depth)


def _with_updates(row: Sequence[Action], microbatches: int) -> Iterator[Action]:
    """Each stage's update right behind the last of a mini-batch's backwards."""
    done: Counter[tuple[int, int]] = Counter()
    for action in row:
        yield action
        if action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            mini_batch = action.number // microbatches
            done[action.stage, mini_batch] += 1
            if done[action.stage, mini_batch] == microbatches:
                yield Action(action.stage, Op.UPDATE, mini_batch)


def _transfers(row: Sequence[Action], stages: int) -> Iterator[Action]:
    for action in row:
        yield from _with_transfers(action, stages)


def _complete(row: Sequence[Action], stages: int, pairs: list[tuple[int, int]]) -> Iterator[Action]:
    yield from _transfers(row, stages)
    for stage in dict.fromkeys(action.stage for action in row):
        yield from _finish(stage, pairs)


def _with_transfers(action: Action, stages: int) -> Iterator[Action]:
    first, last = action.stage == 0, action.stage == stages - 1
    forward = action.op is Op.FORWARD
    if action.op in (Op.UPDATE, Op.BACKWARD_WEIGHT):
        yield action
        return
    if not (first if forward else last):
        receive = Op.RECV_FORWARD if forward else Op.RECV_BACKWARD
        yield Action(action.stage, receive, action.number)
    yield action
    if not (last if forward else first):
        send = Op.SEND_FORWARD if forward else Op.SEND_BACKWARD
        yield Action(action.stage, send, action.number)


def _finish(stage: int, pairs: list[tuple[int, int]]) -> Iterator[Action]:
    """Sends before receives, on both sides of the update: a stage may own one, borrow another."""
    owners = [owner for owner, other in pairs if other == stage]
    others = [other for owner, other in pairs if owner == stage]
    yield from (Action(stage, Op.SEND_TIED_GRAD, owner) for owner in owners)
    yield from (Action(stage, Op.RECV_TIED_GRAD, other) for other in others)
    yield Action(stage, Op.UPDATE)
    yield from (Action(stage, Op.SEND_TIED_PARAM, other) for other in others)
    yield from (Action(stage, Op.RECV_TIED_PARAM, owner) for owner in owners)


def _tied_pairs(stages: int, tied: Tied) -> list[tuple[int, int]]:
    pairs = sorted({(owner, other) for owner, others in tied for other in others})
    for owner, other in pairs:
        if owner == other or not (0 <= owner < stages and 0 <= other < stages):
            raise ScheduleError(f"tied stages {owner} and {other}: need two of 0..{stages - 1}")
    return pairs
