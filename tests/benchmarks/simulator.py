"""Times to generate, check and simulate large schedules: `python -m benchmarks.simulator`.

The times are medians of process seconds on one core. The check of a schedule finds an order of its
actions, which the simulation uses again. The exponents of growth are least-squares slopes of log
seconds over log sizes.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise, product
from typing import NamedTuple

from rich.console import Console

from benchmarks.planners import ROUNDS, exponent
from hetpipe.report.tables import Table
from hetpipe.schedule.columns import Columns, columns_of
from hetpipe.schedule.complete import complete_passes
from hetpipe.schedule.rule import rule_of
from hetpipe.schedule.validate import validate
from hetpipe.simulate.simulator import simulate
from hetpipe.simulate.times import StageTimes, Transfer

CASES = (
    ("1f1b", 64, 512, 64), ("gpipe", 64, 512, 64), ("naive", 64, 512, 64), ("zb-h1", 64, 512, 64),
    ("interleaved", 128, 256, 64), ("zb-v", 128, 256, 64),
    ("1f1b", 10_000, 64, 10_000), ("1f1b", 10_000, 256, 10_000),
)  # fmt: skip
"""Rules, each with numbers of stages, micro-batches and workers."""

SHARED = (("1f1b", 16, 256, 16), ("gpipe", 16, 256, 16), ("1f1b", 64, 64, 64), ("fbp", 16, 256, 16))
"""Cases in which all messages share one bus, so that the simulation needs a clock."""
BUS = ("bus",)

MOST_OBJECTS = 1_000_000
"""Up to this number of actions, the time to create span objects is measured."""


class Cost(NamedTuple):
    """The number of actions in a schedule, and process seconds of each phase."""

    actions: int
    generated_s: float
    validated_s: float
    simulated_s: float
    spans_s: float  # to create span objects; 0 with more than `MOST_OBJECTS` actions

    @property
    def timeline_s(self) -> float:
        """The seconds from the rule to the timeline, without span objects."""
        return self.generated_s + self.validated_s + self.simulated_s


def main() -> None:
    """Print the seconds of each case, and their growth with stages and micro-batches."""
    heads = ["actions", "generated", "validated", "simulated", "actions/s simulated", "spans"]
    table = Table("Schedules, process seconds", ["case", *heads], heads)
    for case, media in (*product(CASES, [()]), *product(SHARED, [BUS])):
        cost = median_cost(*case, media)
        rate = f"{cost.actions / cost.simulated_s:,.0f}"
        parts = [f"{each:.3f}" for each in cost[1:]]
        name = f"{case[0]}, {case[1]:,} x {case[2]}{', on one bus' if media else ''}"
        spans = parts[3] if cost.spans_s else "-"
        table.add_row(name, f"{cost.actions:,}", *parts[:3], rate, spans)
    sizes = (16, 32, 64, 128, 256)
    by_stages = [median_cost("1f1b", n, 256, n).timeline_s for n in sizes]
    by_microbatches = [median_cost("1f1b", 64, 4 * n, 64).timeline_s for n in sizes]
    console = Console()
    console.print(table)
    console.print(f"growth with stages, 256 micro-batches: N^{exponent(sizes, by_stages):.2f}")
    console.print(f"growth with micro-batches, 64 stages: M^{exponent(sizes, by_microbatches):.2f}")


def median_cost(
    name: str, stages: int, microbatches: int, workers: int, media: tuple[str, ...] = ()
) -> Cost:
    """Return the median costs of `ROUNDS` rounds."""
    rounds = [cost_of(name, stages, microbatches, workers, media) for _ in range(ROUNDS)]
    actions, *parts = map(statistics.median, zip(*rounds, strict=True))
    return Cost(int(actions), *parts)


def cost_of(
    name: str, stages: int, microbatches: int, workers: int, media: tuple[str, ...] = ()
) -> Cost:
    """Return the costs of one round."""
    links = (Transfer(0.01, 0.1, media),) * (stages - 1)
    times = StageTimes((1.0,) * stages, (2.0,) * stages, (0.1,) * stages, links, links)
    moments = [time.process_time()]
    schedule = _schedule(name, stages, microbatches, workers)
    moments.append(time.process_time())
    validate(schedule, microbatches)
    moments.append(time.process_time())
    timeline = simulate(schedule, times)
    moments.append(time.process_time())
    actions = len(schedule.codes)
    if actions <= MOST_OBJECTS:
        tuple(timeline.spans)
    moments.append(time.process_time())
    parts = [after - before for before, after in pairwise(moments)]
    if actions > MOST_OBJECTS:
        parts[-1] = 0.0
    return Cost(actions, *parts)


def _schedule(name: str, stages: int, microbatches: int, workers: int) -> Columns:
    """Return a rule's schedule, complete but unchecked."""
    passes = columns_of(rule_of(name).rows(stages, microbatches, None, workers))
    return complete_passes(passes, stages, (), ())


if __name__ == "__main__":
    main()
