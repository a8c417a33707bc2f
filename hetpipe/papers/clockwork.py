"""Schedules on devices that only sleep: `python -m hetpipe.papers.clockwork`.

The table has four times for each schedule: measured on workers; by the closed formula of its paper,
if there is one; simulated with the set times of devices and links; and simulated, like plans, with
measured times of passes and transfers ("profiled"). A forward takes 10 ms, a backward 20 ms, a
transfer 0, 5 or 15 ms. Two passes at the same time share the device's speed. `16 chunks` means
devices that report a result in 16 chunks while they compute it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.cluster.topology import Link
from hetpipe.crew.crew import Crew
from hetpipe.papers.overhead import empty_request, load_empty
from hetpipe.papers.sleeping import SleepingBackend
from hetpipe.pipeline.schedules import Streaming
from hetpipe.report.tables import Table, console
from hetpipe.schedule.action import Op
from hetpipe.schedule.generators import generate
from hetpipe.schedule.stream import Stream
from hetpipe.schedule.weights import STASH
from hetpipe.sdk.host.registry import register_backend
from hetpipe.simulate.simulator import simulate
from hetpipe.simulate.timeline import Span, Timeline
from hetpipe.simulate.times import StageTimes, Transfer
from hetpipe.wire.messages import Keep

FORWARD_S, BACKWARD_S = 0.010, 0.020
TRANSFERS_S = (0.0, 0.005, 0.015)
STAGES = (2, 3, 4)
MICROBATCHES = 8
MINI_BATCHES = 88  # in a stream
SETTLE = 12  # mini-batches before and after the steady state
WINDOW = 12  # mini-batches whose mean interval is taken; a multiple of every number of stages
ROUNDS = 5
SYNCHRONOUS = ("naive", "gpipe", "1f1b-sno", "1f1b-so", "fbp")
CHUNKS = 16
CHUNKED = ("1f1b-as", "fbp")


@dataclass(frozen=True)
class ClockCase:
    """A schedule on some stages, with the seconds of a step or, in a stream, of a mini-batch."""

    schedule: str
    stages: int
    transfer_s: float
    measured_s: float
    simulated_s: float
    profiled_s: float  # simulated with measured costs
    formula_s: float | None
    busy: float  # computing time of a worker over the measured time


def measure() -> list[ClockCase]:
    """Measure all cases on worker processes."""
    register_backend(SleepingBackend)
    cases = []
    for stages in STAGES:
        for transfer_s in TRANSFERS_S:
            with Crew.start(_cluster(stages, transfer_s)) as crew:
                times = _Times.of(crew, stages, transfer_s, 1)
                cases += [_flushed(crew, name, times) for name in SYNCHRONOUS]
                noam = [stages - n for n in range(stages)]
                hiding = [2 * (stages - n) - 1 for n in range(stages)]
                cases.append(_streamed(crew, "NOAM", noam, times))
                cases.append(_streamed(crew, "2(N-n)-1", hiding, times))
            with Crew.start(_cluster(stages, transfer_s, f"sleeping:10,20,{CHUNKS}")) as crew:
                times = _Times.of(crew, stages, transfer_s, CHUNKS)
                cases += [_flushed(crew, name, times) for name in CHUNKED]
    return cases


@dataclass(frozen=True)
class _Times:
    """Times of a pipeline's passes and transfers: the set times, and the measured times."""

    stages: int
    transfer_s: float
    chunks: int
    nominal: StageTimes
    profiled: StageTimes

    @staticmethod
    def of(crew: Crew, stages: int, transfer_s: float, chunks: int) -> _Times:
        """Measure steps in which only one pass runs at a time.

        The rest of the step's time, beyond passes and links, is spent on copies. As in a plan, the
        cores that compute also copy: a transfer lengthens the pass at each of its ends by half of
        its copying time.
        """
        load_empty(crew, Keep(), CHUNKS)
        schedule = generate("naive", stages, MICROBATCHES)
        request = empty_request(schedule, MICROBATCHES, CHUNKS)
        steps = [crew.step(request).timeline for _ in range(ROUNDS + 1)][1:]
        passes_s: dict[Op, list[float]] = {Op.FORWARD: [], Op.BACKWARD: []}
        for span in (span for step in steps for span in step.spans):
            if span.action.op in passes_s:
                passes_s[span.action.op].append(span.end_s - span.start_s)
        forward_s, backward_s = (statistics.median(each) for each in passes_s.values())
        make = partial(_stage_times, stages, transfer_s, chunks)
        passes = simulate(schedule, make(forward_s, backward_s))
        step_s = statistics.median(step.step_s for step in steps)
        more_s = (step_s - passes.step_s) / (2 * (stages - 1) * MICROBATCHES)
        profiled = make(forward_s, backward_s, more_s)
        return _Times(stages, transfer_s, chunks, make(FORWARD_S, BACKWARD_S), profiled)


def _stage_times(
    stages: int,
    transfer_s: float,
    chunks: int,
    forward_s: float,
    backward_s: float,
    more_s: float = 0.0,
) -> StageTimes:
    """Return the times of stages; copying takes `more_s` per transfer beyond the link's time."""
    links = (Transfer(0.0, transfer_s),) * (stages - 1)
    ends = [(n > 0) + (n < stages - 1) for n in range(stages)]
    return StageTimes(
        tuple(forward_s + count * more_s / 2 for count in ends),
        tuple(backward_s + count * more_s / 2 for count in ends),
        (),
        links,
        links,
        chunks=(chunks,) * stages,
    )


def formula_s(schedule: str, stages: int, microbatches: int, transfer_s: float) -> float | None:
    """Return a step's seconds by BaPipe's table 1 or GPipe's formula; None if neither applies."""
    both_s = FORWARD_S + BACKWARD_S
    fill_s = (microbatches + stages - 1) * both_s
    if schedule == "naive":
        return microbatches * (stages * both_s + 2 * (stages - 1) * transfer_s)
    if schedule == "1f1b-sno":
        exposed = stages + microbatches - 2 - ceil((microbatches - 1) / stages)
        return fill_s + exposed * 2 * transfer_s
    if schedule in ("fbp", "1f1b-as") and not transfer_s:
        return fill_s
    if transfer_s <= min(FORWARD_S, BACKWARD_S) and schedule in ("1f1b-so", "gpipe"):
        return fill_s + (stages - 1) * 2 * transfer_s
    return None


def _cluster(stages: int, transfer_s: float, device: str = "sleeping:10,20") -> Cluster:
    members = tuple(Member(f"worker {n}", device) for n in range(stages))
    link = Link(0.0, 4 * CHUNKS / transfer_s) if transfer_s else Link()
    pairs = [frozenset((f"worker {n}", f"worker {n + 1}")) for n in range(stages - 1)]
    return Cluster(members, dict.fromkeys(pairs, link))


def _flushed(crew: Crew, name: str, times: _Times) -> ClockCase:
    stages, chunks = times.stages, times.chunks
    load_empty(crew, Keep(), CHUNKS)
    schedule = generate(name, stages, MICROBATCHES)
    request = empty_request(schedule, MICROBATCHES, CHUNKS)
    steps_s = [crew.step(request).timeline.step_s for _ in range(ROUNDS + 1)][1:]
    step_s = statistics.median(steps_s)
    return ClockCase(
        name if chunks == 1 else f"{name}, {chunks} chunks",
        stages,
        times.transfer_s,
        step_s,
        simulate(schedule, times.nominal).step_s,
        simulate(schedule, times.profiled).step_s,
        formula_s(name, stages, MICROBATCHES, times.transfer_s),
        MICROBATCHES * (FORWARD_S + BACKWARD_S) / step_s,
    )


def _streamed(crew: Crew, depth: str, in_flight: Sequence[int], times: _Times) -> ClockCase:
    stages = len(in_flight)
    load_empty(crew, Keep(STASH), CHUNKS)
    streaming = Streaming(crew, Stream("pipedream", stages, 1, in_flight), STASH)
    spans: list[Span] = []
    for number in range(MINI_BATCHES):
        streaming.admit(empty_request((), 1, CHUNKS))
        if number >= streaming.window:
            spans += streaming.collect().timeline.spans
    while crew.under_way:
        spans += streaming.collect().timeline.spans
    streaming.flush()
    measured = Timeline((), tuple(spans), "measured")
    schedule = generate(
        "pipedream", stages, 1, in_flight=list(in_flight), mini_batches=MINI_BATCHES
    )
    interval_s = _interval_s(measured)
    return ClockCase(
        f"pipedream, {depth}",
        stages,
        times.transfer_s,
        interval_s,
        _interval_s(simulate(schedule, times.nominal)),
        _interval_s(simulate(schedule, times.profiled)),
        None,
        (FORWARD_S + BACKWARD_S) / interval_s,
    )


def _interval_s(timeline: Timeline) -> float:
    """Return the seconds per mini-batch at stage 0: the median over windows in the steady state."""
    ends_s = sorted(
        span.end_s
        for span in timeline.spans
        if span.action.stage == 0 and span.action.op is Op.BACKWARD
    )[SETTLE : MINI_BATCHES - SETTLE]
    marks_s = ends_s[::WINDOW]
    return statistics.median((end_s - begin_s) / WINDOW for begin_s, end_s in pairwise(marks_s))


def main() -> None:
    cases = measure()
    numbers = ("stages", "transfer", "measured", "simulated", "profiled", "formula", "busy")
    title = f"F = 10 ms, B = 20 ms, M = {MICROBATCHES}; milliseconds"
    table = Table(title, ("schedule", *numbers), numbers)
    for case in cases:
        formula = "" if case.formula_s is None else f"{1e3 * case.formula_s:.1f}"
        table.add_row(
            case.schedule, str(case.stages), f"{1e3 * case.transfer_s:.0f}",
            f"{1e3 * case.measured_s:.1f}", f"{1e3 * case.simulated_s:.1f}",
            f"{1e3 * case.profiled_s:.1f}", formula, f"{100 * case.busy:.0f} %",
        )  # fmt: skip
    console().print(table)
    for name, others in (
        ("simulator", [(case.measured_s, case.simulated_s) for case in cases]),
        ("simulator with measured costs", [(case.measured_s, case.profiled_s) for case in cases]),
        ("formulas", [(c.measured_s, c.formula_s) for c in cases if c.formula_s is not None]),
    ):
        errors = [abs(measured / other - 1) for measured, other in others]
        within = sum(each <= 0.03 for each in errors)
        print(
            f"measured times differ from the {name} by at most {100 * max(errors):.1f} %; "
            f"{within} of {len(errors)} rows are within 3 %"
        )


if __name__ == "__main__":
    main()
