"""The engine's part of an action: the seconds beyond the device's program.

A worker that has waited for its device finds little of its data in the caches of its core. So the
measurement runs a product as long as a probe's product, and not the smallest program.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.capture.program import INPUT, LOSS, PassPrograms, Program, Slot, StageGraphs
from hetpipe.crew.crew import Crew
from hetpipe.crew.request import StepRequest
from hetpipe.profile.clock import Samples
from hetpipe.schedule.action import Action, Op
from hetpipe.sdk.graph import canonical

ACTIONS = 12
WARM_UP = 2  # actions that do not count


def engine_s(crew: Crew, orders: Mapping[str, int]) -> dict[str, float]:
    """Return, by member, the seconds from one forward to the next, without its program.

    `orders` are the rows of a product's matrices. 0 for a device without products.
    """
    return {member: _beyond_s(crew, member, order) for member, order in orders.items()}


def _beyond_s(crew: Crew, member: str, order: int) -> float:
    stage = product_stage(order)
    arguments = {member: (stage, crew.emulations[member])}
    times_s: list[float] | str
    times_s = crew.call_each("hetpipe.profile.profiler:smallest", arguments)[member]
    if isinstance(times_s, str):
        return 0.0
    crew.load([stage], [member], {})
    request = StepRequest(
        schedule=(tuple(Action(0, Op.FORWARD, number) for number in range(ACTIONS)),),
        samples=(1,) * ACTIONS,
        feeds=({"x": np.zeros((1, order * order), np.float32)},) * ACTIONS,
        loss_tangents=(1.0,) * ACTIONS,
        lr=0.0,
        number=1,
        seed=0,
        grad_scale=1.0,
    )
    starts_s = [span.start_s for span in crew.step(request).timeline.spans]
    between = Samples.of(after - before for before, after in pairwise(starts_s[WARM_UP:]))
    between.check(f"{member} ({crew.infos[member].id}): a forward")
    return max(between.median_s - statistics.median(times_s), 0.0)


@cache
def product_stage(order: int) -> StageGraphs:
    """Return a stage that squares its input, a matrix of `order` rows."""

    def body(x: torch.Tensor) -> tuple[Any, ...]:
        square = x.reshape(order, order)
        return (torch.sum(square @ square, (0, 1)),)

    graph = canonical(make_fx(body)(torch.zeros(1, order * order)))
    entering = Slot(INPUT, "x", (1, order * order), "float32")
    forward = Program(graph, (entering,), (Slot(LOSS, "loss", (), "float32"),))
    return StageGraphs(stage=0, passes={1: PassPrograms(1, forward, None)})
