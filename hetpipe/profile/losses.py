"""Prices a loss over whole mini-batches, which runs in the controller's process.

The way of outputs and gradients is measured as training uses it: a stage reports an output of some
bytes, and its backward waits for a gradient of as many bytes. The way to a board is modelled by the
board's link to the host. The loss runs with the example.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np
import torch
from torch import fx

import hetpipe
from hetpipe.capture.captured import Captured
from hetpipe.capture.program import (
    GRAD,
    INPUT,
    LOSS,
    OUTPUT,
    PassPrograms,
    Program,
    Slot,
    StageGraphs,
)
from hetpipe.capture.whole_loss import WholeLossCaptured
from hetpipe.cost.board import board
from hetpipe.cost.loss import LossCost
from hetpipe.cost.table import CostTable, LinkCost
from hetpipe.crew.crew import Crew
from hetpipe.crew.request import StepRequest, WholeLoss
from hetpipe.errors import CostError
from hetpipe.profile import cache
from hetpipe.profile.clock import Samples
from hetpipe.profile.links import NBYTES, ROUNDS, WARM_UP, fit_link
from hetpipe.profile.stored import LastingNames
from hetpipe.schedule.action import Action, Op
from hetpipe.sdk.graph import canonical

RUNS = 5  # of the loss, after a first one
Tables = Callable[[Sequence[int]], dict[int, CostTable]]


class LossPrices:
    """Adds the price of the loss to tables, if a training has such a loss. Measures it when tables
    are first asked for."""

    def __init__(self, captured: Captured, crew: Crew) -> None:
        self._captured, self._crew = captured, crew
        self._costs: dict[str, LossCost] = {}

    def added(self, tables: Tables) -> Tables:
        """Return `tables`, with the price in each table."""
        captured = self._captured
        if not isinstance(captured, WholeLossCaptured) or not captured.trains:
            return tables

        def priced(sizes: Sequence[int]) -> dict[int, CostTable]:
            found = tables(sizes)
            if found and not self._costs:
                self._costs = _costs(captured, self._crew)
            return {size: replace(t, whole_loss=self._costs) for size, t in found.items()}

        return priced


def _costs(captured: WholeLossCaptured, crew: Crew) -> dict[str, LossCost]:
    """Return the price by member, if the member has the last stage."""
    loss_s, nbytes = _loss_s(captured), captured.nbytes
    links = {member: host_link(crew, member) for member in crew.infos}
    ways_s = {member: link.time_s(nbytes) for member, link in links.items()}
    return {
        member: LossCost(captured.example.samples, way_s, loss_s, way_s, links[member].label)
        for member, way_s in ways_s.items()
    }


def _loss_s(captured: WholeLossCaptured) -> float:
    """Return the median seconds of the loss of the example, in training with its gradients."""
    times_s = []
    for _ in range(1 + RUNS):
        begin_s = time.perf_counter()
        captured.try_loss()
        times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s[1:])


def host_link(crew: Crew, member: str) -> LinkCost:
    """Return the link between a member and the controller's process, the same in both directions.

    A measured link is kept on the disk.
    """
    (own,) = (each for each in crew.cluster.members if each.id == member)
    if own.board:
        described = board(own.board)
        return LinkCost(described.launch_s, described.host_Bps, "modelled")
    entry = cache.key(
        {
            "host link": LastingNames(crew).facts(member),
            "versions": [hetpipe.__version__, torch.__version__],
        }
    )
    if (stored := cache.load(entry)) is None:
        stored = asdict(fit_link([_one_way_s(crew, member, n) for n in NBYTES], "measured"))
        cache.store(entry, stored)
    return LinkCost(**{**stored, "media": ()})


def _one_way_s(crew: Crew, member: str, nbytes: int) -> float:
    """Return half of the median seconds in which an output travels, and then its gradient."""
    count = nbytes // 4
    stage = _stage(count)
    argument = {member: (stage, crew.emulations[member])}
    forwards_s: list[float] | str
    forwards_s = crew.call_each("hetpipe.profile.profiler:smallest", argument)[member]
    if isinstance(forwards_s, str):
        raise CostError(
            f"{member} ({crew.infos[member].id}) cannot run the graph that measures its way to the "
            f"host: {forwards_s}; leave it out"
        )
    crew.load([stage], [member], {})
    gradient = {"g": np.zeros((1, count), np.float32)}
    request = StepRequest(
        schedule=((Action(0, Op.FORWARD), Action(0, Op.LOSS), Action(0, Op.BACKWARD)),),
        samples=(1,),
        feeds=({"x": np.zeros((1, 1), np.float32), **gradient},),
        loss_tangents=(1.0,),
        rates={},
        number=1,
        whole_loss=lambda outputs: WholeLoss(0.0, None, (gradient,)),
    )
    whole_s, waits_s = [], []
    for _ in range(ROUNDS):
        spans = {span.action.op: span for span in crew.step(request).timeline.spans}
        whole_s.append(spans[Op.BACKWARD].end_s - spans[Op.FORWARD].start_s)
        waits_s.append(spans[Op.LOSS].end_s - spans[Op.LOSS].start_s)
    whole, wait = Samples.of(whole_s[WARM_UP:]), Samples.of(waits_s[WARM_UP:])
    for samples in (whole, wait):
        samples.check(f"{member}: an output of {nbytes} bytes, and its gradient")
    # If other work has disturbed the forwards alone, the wait is the better lower bound.
    return max(whole.median_s - statistics.median(forwards_s), wait.median_s) / 2


def _stage(count: int) -> StageGraphs:
    """Return a stage with an output of `count` floats. Its backward reads as many, and adds only
    the first of them to a gradient."""
    x, g = Slot(INPUT, "x", (1, 1), "float32"), Slot(INPUT, "g", (1, count), "float32")
    out, loss = Slot(OUTPUT, "0", (1, count), "float32"), Slot(LOSS, "loss", (), "float32")
    grad = Slot(GRAD, "w", (1,), "float32")
    aten, forward, backward = torch.ops.aten, fx.Graph(), fx.Graph()
    given = forward.placeholder("x")
    wide = forward.call_function(aten.expand.default, (given, [1, count]))
    made = forward.call_function(aten.neg.default, (wide,))
    total = forward.call_function(aten.sum.dim_IntList, (given, [0, 1]))
    late, before = backward.placeholder("g"), backward.placeholder("w")
    one = backward.call_function(aten.select.int, (late, 1, 0))
    after = backward.call_function(aten.add.Tensor, (before, one))
    for node, shape in (
        (given, (1, 1)), (wide, (1, count)), (made, (1, count)), (total, ()),
        (late, (1, count)), (before, (1,)), (one, (1,)), (after, (1,)),
    ):  # fmt: skip
        node.meta["val"] = torch.empty(shape, device="meta")
    forward.output((made, total))
    backward.output((after,))
    passes = PassPrograms(
        1,
        Program(canonical(forward), (x,), (out, loss)),
        Program(canonical(backward), (g, grad), (grad,)),
    )
    return StageGraphs(stage=0, passes={1: passes})
