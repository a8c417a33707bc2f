"""Pipeline: the public face. Captures, profiles, plans, starts the workers and trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from hetpipe.capture.captured import Captured
from hetpipe.capture.precision import Precision
from hetpipe.capture.program import BUFFER, GRAD, PARAM, STATE
from hetpipe.checkpoint import Checkpoint
from hetpipe.checkpoint import load as load_checkpoint
from hetpipe.crew.crew import Crew, StepRequest, StepResult
from hetpipe.errors import HetpipeError
from hetpipe.pipeline.batches import mean_loss, rows_of, sizes_of, slices
from hetpipe.pipeline.fit import check_dtypes, check_fit, check_wishes
from hetpipe.pipeline.loading import Loading
from hetpipe.pipeline.lossscale import LossScale, choose_scaling, watching
from hetpipe.pipeline.planning import Planning
from hetpipe.pipeline.resume import ROLES, check, updates_of, write
from hetpipe.pipeline.schedules import ALL, FORWARDS, SUMMING, UPDATING, Schedules
from hetpipe.pipeline.streaming import Streaming
from hetpipe.plan.plan import Plan
from hetpipe.plan.planner import predict
from hetpipe.profile.measure import Progress
from hetpipe.schedule.action import Schedule
from hetpipe.schedule.generators import is_asynchronous
from hetpipe.wire.messages import Clip, Keep

if TYPE_CHECKING:
    import torch

    from hetpipe.cluster.cluster import Cluster
    from hetpipe.cost.table import CostTable
    from hetpipe.optim.rule import Optimizer
    from hetpipe.simulate.timeline import Timeline

RECENT = 64
"""Mini-batches of a run whose timeline is kept."""


@dataclass(frozen=True)
class Result:
    """One mini-batch of a run, by stage: `versions`, how many mini-batches were applied in the
    weights that its (last) forward used, and `live_versions`, how many lived at once at most."""

    index: int
    loss: float
    versions: tuple[int, ...]
    live_versions: tuple[int, ...] = ()


class Pipeline:
    """A model in training on a cluster; use it as a context manager.

    `example` is one mini-batch `(x, y)`: tensors, tuples or dicts of them, batch first. `loss_fn`
    takes the model's output and `y` and returns a mean over samples, or `(sum, count)`.
    `microbatches=None` lets the planner choose. `plan` stands for all that a planner decides;
    `cuts`, layer indices, for a part of it. `replicas` (with `cuts`) says how many of the cluster's
    devices, in their order, each stage has: they divide micro-batches by their speed, or under an
    asynchronous schedule take mini-batches in turn. `schedule="data-parallel"` is all stages on
    every device; between its `cuts` gradients are summed while the backward goes on.
    `schedule="asp"` puts the whole model on every device too, or on the first R with
    `replicas=[R]`. `weights` is how versions of the weights are kept under an asynchronous schedule
    (`stash`, which is the default there, `vertical-sync`, `2bw`, `spectrain`, `pipeoptim`); a
    synchronous one has `flush`. Gradients whose norm over all stages (with `clip_each` over one)
    exceeds `clip_norm` are scaled to it, as torch's `clip_grad_norm_` does. With `accumulate` the
    mean gradient of so many mini-batches makes one update. `recompute` ("inputs", "min-cut", or one
    per stage) keeps less for the backward and computes it again. A loss that is not finite ends
    training; `check_finite` then names the stage and tensor where it began, and is slow.
    `precision` ("bfloat16", "float16") is what passes compute in, as under `torch.autocast`;
    parameters, gradients and optimizer state stay as they are. With `cut_dtype="float16"` what
    crosses a cut takes half the bytes. `loss_scale`, a number or a rule, keeps small gradients from
    being lost in float16; passes in float16 have `LossScale()` unasked. With `sync_batch_norm`
    replicas that divide micro-batches share their batch norms' statistics. `costs` is the table
    that `plan` was made with, else the pipeline profiles for it. A `crew` (started workers) or a
    `captured` model that is given is used and left running; a crew serves one pipeline at a time.
    Raises children of `HetpipeError` only.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[[Any, Any], Any],
        example: tuple[Any, Any],
        *,
        cluster: Cluster,
        optimizer: Optimizer,
        microbatches: int | None = None,
        schedule: str = "auto",
        weights: str = "auto",
        plan: Plan | None = None,
        costs: CostTable | None = None,
        cuts: Sequence[int] | None = None,
        replicas: Sequence[int] | None = None,
        recompute: str | Sequence[str] = "none",
        clip_norm: float | None = None,
        clip_each: bool = False,
        accumulate: int = 1,
        check_finite: bool = False,
        precision: str | None = None,
        cut_dtype: str | None = None,
        loss_scale: float | LossScale | None = None,
        sync_batch_norm: bool = False,
        seed: int = 0,
        progress: Progress | None = None,
        captured: Captured | None = None,
        crew: Crew | None = None,
        resume: Checkpoint | None = None,
    ) -> None:
        self._progress = progress or (lambda text, done, total: None)
        self._progress("capturing", 0, 1)
        wanted = Precision(precision, cut_dtype)
        self._captured = captured or Captured(model, loss_fn, example, wanted, sync_batch_norm)
        if wanted not in (Precision(), self._captured.precision):
            raise HetpipeError(f"captured has {self._captured.precision}, not {wanted}")
        if sync_batch_norm and not self._captured.sync_batch_norm:
            raise HetpipeError("captured has sync_batch_norm=False: capture it with True")
        self._names = list(model.state_dict())
        self._optimizer = optimizer
        self._seed = seed
        self._recompute = recompute
        self._check_finite = check_finite
        self._clip = None if clip_norm is None else Clip(clip_norm, clip_each)
        self._accumulate = accumulate
        self._accumulated: list[float] = []  # since the last update: what mini-batches count
        self._steps = 0 if resume is None else int(resume.manifest["step"])
        asked = check_wishes(
            plan,
            {
                "cuts": cuts, "replicas": replicas, "microbatches": microbatches,
                "schedule": schedule, "weights": weights,
            },
        )  # fmt: skip
        if resume is not None and plan is None and not asked:
            plan = Plan.from_json(resume.manifest["plan"])
        self._recent: deque[StepResult] = deque(maxlen=RECENT)
        self._handed_out: deque[tuple[int, tuple[int, ...]]] = deque()  # index, samples
        self._mini_batch = rows_of(self._captured.leaves(*example))
        self._borrowed = crew is not None
        self._crew = crew or Crew.start(cluster)
        try:
            used = self._crew.infos if plan is None else plan.all_devices
            infos = [self._crew.infos[name] for name in used if name in self._crew.infos]
            check_dtypes(self._captured.precision, infos)
            planning = Planning(
                self._captured, self._crew, optimizer, self._mini_batch, self._progress
            )
            if plan is None:
                self.plan, self.costs = planning.choose(
                    microbatches, schedule, weights, cuts, replicas
                )
            else:
                self.plan, self.costs = plan, planning.check(plan, costs)
            check_fit(
                self.plan, self._crew.infos, optimizer, self._clip, accumulate,
                self._captured.sync_batch_norm,
            )  # fmt: skip
            self._updates = updates_of(self.plan, resume)
            compute = self._captured.precision.compute
            self._scaling = choose_scaling(loss_scale, compute, is_asynchronous(self.plan.schedule))
            if resume is not None and "loss_scale" in resume.manifest:
                self._scaling.restore(resume.manifest["loss_scale"])
            self._clip = watching(self._clip, self._scaling)
            self._loaded: set[int] = set()  # samples of micro-batches
            self._evaluated: set[int] = set()
            self._load(set(sizes_of(self._mini_batch, self.plan.microbatches)), resume)
        except BaseException:
            self.close()
            raise

    def step(self, x: Any, y: Any) -> float:
        """Train on one mini-batch, completely; its mean loss.

        Under an asynchronous schedule that is one mini-batch and a flush; `run` is how it is meant.
        """
        self._settle()
        if self._streaming is None:
            return self._step(x, y, update=True)
        self._admit(x, y)
        result = self._collect()
        self._settle()
        return result.loss

    def run(self, batches: Iterable[tuple[Any, Any]]) -> Iterator[Result]:
        """Train on a stream of mini-batches; a result for each, in order.

        An asynchronous schedule goes on from one to the next without a flush, also from one `run`
        to the next; results come later than the mini-batches were asked for. Those that were not
        asked for, because the caller stopped, are dropped by what comes next; what they are of is
        trained.
        """
        for x, y in batches:
            if self._streaming is None:
                version = self._steps
                loss = self._step(x, y, update=True)
                yield Result(version, loss, (version,) * len(self.plan.stages))
                continue
            if not set(self._sizes(x, y)) <= self._loaded:  # new stages: nothing may be under way
                while self._crew.under_way:
                    yield self._collect()
            self._admit(x, y)
            if self._crew.under_way > self._streaming.window:
                yield self._collect()
        while self._crew.under_way:
            yield self._collect()

    def evaluate(self, x: Any, y: Any) -> float:
        """The mean loss of one mini-batch in eval mode, without gradients; flushes first.

        The first time, and for a mini-batch of another size, stages are compiled.
        """
        self._settle()
        request = self._request(x, y, (), evaluates=True)
        forwards = self._schedules.of(len(request.samples), FORWARDS)
        result = self._crew.step(replace(request, schedule=forwards))
        return mean_loss(result, request.samples, self._steps)

    def flush(self) -> None:
        """Wait until everything handed in is applied, gradients that are being accumulated too."""
        self._settle()
        self._apply()

    def gradients(self, x: Any, y: Any) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss and gradients of one mini-batch by parameter name; the model stays as it is."""
        import torch

        self.flush()
        buffers = self._crew.read(BUFFER)
        loss = self._step(x, y, update=False)
        grads = self._crew.read(GRAD)
        self._crew.write(BUFFER, buffers)
        self._crew.write(GRAD, {name: np.zeros_like(grad) for name, grad in grads.items()})
        scale = self._scaling.scale
        return loss, {name: torch.from_numpy(grad / scale) for name, grad in grads.items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The full model's parameters and buffers under their original names, on the CPU."""
        import torch

        self._settle()
        known = {**self._captured.parameters, **self._captured.buffers}
        known.update(self._crew.read(PARAM))
        known.update(self._crew.read(BUFFER))
        aliases = self._captured.aliases
        return {
            name: torch.from_numpy(np.array(known[aliases.get(name, name)]))
            for name in self._names
            if aliases.get(name, name) in known
        }

    def save(self, directory: str | Path) -> None:
        """Write a checkpoint, in place of the one in that folder; flushes first.

        Raises `CheckpointError`; what the folder held can then still be loaded.
        """
        self.flush()
        progress = (self._steps, self._updates)
        write(Path(directory), self._crew, *progress, self.plan, self._optimizer, self._scaling)

    @classmethod
    def load(
        cls,
        directory: str | Path,
        model: torch.nn.Module,
        loss_fn: Callable[[Any, Any], Any],
        example: tuple[Any, Any],
        **options: Any,
    ) -> Pipeline:
        """A pipeline that goes on where `save` was called; `options` as for `Pipeline`.

        Without `plan`, `cuts`, `replicas`, `microbatches`, `schedule` or `weights` it has the
        checkpoint's plan, and then the result is what it would have been had `save` only flushed,
        bit for bit on one machine.
        Raises `CheckpointError` for files that are damaged or of another model or optimizer.
        """
        return cls(model, loss_fn, example, resume=load_checkpoint(Path(directory)), **options)

    @property
    def steps(self) -> int:
        """How many mini-batches have been handed in, those before a checkpoint included."""
        return self._steps

    @property
    def loss_scale(self) -> float:
        """What the loss's gradient is multiplied by at present."""
        return self._scaling.scale

    @property
    def skipped(self) -> int:
        """How many of the mini-batches were not applied, their gradients not being finite."""
        return self._scaling.skipped

    @property
    def timeline(self) -> Timeline:
        """Measured timeline of the last step, or of the last mini-batches of a run.

        Raises `HetpipeError` before the first.
        """
        if not self._recent:
            raise HetpipeError("no step has been taken yet: call step() before timeline")
        spans = tuple(span for result in self._recent for span in result.timeline.spans)
        return replace(self._recent[0].timeline, spans=spans, label=self.plan.label)

    @property
    def predicted(self) -> Timeline:
        """The plan's timeline, from profiles and links alone."""
        return predict(self.plan, self.costs)

    def close(self) -> None:
        """Stop the workers, unless they were lent."""
        if not self._borrowed:
            self._crew.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _load(self, sizes: set[int], kept: Checkpoint | None) -> None:
        """Give the workers the stages for these micro-batch sizes, with values that were kept."""
        self._progress("compiling stages", 0, 1)
        self._loaded = sizes
        backends = {name: info.backend for name, info in self._crew.infos.items()}
        halves = Schedules(self.plan).halved
        loading = Loading(
            self._captured, self.plan, self._optimizer, backends, self._recompute, halves
        )
        stages = loading.graphs(sizes, self._evaluated)
        tied = {(owner, others): None for each in stages for _, owner, others in each[0].tied}
        self._schedules = Schedules(self.plan, tuple(tied))
        stream = self._schedules.stream()
        values = {**self._captured.parameters, **self._captured.buffers}
        if kept is not None:
            if kept.manifest:
                check(kept, [replicas[0] for replicas in stages], self._optimizer)
            values.update(kept.tensors[PARAM])
            values.update(kept.tensors[BUFFER])
        lr = self._optimizer.lr_at(max(self._steps, 1))
        keep = Keep(self.plan.weights, tuple(self._updates), lr, self._check_finite)
        members = [stage.devices for stage in self.plan.stages]
        both = sizes | self._evaluated
        self._crew.load(stages, members, values, keep=keep, shares=loading.shares, sizes=both)
        self._streaming = None
        if stream is not None:
            self._streaming = Streaming(self._crew, stream, self.plan.weights)
        if kept is not None:
            for role in (STATE, GRAD):
                self._crew.write(role, kept.tensors.get(role, {}))
        self._progress("compiling stages", 1, 1)

    def _settle(self) -> None:
        """Nothing is under way any more."""
        while self._crew.under_way:
            self._collect()
        if self._streaming is not None:
            made = self._streaming.flush()
            self._updates = [sum(pair) for pair in zip(self._updates, made, strict=True)]

    def _admit(self, x: Any, y: Any) -> None:
        assert self._streaming is not None
        request = self._request(x, y, ())
        if len(request.samples) != self.plan.microbatches:
            raise HetpipeError(
                f"a mini-batch of {sum(request.samples)} samples is too small for "
                f"{self.plan.microbatches} micro-batches, which {self.plan.schedule} cannot do "
                "without; leave it out"
            )
        if self._streaming.admitted == 0:
            self._recent.clear()
        self._streaming.admit(request)
        self._handed_out.append((self._steps, request.samples))
        self._steps += 1

    def _collect(self) -> Result:
        assert self._streaming is not None
        result = self._streaming.collect()
        self._recent.append(result)
        index, samples = self._handed_out.popleft()
        return Result(
            index, mean_loss(result, samples, index), result.versions, result.live_versions
        )

    def _sizes(self, x: Any, y: Any) -> tuple[int, ...]:
        return sizes_of(rows_of(self._captured.leaves(x, y)), self.plan.microbatches)

    def _request(self, x: Any, y: Any, schedule: Schedule, evaluates: bool = False) -> StepRequest:
        leaves = self._captured.leaves(x, y)
        rows = rows_of(leaves)
        samples = sizes_of(rows, self.plan.microbatches)
        ready = self._evaluated if evaluates else self._loaded
        if not set(samples) <= ready:
            self._settle()
            ready |= set(samples)
            kept = {role: self._crew.read(role) for role in (*ROLES, *self._accumulating())}
            self._load(self._loaded, Checkpoint({}, kept))
        counted = self._captured.has_count
        synchronous, scale = self._streaming is None, self._scaling.scale
        return StepRequest(
            schedule=schedule,
            samples=samples,
            feeds=tuple(slices(leaves, samples)),
            loss_tangents=tuple(scale * (1.0 if counted else size / rows) for size in samples),
            lr=self._optimizer.lr_at((self._updates[0] if synchronous else self._steps) + 1),
            number=self._steps + 1,
            seed=self._seed,
            grad_scale=None if counted else 1.0 / scale,
            loss_scale=scale,
            clip=self._clip,
            evaluates=evaluates,
        )

    def _step(self, x: Any, y: Any, update: bool) -> float:
        request = self._request(x, y, ())
        ops = ALL if update else ALL - UPDATING
        if update and self._accumulate > 1:
            ops = ALL - UPDATING - SUMMING
        request = replace(request, schedule=self._schedules.of(len(request.samples), ops))
        result = self._crew.step(request)
        self._recent.clear()
        self._recent.append(result)
        mean = mean_loss(result, request.samples, self._steps)
        self._steps += update
        if update and self._accumulate > 1:
            self._accumulated.append(1.0 if result.counts is None else sum(result.counts))
            if len(self._accumulated) == self._accumulate:
                self._apply()
        elif update:
            self._record(result)
        return mean

    def _accumulating(self) -> tuple[str, ...]:
        """GRAD while gradients are accumulated, once every owner has the sums; else nothing."""
        if not self._accumulated:
            return ()
        if max(self.plan.replicas) > 1:
            raise HetpipeError(
                f"a mini-batch of a new size behind {len(self._accumulated)} of {self._accumulate} "
                "that are accumulated on replicas: flush() before it, or leave it out"
            )
        schedule = self._schedules.of(self.plan.microbatches, SUMMING)
        self._crew.step(StepRequest(schedule, (), (), (), 0.0, self._steps, grad_scale=1.0))
        return (GRAD,)

    def _apply(self) -> None:
        """Update with the gradients that are accumulated, if there are any."""
        if not self._accumulated:
            return
        schedule = self._schedules.of(self.plan.microbatches, UPDATING | SUMMING)
        scale = 1.0 / (sum(self._accumulated) * self._scaling.scale)
        lr = self._optimizer.lr_at(self._updates[0] + 1)
        self._accumulated.clear()
        request = StepRequest(
            schedule, (), (), (), lr, self._steps, grad_scale=scale, clip=self._clip
        )
        self._record(self._crew.step(request))

    def _record(self, result: StepResult) -> None:
        """An update was made, or left out."""
        self._scaling.record(result.skipped)
        self._updates = [count + (not result.skipped) for count in self._updates]
