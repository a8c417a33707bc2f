"""Pipeline, the class that users call: starts the workers, captures, profiles, plans and trains
(stations 1 and 16 of docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hetpipe.capture.captured import Captured
from hetpipe.capture.export.example import Example
from hetpipe.capture.export.named_tensors import NamedTensors, check_capturable
from hetpipe.capture.whole_loss import capture_of
from hetpipe.checkpoint.checkpoint import Checkpoint
from hetpipe.checkpoint.series import load as load_checkpoint
from hetpipe.crew.crew import Crew
from hetpipe.environment import refuse_ranks
from hetpipe.errors import CheckpointError, HetpipeError
from hetpipe.files import user_path
from hetpipe.loop.loop import Loop
from hetpipe.loop.options import task_of
from hetpipe.optim.check import check_optimizer
from hetpipe.optim.rule import NO_OPTIMIZER
from hetpipe.pipeline.autosave import Autosave
from hetpipe.pipeline.average import check_average
from hetpipe.pipeline.delivery import Delivery
from hetpipe.pipeline.diagnosing import diagnose_training
from hetpipe.pipeline.gradients import gradients_of
from hetpipe.pipeline.guard import Guard
from hetpipe.pipeline.inference import check_given, no_loss, refuse_losses, refuse_training
from hetpipe.pipeline.journal import make_training
from hetpipe.pipeline.measurements import Measurements
from hetpipe.pipeline.model_state import as_tensors, states_of
from hetpipe.pipeline.move import HORIZON
from hetpipe.pipeline.options import records_of
from hetpipe.pipeline.planning import microbatches_of
from hetpipe.pipeline.rebalance import Rebalanced, Rebalancer
from hetpipe.pipeline.remote import Remote, refuse_remote
from hetpipe.pipeline.results import Result
from hetpipe.pipeline.saving import Saving
from hetpipe.pipeline.setup import resolve, set_up
from hetpipe.pipeline.starting import Starting
from hetpipe.pipeline.survival import begin_survival, end_survival, set_speed
from hetpipe.profile import warm
from hetpipe.profile.drift import Correction

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self, Unpack

    from hetpipe.callbacks.base import Callback
    from hetpipe.callbacks.history import History
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.cost.table import CostTable
    from hetpipe.diagnosis.record import Diagnosis
    from hetpipe.loop.batches import Source
    from hetpipe.loop.options import FitOptions
    from hetpipe.optim.rule import Optimizer
    from hetpipe.pipeline.forwards import Evaluation, Metric
    from hetpipe.pipeline.options import Options
    from hetpipe.profile.measure import Progress
    from hetpipe.profile.rounds import Effort

__all__ = ["Pipeline", "Result"]


class Pipeline(Saving):
    """A model in training on a cluster; use it as a context manager, on one thread at a time.

    `example` is one mini-batch `(x, y)`: tensors, or tuples or dicts of tensors, whose first axis
    is the samples. `loss_fn` takes the model's output and `y` and returns a mean over samples, or
    `(sum, count)`. If `loss_fn` is a module with parameters, the last stage trains them like the
    model's parameters. An `optimizer` of torch is read once, see `hetpipe.optim.from_torch`.
    Without an optimizer the pipeline only predicts and evaluates, and needs less memory; without
    `loss_fn` it only predicts.

    The planner chooses the parts of the plan that you leave out; `hetpipe.pipeline.options`
    describes every option. All errors are children of `HetpipeError`. `close` does not stop a
    `crew` (started workers) that the caller gives; a crew serves one pipeline at a time. In a
    terminal or a notebook the start shows its progress, unless `progress` is False or a function.

    An interrupt (Ctrl-C) waits until the call has ended, so that a mini-batch is trained completely
    or not at all. A second interrupt during this wait closes the pipeline.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[[Any, Any], Any] | None,
        example: tuple[Any, Any],
        *,
        cluster: Cluster,
        optimizer: Optimizer | torch.optim.Optimizer | None = None,
        progress: Progress | bool | None = None,
        captured: Captured | None = None,
        crew: Crew | None = None,
        resume: Checkpoint | None = None,
        **options: Unpack[Options],
    ) -> None:
        planned, passes, updates, saves, survival = records_of(options)
        check_capturable(model)
        trains, loss = optimizer is not None, loss_fn or no_loss
        check_given(loss_fn is not None, trains, passes, updates, saves)
        rule = NO_OPTIMIZER
        if trains:
            rule = check_optimizer(optimizer, NamedTensors(model, loss).parameters, updates.ema)
        cluster = cluster if crew is None else crew.cluster
        if cluster.connections is None:
            refuse_ranks()
        padded = Example(*example, passes.buckets)
        mini_batch = padded.samples
        self._guard = Guard(self._break_off)
        self._efforts: list[Effort] = []
        start = Starting(progress)
        self._is_lent = crew is not None
        self._autosave = Autosave(saves)
        resume, replans = self._autosave.begin(start.say) or resume, saves.checkpoint is not None
        try:
            planned, fixed = resolve(planned, passes, cluster, mini_batch, resume, replans)
            self._crew = crew or Crew.start(cluster, wait=False)  # workers begin while we capture
        except BaseException:
            self._autosave.close()
            raise
        try:
            start.show("capturing", 0, 1)
            if planned.measures and not cluster.described:
                warm.begin(self._crew)
            capture = capture_of(trains, passes.whole_loss)
            self._captured = captured or capture(
                model, loss, example if passes.buckets is None else padded,
                precision=passes.dtypes, sync_batch_norm=passes.sync_batch_norm,
                samples=-(-mini_batch // microbatches_of(planned)), split=planned.channels,
            )  # fmt: skip
            self._state, self._loss_state = states_of(model, loss, self._captured)
            self._autosave.meet(self._state)
            self._captured.leaves(*example)
            setup, costs = set_up(
                self._captured, self._crew, rule, (planned, passes, updates, survival), mini_batch,
                start.show, self._efforts.append,
            )  # fmt: skip
            self._training = make_training(setup, mini_batch, resume, start.show)
            self._autosave.continue_from(self._training.steps)
            self._measurements = Measurements(self._training, costs)
            self._rebalancer = Rebalancer(self._training, costs, fixed, bool(planned.rebalance))
            self._guard.checks += [self._captured.watch.check, *self._autosave.checks]
            self._guard.checks += [refuse_training] if not trains else []
            self._guard.checks += [refuse_losses] if loss_fn is None else []
            self._survival = begin_survival(self._training, self._renew)
            self._delivery = Delivery(
                self._training, self._guard, self._rebalancer, self._autosave, self._survival
            )
            start.end(self.effort)
        except BaseException:
            start.end({})
            self.close()
            raise

    def step(self, x: Any, y: Any) -> float:
        """Train on one mini-batch, flush, return the mean loss; without flushes `run` is faster."""
        return self._delivery.step(x, y).loss

    def run(self, batches: Iterable[tuple[Any, Any]] | Remote) -> Generator[Result, None, None]:
        """Train on all mini-batches of `batches`, and yield a result for each, in order.

        The workers read the mini-batches of a `Remote` themselves, on their hosts.

        An asynchronous schedule does not flush between mini-batches, nor between two runs, so a
        result comes some mini-batches late. Other calls between two results may flush, and lose no
        result. If the caller stops early, the mini-batches under way are trained without results.
        """
        yield from self._delivery.run(batches)

    def fit(
        self,
        batches: Source,
        epochs: int,
        *,
        eval_data: Source | None = None,
        metrics: Mapping[str, Metric] | None = None,
        callbacks: Sequence[Callback] = (),
        **options: Unpack[FitOptions],
    ) -> History:
        """Train for a number of epochs, evaluate after each, and return the history.

        `batches` and `eval_data` are iterables of mini-batches `(x, y)`, as a DataLoader, or
        functions that return one for the number of an epoch, from 1. `metrics` as in `evaluate`.
        `hetpipe.loop.options` describes the options: `split`, `folder`, `resume`, `save_every`,
        `monitor`, `mode`, `patience`, `progress`, `ema`. Every epoch ends with a flush. Raises
        `HetpipeError` for wrong options before it trains.

        An interrupt waits until the update is complete. Then `fit` saves, if it has a folder.
        """
        refuse_remote(batches, eval_data)
        task = task_of(epochs, batches, eval_data, metrics, callbacks, options)
        if task.settings.ema:
            check_average(self._training)
        with self._guard("fit"):
            accumulate = self._training.setup.updates.accumulate
            return Loop(self, task, self._guard, accumulate).run()

    def rebalance(self, steps: int = HORIZON) -> Rebalanced:
        """Flush, and move layers if the best plan saves more than 5 % of a step, and in `steps`
        steps more seconds than the move takes. Raises `HetpipeError` if the plan is fixed, or
        gradients are accumulated."""
        return self._delivery.at_rest("rebalance", lambda: self._rebalancer.rebalance(steps))

    def set_speed(self, member: str, speed: float) -> None:
        """Emulate another speed on a member from now on; see `Crew.set_speed`. With
        `survive="auto"`, a lost member has it once it is back."""
        with self._guard("set_speed", alone=False):
            set_speed(self._survival, lambda: self._training.setup.crew, member, speed)

    def evaluate(
        self,
        batches: Iterable[tuple[Any, Any]],
        metrics: Mapping[str, Metric] | None = None,
        *,
        ema: bool = False,
    ) -> Evaluation:
        """Return the mean loss and metrics of the mini-batches `(x, y)`, in eval mode.

        A metric is a function of the model's output and `y` that returns a mean over samples, or an
        object with `update(output, y)` and `compute()`. With `ema` the average of the weights
        computes. Flushes, and compiles stages for each new size of a mini-batch.
        """
        return self._delivery.evaluate(batches, {} if metrics is None else metrics, ema)

    def predict(self, x: Any, *, ema: bool = False) -> Any:
        """Return the model's output for `x` in eval mode, on the CPU, in the model's own structure.

        With `ema` the average of the weights computes. Flushes, and compiles stages for each new
        number of samples. Raises `HetpipeError` if the output has a tensor whose first dimension is
        not the samples.
        """
        refuse_remote(x)
        (output,) = self._delivery.predict([x], ema)
        return output

    def predict_batches(self, xs: Iterable[Any], *, ema: bool = False) -> Iterator[Any]:
        """Yield `predict(x)` for each x. The pipeline works on later ones meanwhile."""
        yield from self._delivery.predict(xs, ema)

    def gradients(self, x: Any, y: Any) -> tuple[float, dict[str, torch.Tensor]]:
        """Flush, and return loss and gradients (by parameter name) of one mini-batch."""
        with self._guard("gradients"):
            self.flush()
            compute = partial(gradients_of, self._training, x, y)
            loss, grads = self._delivery.call("gradients", compute)
            return loss, as_tensors(grads)

    def diagnose(self, x: Any, y: Any) -> Diagnosis:
        """Compare every program of one mini-batch with torch in float64, and name the device, layer
        and operator where results differ or are not finite. The training does not change."""
        with self._guard("diagnose"):
            self._delivery.call("diagnose", self._delivery.settle_anyway)
            return self._delivery.call("diagnose", partial(diagnose_training, self._training, x, y))

    @classmethod
    def load(
        cls,
        directory: str | Path,
        model: torch.nn.Module,
        loss_fn: Callable[[Any, Any], Any] | None,
        example: tuple[Any, Any],
        **options: Any,
    ) -> Pipeline:
        """Return a pipeline that continues where `save` was called; `options` as for `Pipeline`.

        From a folder of `checkpoint=` the newest valid one is loaded.
        It has the checkpoint's plan unless you give `plan` or a part (`cuts`, `split` and so on).
        With the checkpoint's plan, on the same machine, training gives the same weights, bit for
        bit, as if the pipeline had only been flushed. Raises `CheckpointError` for damaged files,
        another model or optimizer, and a changed setting (as `seed`) that `changed` does not name.
        """
        saved = load_checkpoint(user_path(directory, CheckpointError))
        return cls(model, loss_fn, example, resume=saved, **options)

    def close(self) -> None:
        """Stop the workers, unless the caller gave the crew, and wait for a checkpoint that is
        being written. Raises `CheckpointError` if it fails. Does nothing in a forked process."""
        if not self._guard.owns:
            return
        end_survival(self._survival)
        if not self._is_lent:
            self._crew.close()
        self._autosave.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with suppress(*[CheckpointError] if kind else []):  # the log has it
            self.close()

    def __reduce__(self) -> NoReturn:
        cure = "write it with save(folder) for Pipeline.load, or take its state_dict()"
        raise HetpipeError(f"a pipeline, whose workers are processes, cannot be copied: {cure}")

    def corrected(self) -> Correction:
        """Flush, and return the plan's predicted step, corrected for the present speed of devices:
        by their last passes, or by short probes. Raises `HetpipeError` without costs."""
        return self._delivery.at_rest("corrected", self._rebalancer.corrected)

    def _renew(self, costs: CostTable) -> None:
        """Use the crew and the plan that follow a loss."""
        self._crew, self._is_lent = self._training.setup.crew, False
        self._measurements.renew(costs)
        self._rebalancer.renew(costs)

    def _break_off(self, call: str) -> str:
        """Close after a second interrupt, and return the error message for later calls."""
        with suppress(CheckpointError):
            self.close()
        where = f"closed this pipeline at step {self.steps}; {self._training.last_save}"
        return f"a second interrupt in {call}() {where}"
