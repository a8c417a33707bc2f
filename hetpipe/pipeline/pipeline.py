"""Pipeline, the class that users call: captures, profiles, plans, starts the workers and trains
(stations 1 and 16 of docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpipe.capture.captured import Captured
from hetpipe.capture.export.example import Example
from hetpipe.capture.export.named_tensors import check_capturable
from hetpipe.checkpoint.checkpoint import Checkpoint
from hetpipe.checkpoint.checkpoint import load as load_checkpoint
from hetpipe.crew.crew import Crew
from hetpipe.crew.custom_operators import share_operators
from hetpipe.errors import CheckpointError, HetpipeError
from hetpipe.files import user_path
from hetpipe.optim.check import check_optimizer
from hetpipe.pipeline.boardtime import BoardTime
from hetpipe.pipeline.delivery import Delivery
from hetpipe.pipeline.effort import effort_of
from hetpipe.pipeline.fit import (
    boards_of,
    check_boards,
    check_costs,
    check_count,
    check_cuts,
    check_dtypes,
    check_fit,
    check_loss,
)
from hetpipe.pipeline.gradients import gradients_of
from hetpipe.pipeline.guard import Guard
from hetpipe.pipeline.kept_model import check_unchanged
from hetpipe.pipeline.launch_check import refuse_ranks
from hetpipe.pipeline.learning import correction_of
from hetpipe.pipeline.lifetime import Lifetime
from hetpipe.pipeline.measurements import Measurements
from hetpipe.pipeline.options import PassOptions, PlanOptions, records_of
from hetpipe.pipeline.planning import microbatches_of, planning_for
from hetpipe.pipeline.rebalance import HORIZON, Rebalanced, Rebalancer, fixed_by
from hetpipe.pipeline.resume import progress_of, write
from hetpipe.pipeline.settings import check_settings, settings_of
from hetpipe.pipeline.stages import Subject
from hetpipe.pipeline.training import Result, Training, as_tensors
from hetpipe.pipeline.untrained import states_of
from hetpipe.profile import warm
from hetpipe.profile.drift import Correction

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from hetpipe.cluster.cluster import Cluster
    from hetpipe.cost.table import CostTable
    from hetpipe.diagnosis.record import Diagnosis
    from hetpipe.optim.rule import Optimizer
    from hetpipe.pipeline.options import Options
    from hetpipe.profile.measure import Progress
    from hetpipe.profile.rounds import Effort
    from hetpipe.simulate.timeline import Timeline

__all__ = ["Pipeline", "Result"]


class Pipeline(Lifetime, Measurements):
    """A model in training on a cluster; use it as a context manager, on one thread at a time.

    `example` is one mini-batch `(x, y)`: tensors, tuples or dicts of them, batch first. `loss_fn`
    takes the model's output and `y` and returns a mean over samples, or `(sum, count)`. If it is a
    module with parameters, they are trained as the model's are, on the last stage.

    Every option has a default (`hetpipe.pipeline.options` describes each in a line):
    - The plan: `plan`, or its parts `cuts`, `replicas`, `microbatches`, `schedule`, `weights`; the
      planner chooses the parts that you leave out. `split` makes two layers of one, for a cut
      inside it. `costs` are the costs of `plan`. If you give every part, nothing is measured,
      unless `priced`. Replicas divide micro-batches by their speed, or take mini-batches in turn.
      `schedule="data-parallel"` puts all stages on every device, `schedule="asp"` with
      `replicas=[R]` the whole model on the first R devices. `weights` says how an asynchronous
      schedule keeps versions of the weights (`stash`, the default, `vertical-sync`, `2bw`,
      `spectrain`, `pipeoptim`); a synchronous schedule has `flush`.
      `rebalance="auto"` moves layers between steps when the devices' speeds have changed.
    - The passes: `recompute` keeps fewer tensors for the backward and computes the others again;
      `precision` works as under `torch.autocast`, and parameters, gradients and optimizer state
      keep their dtypes; `cut_dtype`, `sync_batch_norm`, `check_finite`, `pass_limit_s`, `seed`.
    - The updates: `clip_norm` as in torch's `clip_grad_norm_`, `clip_each`, `accumulate`, and
      `loss_scale`, a number or a rule; passes in float16 have a rule by default.

    `close` does not touch a `crew` (started workers) or a `captured` model that the caller gives;
    a crew serves one pipeline at a time. Raises only children of `HetpipeError`.

    An interrupt (Ctrl-C) waits until the call has ended, so that a mini-batch is trained completely
    or not at all, and the pipeline can continue. A second one during that wait closes the pipeline.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[[Any, Any], Any],
        example: tuple[Any, Any],
        *,
        cluster: Cluster,
        optimizer: Optimizer,
        progress: Progress | None = None,
        captured: Captured | None = None,
        crew: Crew | None = None,
        resume: Checkpoint | None = None,
        **options: Unpack[Options],
    ) -> None:
        refuse_ranks()
        planned, passes, updates = records_of(options)
        check_capturable(model)
        optimizer = check_optimizer(optimizer, [p for p in model.parameters() if p.requires_grad])
        cluster = cluster if crew is None else crew.cluster
        fixed = fixed_by(planned, cluster.described)
        progress = progress or (lambda text, done, total: None)
        if resume is not None and planned.plan is None and not planned.asked:
            planned = replace(planned, plan=progress_of(resume).plan)
        check_costs(planned)
        mini_batch = Example(*example).samples
        if planned.microbatches is not None:
            check_count(planned.microbatches, mini_batch)
        self._optimizer = optimizer
        self._guard = Guard(self._break_off)
        self._efforts: list[Effort] = []
        self._borrowed = crew is not None
        self._crew = crew or Crew.start(cluster, wait=False)  # workers begin while we capture
        try:
            progress("capturing", 0, 1)
            if planned.measures and not cluster.described:
                warm.begin(self._crew)
            self._captured = captured or Captured(
                model, loss_fn, example, passes.dtypes, passes.sync_batch_norm,
                samples=-(-mini_batch // microbatches_of(planned)), split=planned.channels,
            )  # fmt: skip
            self._state, self._loss_state = states_of(model, loss_fn, self._captured)
            planned = _check_captured(self._captured, planned, passes)
            self._captured.leaves(*example)
            share_operators(self._captured, self._crew)
            check_cuts(planned.cuts or (), self._captured.layer_names)
            if microbatches_of(planned) > 1:
                check_loss(self._captured, -(-mini_batch // microbatches_of(planned)))
            infos = self._crew.infos
            used = infos if planned.plan is None else planned.plan.all_devices
            members = [infos[member] for member in used if member in infos]
            check_dtypes(self._captured.precision, members)
            planning = planning_for(
                self._captured, self._crew, optimizer, mini_batch, progress, self._efforts.append
            )
            plan, costs = planning.choose(planned)
            if microbatches_of(planned) == 1 and plan.rule.flushes and max(plan.replicas) > 1:
                check_loss(self._captured, -(-mini_batch // 2), replicas=True)
            boards = [board.id for board in cluster.described]
            check_fit(plan, infos, optimizer, updates, self._captured.sync_batch_norm, boards)
            check_boards(plan, cluster, infos)
            subject = Subject(self._captured, self._crew, plan, optimizer, passes, updates)
            check_settings(resume, subject)
            self._board_time = _time_of_boards(subject, costs)
            self._training = Training(subject, mini_batch, resume, progress)
            self._rebalancer = Rebalancer(
                self._training, self._crew, costs, fixed, planned.rebalance is not None
            )
            self._guard.checks.append(partial(check_unchanged, self._captured.watch))
            self._delivery = Delivery(self._training, self._guard, self._rebalancer)
        except BaseException:
            self.close()
            raise

    def step(self, x: Any, y: Any) -> float:
        """Train on one whole mini-batch, and return its mean loss.

        An asynchronous schedule flushes after the mini-batch, which is slow: use `run`.
        """
        return self._delivery.step(x, y).loss

    def run(self, batches: Iterable[tuple[Any, Any]]) -> Generator[Result, None, None]:
        """Train on a stream of mini-batches, and yield a result for each, in order.

        An asynchronous schedule does not flush between mini-batches, nor between one `run` and the
        next, so a result comes some mini-batches late. Other calls between two results may flush;
        no result is lost. If the caller stops early, the mini-batches under way are trained and
        their results dropped.
        """
        yield from self._delivery.run(batches)

    def rebalance(self, steps: int = HORIZON) -> Rebalanced:
        """Move layers if the best plan by `costs` saves more in `steps` steps than the move costs.

        Flushes first. Schedule, micro-batches, weights and members stay. Raises `HetpipeError` if
        the plan, its cuts or replicas were given, or gradients are accumulated.
        """
        with self._guard("rebalance"):
            self._delivery.settle()
            return self._rebalancer.rebalance(steps)

    def set_speed(self, member: str, speed: float) -> None:
        """Emulate another speed on a member from now on; see `Crew.set_speed`."""
        with self._guard("set_speed", alone=False):
            self._crew.set_speed(member, speed)

    def evaluate(self, x: Any, y: Any) -> float:
        """Return the mean loss of one mini-batch in eval mode, without gradients; flushes first.

        Compiles stages the first time, and for each new size of a mini-batch.
        """
        with self._guard("evaluate"):
            self._delivery.settle()
            return self._training.evaluate(x, y)

    def flush(self) -> None:
        """Wait until all mini-batches are applied, accumulated gradients too."""
        with self._guard("flush"):
            self._delivery.settle()
            self._training.apply()

    def gradients(self, x: Any, y: Any) -> tuple[float, dict[str, torch.Tensor]]:
        """Return loss and gradients (by parameter name) of one mini-batch; updates nothing."""
        with self._guard("gradients"):
            self.flush()
            loss, grads = gradients_of(self._training, x, y)
            return loss, as_tensors(grads)

    def diagnose(self, x: Any, y: Any) -> Diagnosis:
        """Compare every program of one mini-batch with torch in float64, and name the device, layer
        and operator where they differ, or where a value is not finite. Changes nothing.
        """
        from hetpipe.pipeline.diagnosing import diagnose_training

        with self._guard("diagnose"):
            self._delivery.settle_anyway()
            return diagnose_training(self._training, x, y)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the model's parameters and buffers under their original names, on the CPU."""
        with self._guard("state_dict"):
            self._delivery.settle()
            return self._state.now(self._training)

    def loss_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the loss's parameters and buffers under their original names, if it has any.

        In checkpoints, gradients and `decay_exclude` their names begin with `loss.`.
        """
        with self._guard("loss_state_dict"):
            self._delivery.settle()
            return self._loss_state.now(self._training)

    def save(self, directory: str | Path, *, force: bool = False) -> None:
        """Write a checkpoint, which replaces the one in that folder; flushes first.

        Raises `CheckpointError`; then the earlier checkpoint in the folder is still valid. Refuses
        weights that are not finite, or were trained with a loss that was not, unless `force`.
        """
        with self._guard("save"):
            self.flush()
            self._state.warn_of_extra()
            path, settings = (
                user_path(directory, CheckpointError),
                settings_of(self._training.subject),
            )
            write(path, self._training, self.plan, self._optimizer, settings, force)
            self._saved(directory)

    @classmethod
    def load(
        cls,
        directory: str | Path,
        model: torch.nn.Module,
        loss_fn: Callable[[Any, Any], Any],
        example: tuple[Any, Any],
        **options: Any,
    ) -> Pipeline:
        """Return a pipeline that continues where `save` was called; `options` as for `Pipeline`.

        It has the checkpoint's plan unless you give `plan` or one of its parts (`cuts`, `schedule`,
        `split` and so on). Training then gives the same weights as a pipeline that was flushed and
        never saved, bit for bit on one machine. Raises `CheckpointError` for damaged files, for
        another model or optimizer, and for another `seed`, `clip_norm`, `precision` and so on,
        unless `changed` names it.
        """
        saved = load_checkpoint(user_path(directory, CheckpointError))
        pipe = cls(model, loss_fn, example, resume=saved, **options)
        pipe._saved(directory)
        return pipe

    @property
    def costs(self) -> CostTable | None:
        """The profile's costs, scaled by the times of the last mini-batches; None without costs."""
        return self._rebalancer.costs

    @property
    def effort(self) -> dict[str, int]:
        """The work of the start, in counts; see `hetpipe.pipeline.effort`."""
        return effort_of(self._captured, self._efforts)

    @property
    def predicted(self) -> Timeline:
        """The plan's timeline, predicted with the costs that made it. Raises `HetpipeError`."""
        return self._rebalancer.predicted

    def corrected(self) -> Correction:
        """Return the plan's predicted step, corrected for the present speed of its devices.

        The last passes tell the speeds; before there are enough, short probes do (hundredths of a
        second). Flushes. Raises `HetpipeError` without costs.
        """
        with self._guard("corrected"):
            self._delivery.settle()
            moves = self._rebalancer
            return correction_of(moves.learning, self._crew, self.plan, moves.planned_by)


def _time_of_boards(subject: Subject, costs: CostTable | None) -> BoardTime | None:
    cluster = subject.crew.cluster
    if costs is None or not boards_of(subject.plan, cluster):
        return None
    return BoardTime(subject.captured, cluster, subject.optimizer, subject.plan, costs)


def _check_captured(captured: Captured, planned: PlanOptions, passes: PassOptions) -> PlanOptions:
    """Return the plan's options, with the splits of the captured model.

    Raises `HetpipeError` if the model was captured with other splits or pass options.
    """
    if passes.dtypes not in (type(passes.dtypes)(), captured.precision):
        raise HetpipeError(f"captured has {captured.precision}, not {passes.dtypes}")
    if passes.sync_batch_norm and not captured.sync_batch_norm:
        raise HetpipeError("captured has sync_batch_norm=False: capture it with True")
    if planned.plan is None and planned.split is None:
        return replace(planned, split=captured.split or None)
    if planned.channels != captured.split:
        raise HetpipeError(
            f"captured has split={captured.split}, not {planned.channels}: capture it with that"
        )
    return planned
