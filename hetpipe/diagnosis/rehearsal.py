"""Rehearsal: one mini-batch through all programs of a pipeline.

As in training, a program's inputs are results of the devices that ran the earlier programs, so that
no stage gets the blame for an error of another stage. The pipeline's values do not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from hetpipe.capture.program import (
    BUFFER,
    CONSTANT,
    COUNT,
    GRAD,
    INPUT,
    LOSS,
    NORM,
    OUTPUT,
    PARAM,
    RNG,
    SAVED,
    SCALAR,
    STATE,
    TANGENT,
    PassPrograms,
    Program,
    Slot,
    StageGraphs,
)  # fmt: skip
from hetpipe.crew.request import StepRequest, WholeLoss

Array = np.ndarray[Any, Any]
Key = tuple[str, str]
PREDICTION = "prediction"
LATER_UPDATE = "update at a later step"
"""A second update, which shows whether the device reads a new learning rate and step number."""
LATER_STEPS = 9
LATER_LR = 0.25


@dataclass(frozen=True)
class Start:
    """A pipeline between steps: the inputs of its programs, and the mini-batch.

    `values` maps the roles PARAM, BUFFER and STATE to arrays by name; `updates` counts the updates
    of each stage so far.
    """

    stages: Sequence[StageGraphs]
    members: Sequence[str]
    values: Mapping[str, Mapping[str, Array]]
    updates: Sequence[int]
    request: StepRequest


@dataclass(frozen=True)
class Run:
    """A run of a program; `is_first` marks each program's first run."""

    stage: int
    member: str
    name: str
    program: Program
    microbatch: int | None
    inputs: list[torch.Tensor]
    donate: frozenset[int]
    is_first: bool


@dataclass
class Rehearsal:
    """The runs of a mini-batch: all forwards, stage by stage, then all backwards, then all updates.

    Call `done` with the results of a run before you take the next run.
    """

    start: Start
    shared: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Parameters, optimizer state, and the buffers after the latest forward."""
    grads: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Gradients by stage and name."""
    frames: list[dict[Key, torch.Tensor]] = field(default_factory=list)
    """Tensors at cuts, losses, counts and tangents, by micro-batch."""
    saved: dict[tuple[int, int, str], torch.Tensor] = field(default_factory=dict)
    """Saved tensors by stage, micro-batch and name: the device's values, or reference values if
    only the device can read its values."""
    whole: WholeLoss | None = None
    """The loss of the whole mini-batch, after the forwards, if micro-batches have no losses."""
    _squares: list[float] = field(default_factory=list)  # one for each stage with a norm program
    _grad_scale: float = 1.0
    _clip: dict[int, float] = field(default_factory=dict)  # by stage
    _is_later: bool = False

    def __post_init__(self) -> None:
        for role, named in self.start.values.items():
            for name, value in named.items():
                self.shared[role, name] = torch.from_numpy(np.array(value))
        self.grads = [{} for _ in self.start.stages]
        self.frames = [{} for _ in self.start.request.samples]

    @property
    def losses(self) -> list[float]:
        """The losses of the micro-batches, or the loss of the whole mini-batch; empty before the
        last forward."""
        if self.start.request.whole_loss is not None:
            return [] if self.whole is None else [self.loss]
        keys = [next((key for key in frame if key[0] == LOSS), None) for frame in self.frames]
        if None in keys:
            return []
        return [float(frame[key]) for frame, key in zip(self.frames, keys, strict=True) if key]

    @property
    def loss(self) -> float:
        """The mean loss of the mini-batch; NaN before the last forward."""
        if self.whole is not None:
            return self.whole.loss / self._count if self._count else float("nan")
        losses = self.losses
        if not losses:
            return float("nan")
        if self._counted:
            return sum(losses) / self._count if self._count else float("nan")
        samples = self.start.request.samples
        pairs = zip(losses, samples, strict=True)
        return sum(loss * size for loss, size in pairs) / sum(samples)

    def runs(self) -> Iterator[Run]:
        """Yield all runs.

        If a loss is not finite, skip backwards and updates. If a gradient is not finite, or the
        losses have no terms, skip the updates.
        """
        stages, microbatches = self.start.stages, range(len(self.start.request.samples))
        for stage in stages:
            for m in microbatches:
                program = self._passes(stage, m).forward
                yield self._run(stage, "forward", program, m)
        self._meet()
        if not np.isfinite(self.loss):
            return
        for stage in reversed(stages):
            for m in microbatches:
                passes = self._passes(stage, m)
                halves = ("backward (inputs)", "backward (weights)")
                names = halves if passes.halves else ("backward",)
                for name, program in zip(names, passes.backwards, strict=False):
                    yield self._run(stage, name, program, m)
        self._sum_tied()
        gradients = [gradient for named in self.grads for gradient in named.values()]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            return
        if self._counted and self._count == 0:
            return
        yield from self._update_runs()

    def done(self, run: Run, outputs: Sequence[torch.Tensor]) -> None:
        """Store the outputs of a run."""
        frame = {} if run.microbatch is None else self.frames[run.microbatch]
        for slot, value in zip(run.program.outputs, outputs, strict=True):
            if slot.role == SAVED and run.microbatch is not None:
                self.saved[run.stage, run.microbatch, slot.name] = value
            elif slot.role == NORM:
                self._squares.append(float(value))
            elif run.microbatch is None:
                pass  # nothing in this mini-batch reads the results of an update
            elif slot.role == GRAD:
                self.grads[run.stage][slot.name] = value
            elif slot.role == BUFFER:
                self.shared[slot.key] = value
            else:
                frame[slot.key] = value

    def held_name(self, run: Run, slot: Slot) -> str | None:
        """Return the name of a saved tensor on the device; None for other tensors."""
        if slot.role != SAVED:
            return None
        return f"{run.microbatch} {slot.name}"

    def _run(self, stage: StageGraphs, name: str, program: Program, m: int | None) -> Run:
        inputs = [self._value(stage, slot, m) for slot in program.inputs]
        replaced = {slot.key for slot in program.outputs if slot.role in (GRAD, STATE, PARAM)}
        donate = frozenset(i for i, slot in enumerate(program.inputs) if slot.key in replaced)
        if name == PREDICTION:  # a prediction must not overwrite the current weights
            donate = frozenset()
        samples = self.start.request.samples
        is_first = m is None or m == 0 or samples[m] != samples[m - 1]
        is_first = is_first and name != LATER_UPDATE
        member = self.start.members[stage.stage]
        return Run(stage.stage, member, name, program, m, inputs, donate, is_first)

    def _value(self, stage: StageGraphs, slot: Slot, m: int | None) -> torch.Tensor:
        """Return the value of an input, as a worker would choose it."""
        request, n = self.start.request, stage.stage
        if slot.role in (PARAM, BUFFER, STATE):
            return self.shared[slot.key]
        if slot.role == CONSTANT:
            return torch.from_numpy(np.array(stage.constants[slot.name]))
        if slot.role == GRAD:
            dtype = getattr(torch, slot.dtype)
            return self.grads[n].setdefault(slot.name, torch.zeros(slot.shape, dtype=dtype))
        if slot.role == SCALAR:
            return torch.tensor(self._scalars(n)[slot.name], dtype=getattr(torch, slot.dtype))
        assert m is not None
        if slot.role == INPUT:
            return torch.from_numpy(np.array(self.feeds[m][slot.name]))
        if slot.role == RNG:
            first = list(accumulate(request.samples, initial=0))[m]
            return torch.tensor([request.seed, request.number, first])
        if slot.role == SAVED:
            return self.saved[n, m, slot.name]
        if slot.key == (TANGENT, LOSS):
            return torch.tensor(request.loss_tangents[m], dtype=getattr(torch, slot.dtype))
        return self.frames[m][slot.key]

    @property
    def feeds(self) -> list[Mapping[str, Array]]:
        """The leaves of each micro-batch, after the forwards with the gradients of the loss of the
        whole mini-batch."""
        feeds = self.start.request.feeds
        if self.whole is None:
            return [*feeds]
        return [{**own, **late} for own, late in zip(feeds, self.whole.feeds, strict=True)]

    def _meet(self) -> None:
        """Compute the loss of the whole mini-batch, if it has one."""
        if (loss := self.start.request.whole_loss) is not None:
            names = [name for role, name in self.frames[0] if role == OUTPUT]
            self.whole = loss(
                {n: torch.cat([frame[OUTPUT, n] for frame in self.frames]).numpy() for n in names}
            )

    def _scalars(self, stage: int) -> dict[str, float]:
        factor = LATER_LR if self._is_later else 1.0
        step = float(self.start.updates[stage] + 1)
        return {
            **{name: rate * factor for name, rate in self.start.request.rates.items()},
            "step": step + LATER_STEPS if self._is_later else step,
            "grad_scale": self._grad_scale * self._clip.get(stage, 1.0),
            "ahead": 1.0,
        }

    def _update_runs(self) -> Iterator[Run]:
        """Yield the norms, predictions and updates of all stages."""
        request = self.start.request
        if self._counted:
            self._grad_scale = 1.0 / (self._count * request.loss_scale)
        elif request.grad_scale is not None:
            self._grad_scale = request.grad_scale
        clip = request.clip
        # Without clipping, a norm sums plain gradients, which cancel too much to be compared.
        if clip is not None and clip.takes_norms:
            with_norm = [stage for stage in self.start.stages if stage.norm is not None]
            for stage in with_norm:
                assert stage.norm is not None
                yield self._run(stage, "norm", stage.norm, None)
            total = sum(self._squares)
            for stage, square in zip(with_norm, self._squares, strict=True):
                factor = clip.factor(square if clip.each else total)
                self._clip[stage.stage] = factor if np.isfinite(factor) else 1.0
        for stage in self.start.stages:
            if stage.predict is not None:
                yield self._run(stage, PREDICTION, stage.predict, None)
            if stage.update is not None:
                yield self._run(stage, "update", stage.update, None)
                self._is_later = True
                run = self._run(stage, LATER_UPDATE, stage.update, None)
                self._is_later = False
                yield run

    def _sum_tied(self) -> None:
        """Add the gradients of shared parameters to the gradient on the owner's stage."""
        for name, owner, others in dict.fromkeys(e for s in self.start.stages for e in s.tied):
            for other in others:
                self.grads[owner][name] = self.grads[owner][name] + self.grads[other][name]

    def _passes(self, stage: StageGraphs, m: int) -> PassPrograms:
        return stage.passes[self.start.request.samples[m]]

    @property
    def _counted(self) -> bool:
        """Whether losses are sums. The loss of a whole mini-batch is one, also without a count."""
        return self.whole is not None or any(role == COUNT for role, _ in self.frames[0])

    @property
    def _count(self) -> float:
        """The number of terms in the mini-batch's losses."""
        if self.whole is not None:
            return 1.0 if self.whole.count is None else self.whole.count
        frames = (value for frame in self.frames for key, value in frame.items() if key[0] == COUNT)
        return sum(map(float, frames))
