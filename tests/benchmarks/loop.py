"""Time of an epoch of `Pipeline.fit`, beside the same mini-batches by `Pipeline.run`.

    PYTHONPATH=tests python -m benchmarks.loop

Two workers on processors train a small network in turns, by the bare loop and by the fit, whose
order changes from round to round. Both end with a flush. The loop adds the same time to a
mini-batch of any model. So the command prints medians over the rounds of the seconds, of their
ratio with its quartiles, and of the CPU time that the fit adds to the caller's thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import hetpipe as hp

SCHEDULES = ("1f1b", "pipedream")
SAMPLES, WIDTH = 256, 512
MINI_BATCHES, ROUNDS = 24, 21


def main() -> None:
    print("| schedule | run, ms per mini-batch | fit / run | quartiles | added CPU, us |")
    print("|---|---|---|---|---|")
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    x, y = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    for schedule in SCHEDULES:
        with hp.Pipeline(
            nn.Sequential(*layers), nn.functional.mse_loss, (x, y), microbatches=4, cuts=[1],
            cluster=hp.Cluster.local(devices=["pytorch:cpu:0"] * 2), schedule=schedule,
            optimizer=hp.optim.sgd(lr=0.1), progress=False,
        ) as pipe:  # fmt: skip
            print(f"| {schedule} | {row(pipe, [(x, y)] * MINI_BATCHES)} |", flush=True)


def row(pipe: hp.Pipeline, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """Return the figures of a row of the table."""

    def run() -> None:
        for _ in pipe.run(batches):
            pass
        pipe.flush()

    def fit() -> None:
        pipe.fit(batches, 1)

    seconds(run), seconds(fit)
    ratios, added_us, runs_s = [], [], []
    for number in range(ROUNDS):
        first, second = (run, fit) if number % 2 else (fit, run)
        took_s = {first: seconds(first), second: seconds(second)}
        (run_s, run_cpu_s), (fit_s, fit_cpu_s) = took_s[run], took_s[fit]
        runs_s.append(run_s)
        ratios.append(fit_s / run_s)
        added_us.append(1e6 * (fit_cpu_s - run_cpu_s) / len(batches))
    run_ms = 1e3 * statistics.median(runs_s) / len(batches)
    low, median, high = statistics.quantiles(ratios, n=4)
    cpu_us = statistics.median(added_us)
    return f"{run_ms:.2f} | {median:.3f} | {low:.3f} to {high:.3f} | {cpu_us:.0f}"


def seconds(act: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of a call, by the clock and of the thread's CPU."""
    begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
    act()
    return time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s


if __name__ == "__main__":
    main()
