"""Checks of groups: this process and another one, each with a device, sum tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from hetpipe.conformance.check import BrokenRule, NotAsked, check, expect
from hetpipe.conformance.peer import ANSWER_S, Other
from hetpipe.conformance.rig import Rig
from hetpipe.conformance.sums import Sum, join, sum_all
from hetpipe.sdk.backend import Group
from hetpipe.sdk.host.registry import devices_of
from hetpipe.sdk.info import DeviceInfo

DTYPES = ("float32", "float64", "float16")
"""Dtypes of gradients, except for bfloat16, whose arrays are never uploaded."""
SHAPES = ((), (0,), (3, 5), (600_001,), (2, 3, 4, 5), *((7 + n,) for n in range(40)))
"""Many small tensors, which a group may sum together, and one above a MiB in every dtype."""
LARGE = 1 << 21
"""Number of float32 elements: a sum of 8 MiB."""
SCALES = (1 / 3, -0.7)
HEAD_START_S = 1.0
"""Seconds for a device to answer that it joins no group; only then a second process starts."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Pair:
    """The device under test in a group with the device of another process."""

    rig: Rig
    group: Group
    other: Other

    def sum(self, *sums: Sum) -> tuple[list[str], list[str]]:
        """Check the sums in both processes, and return the digests of both."""
        with self.other.during("sum", sums=[asdict(each) for each in sums]) as answer:
            digests = sum_all(self.rig, self.group, 0, sums)
        return digests, answer[0]


@contextmanager
def _joined(rig: Rig) -> Iterator[_Pair]:
    """Join a group of two. Raises `NotAsked` if the device joins none."""
    partner = partner_of(rig.info)
    alone = partner == rig.info.id
    with TemporaryDirectory(prefix="hetpipe-groups-") as folder:
        joining = _start(lambda: join(rig, Path(folder), 0, alone))
        with suppress(FutureTimeoutError):
            _require(joining.result(HEAD_START_S))
        with Other(rig, partner) as other:
            with other.during("join", folder=folder, alone=alone):
                try:
                    group = _require(joining.result(ANSWER_S))
                except FutureTimeoutError:
                    late = f"join_group has not returned after {ANSWER_S:.0f} s"
                    raise BrokenRule(late) from None
            yield _Pair(rig, group, other)


def partner_of(info: DeviceInfo) -> str:
    """Return the id of a similar device of the backend with another memory, or the device's own."""
    others = [
        other.id
        for other in devices_of(info.backend)
        if other.kind == info.kind and other.memory_domain != info.memory_domain
    ]
    return [*others, info.id][0]


def _start(work: Callable[[], Result]) -> Future[Result]:
    """Start work in a thread that does not keep the process alive, because it may wait forever."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="join a group", daemon=True).start()
    return future


def _require(group: Group | None) -> Group:
    if group is None:
        raise NotAsked("the device joins no group: the host sums")
    return group


def _forms(rig: Rig, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return tensors of these shapes, in the dtypes of gradients that the device has."""
    dtypes = [dtype for dtype in DTYPES if dtype in rig.info.dtypes]
    if not dtypes:
        raise NotAsked("the device has no dtype of gradients")
    return tuple((dtype, shape) for shape in shapes for dtype in dtypes)


@check(
    "groups/sums",
    "a result is the sum of the devices' terms, with their shape and dtype",
    "a tensor that is left out, or summed in another dtype or with another tensor",
)
def _(rig: Rig) -> None:
    with _joined(rig) as pair:
        pair.sum(Sum(_forms(rig, SHAPES)))


@check(
    "groups/scale",
    "`scale` multiplies the terms of its device, and no others",
    "a factor that is forgotten, or that multiplies the sum",
)
def _(rig: Rig) -> None:
    with _joined(rig) as pair:
        pair.sum(Sum(_forms(rig, SHAPES), SCALES))


@check(
    "groups/same bits",
    "all devices of a group get the same bits",
    "a device that does not round its product as others do, or that adds in another order",
)
def _(rig: Rig) -> None:
    forms = _forms(rig, SHAPES)
    with _joined(rig) as pair:
        here, there = pair.sum(Sum(forms, SCALES))
    unequal = [
        f"{dtype}{list(shape)}"
        for (dtype, shape), *digests in zip(forms, here, there, strict=True)
        if digests[0] != digests[1]
    ]
    expect(
        not unequal,
        f"{len(unequal)} of {len(forms)} sums have other bits in the other process, such as "
        f"{unequal[:1]}",
    )


@check(
    "groups/events",
    "the event of a sum happens when its results are complete",
    "a racy event, which happens before the sum has ended",
)
def _(rig: Rig) -> None:
    with _joined(rig) as pair:
        for turn in range(4):
            pair.sum(Sum((("float32", (LARGE,)),), SCALES, turn))


@check(
    "groups/several sums",
    "sums that are started one after another keep their order and their results",
    "memory of a result that the next sum uses, or sums that overtake each other",
)
def _(rig: Rig) -> None:
    forms = _forms(rig, ((3, 5), (600_001,), (7,)))
    with _joined(rig) as pair:
        pair.sum(*(Sum(forms, SCALES, turn) for turn in range(6)))
