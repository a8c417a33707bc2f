"""Throughput of predictions, beside the pipeline's forward passes.

    PYTHONPATH=tests python -m benchmarks.outputs [MODEL...]

Two workers on processors predict a test set, and evaluate it without metrics, in turns: an
evaluation runs the same forward passes, and its outputs stay on the devices. The command prints
medians over the rounds, with the smallest and largest ratio, and the share of the time in which the
busiest stage ran forward passes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import hetpipe as hp
from hetpipe.cluster.cluster import Cluster
from hetpipe.schedule.action import Op
from hetpipe.zoo.load import load_workload, optimizer_of

MODELS = ("gpt", "resnet18-small", "lstm")
MINI_BATCHES, ROUNDS = 24, 9


def main(models: tuple[str, ...]) -> None:
    print("| model | evaluation, mini-batches/s | predictions / evaluation | busiest stage |")
    print("|---|---|---|---|")
    for model in models:
        workload = load_workload(model)
        x, y = next(workload.batches(workload.mini_batch, 0))
        cluster = Cluster.local(devices=["pytorch:cpu:0"] * 2)
        with hp.Pipeline(
            workload.model, workload.loss_fn, (x, y), cluster=cluster,
            optimizer=optimizer_of(workload), microbatches=4, schedule="1f1b",
        ) as pipe:  # fmt: skip
            print(row(model, pipe, x, y))


def row(model: str, pipe: hp.Pipeline, x: Any, y: Any) -> str:
    """Return a row of the table."""

    def predict() -> None:
        for _ in pipe.predict_batches([x] * MINI_BATCHES):
            pass

    def evaluate() -> None:
        pipe.evaluate([(x, y)] * MINI_BATCHES)

    seconds(predict), seconds(evaluate)  # both compile their stages
    times_s = [(seconds(evaluate), seconds(predict)) for _ in range(ROUNDS)]
    ratios = [evaluated_s / predicted_s for evaluated_s, predicted_s in times_s]
    rate = MINI_BATCHES / statistics.median(evaluated_s for evaluated_s, _ in times_s)
    busy = max(busy_s(pipe, stage) for stage in range(len(pipe.plan.stages)))
    share = busy * MINI_BATCHES / times_s[-1][1]
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    return f"| {model} | {rate:.1f} | {statistics.median(ratios):.3f} ({spread}) | {share:.2f} |"


def seconds(run: Callable[[], None]) -> float:
    """Return the seconds of a call."""
    begin_s = time.perf_counter()
    run()
    return time.perf_counter() - begin_s


def busy_s(pipe: hp.Pipeline, stage: int) -> float:
    """Return the seconds of a stage's forward passes in the last mini-batch."""
    spans = (span for span in pipe.timeline.spans if span.action.op is Op.FORWARD)
    return sum(span.end_s - span.start_s for span in spans if span.action.stage == stage)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or MODELS)
