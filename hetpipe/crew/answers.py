"""The controller's answers in the middle of a mini-batch, and the mini-batch's result (stations 13
and 16 of docs/life-of-a-micro-batch.md).

Only the controller knows all losses and all gradients. Workers report whether their losses are
finite, and the norms of their gradients. Updates wait for one factor, which all workers get.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from operator import attrgetter

import numpy as np

from hetpipe.capture.program import COUNT, LOSS, OUTPUT
from hetpipe.crew.request import Request, StepRequest, StepResult, WholeLoss
from hetpipe.schedule.action import Action, Op
from hetpipe.simulate.timeline import Span, Timeline
from hetpipe.wire.messages import Array, Losses, News, Norm, Scale, StepReport
from hetpipe.wire.shares import Replica


class Answers:
    """Computes the answers for the latest request. `reporters` has the number of workers that
    report losses (LOSS), counts (COUNT) and outputs (OUTPUT)."""

    def __init__(self, request: Request, reporters: Mapping[str, int], workers: int) -> None:
        self._request = request
        self._reporters, self._workers = reporters, workers
        self._losses: list[Losses] = []
        self._squares: list[float] = []
        self.culprit = ""  # a gradient that is not finite, so the update is left out
        self.skipped = False  # whether the update is left out
        self.gradient_norm: float | None = None  # before the clip, if gradients are clipped
        self.whole: WholeLoss | None = None  # the loss of the whole mini-batch, if it has one
        self.failure: Exception | None = None  # of the code that computes this loss

    def to(self, news: News) -> Scale | None:
        """Return the answer to all workers; None while reports are missing."""
        if isinstance(news, Losses):
            self._losses.append(news)
            if not self._all_reported():
                return None
            value = self._grad_scale()
            self._losses.clear()
        else:
            self._squares.append(news.square)
            clip = self._request.clip
            assert clip is not None
            if clip.undoes:  # otherwise the loss scale adapts, and no gradient is to blame
                self.culprit = self.culprit or news.culprit
            if len(self._squares) < self._workers:
                return None
            square = sum(self._squares)
            value = clip.factor(square)
            self.gradient_norm = math.sqrt(square) if clip.takes_norms else None
            self._squares.clear()
        self.skipped = math.isnan(value)
        return Scale(news.serial, not isinstance(news, Losses), value)

    def _all_reported(self) -> bool:
        request = self._request
        assert isinstance(request, StepRequest)
        losses = sum(report.finite is not None for report in self._losses)
        counts = sum(report.counts is not None for report in self._losses)
        outputs = sum(bool(report.outputs) for report in self._losses)
        return (
            (not request.guards or losses >= self._reporters[LOSS])
            and (request.grad_scale is not None or counts >= self._reporters[COUNT])
            and (request.whole_loss is None or outputs >= self._reporters[OUTPUT])
        )

    def _grad_scale(self) -> float:
        """Return the factor of the mini-batch's gradients; NaN to drop them."""
        request = self._request
        assert isinstance(request, StepRequest)
        if request.whole_loss is not None:
            return self._whole_scale(request, request.whole_loss)
        if request.guards and any(losses.finite is False for losses in self._losses):
            return math.nan
        if request.grad_scale is not None:
            return request.grad_scale
        total = sum(sum(losses.counts or ()) for losses in self._losses)
        if total == 0:  # there is no mean: a flush applies nothing, a stream applies zeros
            return math.nan if request.guards else 0.0
        return 1.0 / (total * request.loss_scale)

    def _whole_scale(
        self, request: StepRequest, loss: Callable[[Mapping[str, Array]], WholeLoss]
    ) -> float:
        """Compute the loss of the whole mini-batch, and return the factor of its gradients."""
        outputs = {k: part for losses in self._losses for k, part in losses.outputs.items()}
        try:
            self.whole = loss(_joined(outputs))
        except Exception as error:  # the workers finish, but do not update
            self.failure = error
            return math.nan
        count = 1.0 if self.whole.count is None else self.whole.count
        if count == 0 or not math.isfinite(self.whole.loss):
            return math.nan
        return 1.0 / (count * request.loss_scale)

    def feeds(self, news: News) -> StepRequest | None:
        """Return the request with the feeds that backwards wait for, once `to` has answered."""
        request = self._request
        if isinstance(news, Norm) or not isinstance(request, StepRequest):
            return None
        if request.whole_loss is None:
            return None
        return request if self.whole is None else replace(request, feeds=self.whole.feeds)


@dataclass(frozen=True)
class Posted:
    """A request that was handed out: the time, and the number of lanes of each member."""

    begin_s: float
    lanes: Mapping[str, int]


def result_of(
    reports: Sequence[StepReport],
    posted: Posted,
    origin_s: float,
    answers: Answers,
    clock_error_s: float,
) -> StepResult:
    """Combine the reports of all workers into a result, with times relative to `origin_s`."""
    culprits = [answers.culprit, *(report.culprit for report in reports)]
    firsts = accumulate(posted.lanes.values(), initial=0)
    spans = [
        Span(first + lane, Action(stage, Op(op), number), start_s - origin_s, end_s - origin_s)
        for first, report in zip(firsts, reports, strict=False)
        for lane, stage, op, number, start_s, end_s in report.spans
    ]
    spans.sort(key=attrgetter("worker", "start_s"))
    names = [
        member if count == 1 else f"{member} lane {lane}"
        for member, count in posted.lanes.items()
        for lane in range(count)
    ]
    losses = _sum_replicas([r.losses for r in reports if r.losses is not None])
    versions = {n: v for report in reports for n, v in report.versions.items()}
    live = {n: v for report in reports for n, v in report.live_versions.items()}
    held = {n: [r.memory[n] for r in reports if n in r.memory] for n in sorted(live)}
    result = StepResult(
        losses or (),
        _sum_replicas([r.counts for r in reports if r.counts is not None]),
        Timeline(tuple(names), tuple(spans), "measured", clock_error_s=clock_error_s),
        tuple(versions[n] for n in sorted(versions)),
        tuple(live[n] for n in sorted(live)),
        tuple(max(in_flight for in_flight, _ in replicas) for replicas in held.values()),
        tuple(max(nbytes for _, nbytes in replicas) for replicas in held.values()),
        answers.skipped,
        {
            member: report.device_nbytes
            for member, report in zip(posted.lanes, reports, strict=True)
            if report.device_nbytes is not None
        },
        next(filter(None, culprits), ""),
        answers.gradient_norm,
        _joined({replica: out for report in reports for replica, out in report.outputs.items()}),
        answers.failure,
    )
    return result if answers.whole is None else result.with_loss(answers.whole)


def _joined(parts: Mapping[Replica, Sequence[Mapping[str, Array]]]) -> dict[str, Array]:
    """Join the rows of replicas, and then of micro-batches, by number of the output's tensor."""
    found: dict[str, list[Array]] = {}
    replicas = [parts[replica] for replica in sorted(parts)]
    for micro_batch in zip_longest(*replicas, fillvalue=None):
        for by_number in micro_batch:
            for number, array in (by_number or {}).items():
                found.setdefault(number, []).append(array)
    return {number: np.concatenate(arrays) for number, arrays in found.items()}


def _sum_replicas(parts: Sequence[Sequence[float]]) -> tuple[float, ...] | None:
    """Sum over the replicas, per micro-batch; None if there are no parts."""
    return tuple(map(sum, zip(*parts, strict=True))) if parts else None
