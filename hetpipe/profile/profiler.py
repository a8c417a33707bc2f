"""Measures the costs of stages on a device, inside the device's own worker.

The stages are a whole network cut after every layer. They run in order, forward and back again, as
in a pipeline, so that caches are in the same state as later in training.

"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hetpipe.capture.program import CONSTANT, SAVED, PassPrograms, Program, Slot, StageGraphs
from hetpipe.errors import UnsupportedOperatorError
from hetpipe.sdk.backend import Buffer, Device, Executable
from hetpipe.sdk.graph import of_one_replica
from hetpipe.worker.emulation import stretch

Environment = dict[tuple[str, str], Buffer]
Times = tuple[float, float, float]

RULES = 2  # version of the measurement: cached costs of another one are not read
MIN_ROUNDS = 4
MAX_ROUNDS = 50
BUDGET_S = 0.6
UPDATES = 3


def measure_layers(
    device: Device, stages: Sequence[StageGraphs], samples: int, speed: float = 1.0, seed: int = 0
) -> list[Times | str]:
    """Median seconds (forward, backward, update) of each stage for micro-batches of `samples`.

    Below 1, `speed` emulates a slower device as the engine does: every pass is stretched.
    A stage that the device cannot run gives the reason instead.
    """
    rng = np.random.default_rng(seed)
    runs: list[_StageRun | str] = []
    for stage in stages:
        try:
            runs.append(_StageRun(device, stage, samples, speed))
        except UnsupportedOperatorError as error:
            runs.append(str(error))
    able = [run for run in runs if not isinstance(run, str)]
    env: Environment = {}
    spent_s = 0.0
    rounds = 0
    while rounds < MIN_ROUNDS or (spent_s < BUDGET_S and rounds < MAX_ROUNDS):
        start_s = time.perf_counter()
        for run in able:
            run.forward(env, rng)
        for run in reversed(able):
            run.backward(env, rng)
        spent_s += time.perf_counter() - start_s if rounds else 0.0  # the first round warms up
        rounds += 1
    usual = {id(run): run.medians() for run in able}
    for run in able:
        run.forget()
    for _ in range(UPDATES):
        for run in able:
            run.update(env, rng)
        for run in able:
            run.forward(env, rng)
        for run in reversed(able):
            run.backward(env, rng)
    return [run if isinstance(run, str) else _step(usual[id(run)], run.medians()) for run in runs]


def _step(usual: Times, after_update: Times) -> Times:
    """The times of usual passes, and of an update with the time that it adds to the next passes.

    Those find new weights, which are not in the caches and must be packed again.
    """
    forward_s, backward_s, update_s = *usual[:2], after_update[2]
    if update_s > 0:
        update_s += max(0.0, sum(after_update[:2]) - forward_s - backward_s)
    return forward_s, backward_s, update_s


class _StageRun:
    """One stage compiled, and the times of its passes."""

    def __init__(self, device: Device, stage: StageGraphs, samples: int, speed: float) -> None:
        passes: PassPrograms = stage.passes[samples]
        self._device = device
        self._speed = speed
        self._constants = stage.constants
        self._passes: list[tuple[Program, Executable] | None] = [
            None if program is None else (program, device.compile(of_one_replica(program.graph)))
            for program in (passes.forward, passes.backward, stage.update)
        ]
        self._saved: Environment = {}  # names of saved tensors are a stage's own
        self._times_s: list[list[float]] = [[], [], []]

    def forward(self, env: Environment, rng: np.random.Generator) -> None:
        self._run(0, env, rng)

    def backward(self, env: Environment, rng: np.random.Generator) -> None:
        self._run(1, env, rng)

    def update(self, env: Environment, rng: np.random.Generator) -> None:
        self._run(2, env, rng)

    def forget(self) -> None:
        """Drop the times so far."""
        self._times_s = [[], [], []]

    def medians(self) -> Times:
        forward_s, backward_s, update_s = (
            statistics.median(times[1:]) if len(times) > 1 else 0.0 for times in self._times_s
        )
        return forward_s, backward_s, update_s

    def _run(self, index: int, env: Environment, rng: np.random.Generator) -> None:
        entry = self._passes[index]
        if entry is None:
            return
        program, executable = entry
        for slot in program.inputs:
            buffers = self._room(slot, env)
            if slot.key not in buffers:
                buffers[slot.key] = self._device.upload(_example(slot, self._constants, rng))[0]
        inputs = [self._room(slot, env)[slot.key] for slot in program.inputs]
        donate = frozenset(
            i for i, slot in enumerate(program.inputs) if index > 0 and _donated(slot, program)
        )
        start_s = time.monotonic()
        outputs, event, _ = executable.run(inputs, donate)
        event.wait()
        self._times_s[index].append(stretch(start_s, self._speed) - start_s)
        for slot, buffer in zip(program.outputs, outputs, strict=True):
            self._room(slot, env)[slot.key] = buffer

    def _room(self, slot: Slot, env: Environment) -> Environment:
        return self._saved if slot.role == SAVED else env


def _donated(slot: Slot, program: Program) -> bool:
    """Whether a program may overwrite an input, as in training: state that it replaces."""
    return slot.role in ("param", "grad", "state") and any(
        slot.key == out.key for out in program.outputs
    )


def _example(slot: Slot, constants: Mapping[str, Any], rng: np.random.Generator) -> Any:
    if slot.role == CONSTANT:
        return np.asarray(constants[slot.name], order="C")  # a 0-d one stays 0-d
    if slot.dtype in ("float32", "float64", "float16"):
        if slot.role in ("state", "grad", "scalar"):
            return np.zeros(slot.shape, slot.dtype)
        return (rng.standard_normal(slot.shape) * 0.1).astype(slot.dtype)
    return np.zeros(slot.shape, slot.dtype)
