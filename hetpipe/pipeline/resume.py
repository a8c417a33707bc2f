"""Resume: saves a training in a checkpoint, and reads and checks a checkpoint to continue from."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import numpy as np

from hetpipe.capture.program import BUFFER, PARAM, STATE, Program, StageGraphs
from hetpipe.checkpoint.checkpoint import Checkpoint, save
from hetpipe.checkpoint.tensors import Array, Tensors
from hetpipe.errors import CheckpointError, PlanError
from hetpipe.optim.rule import AVERAGE, NO_OPTIMIZER
from hetpipe.pipeline.lossscale import ScaleState, Scaling
from hetpipe.plan.plan import Plan
from hetpipe.records import Count, Entries, Source
from hetpipe.wire.wire import host_dtype

if TYPE_CHECKING:
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.optim.rule import Optimizer

ROLES = (PARAM, BUFFER, STATE)
SCALE_SETTINGS = ("precision", "loss_scale")
"""The settings that choose the loss scale."""


class _WithCluster(Protocol):
    @property
    def cluster(self) -> Cluster: ...


class _WithCrew(Protocol):
    @property
    def crew(self) -> _WithCluster: ...


class Saved(Protocol):
    """The part of a training that a checkpoint keeps. The `Training` must be at rest."""

    steps: int
    not_finite: str | None
    updates: list[int]
    scaling: Scaling
    last_save: str
    """A text for messages that names the last checkpoint."""

    @property
    def setup(self) -> _WithCrew:
        """The crew, and everything else that the training was made with."""

    @property
    def plan(self) -> Plan:
        """The present plan."""

    def tensors(self, role: str) -> Tensors:
        """Return the present values of a role, which are read when they are needed."""


def write(
    directory: Path,
    training: Saved,
    optimizer: Optimizer,
    settings: Mapping[str, Any],
    names: Mapping[str, str],
    notes: Mapping[str, Any],
    force: bool = False,
) -> None:
    """Save a training, with `names` as in `Progress` and the caller's `notes`.

    Without `force`, raises `CheckpointError` if a value is not finite, or if a loss or gradient
    that was not finite has been applied.
    """
    values = {role: training.tensors(role) for role in ROLES}
    if not force:
        values = finite(directory, training, values)
    save(directory, values, manifest_of(training, optimizer, settings, names, notes))
    training.last_save = saved_text(training.steps, directory)


def manifest_of(
    training: Saved,
    optimizer: Optimizer,
    settings: Mapping[str, Any],
    names: Mapping[str, str],
    notes: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the values that a checkpoint keeps beside the tensors; `names` as `Progress.names`."""
    return {
        "step": training.steps,
        "updates": list(training.updates),
        "plan": json.loads(json.dumps(training.plan.to_json())),  # turns tuples into lists
        "members": list(training.setup.crew.cluster.ids),
        "optimizer": _described(optimizer),
        "loss_scale": asdict(training.scaling.state()),
        "settings": dict(settings),
        "names": dict(names),
        "notes": dict(notes),
    }


def saved_text(step: int, directory: Path | None) -> str:
    """Return the text of `Saved.last_save`."""
    return f"it was last saved at step {step} in {directory}"


def restore(
    training: Saved,
    saved: Checkpoint,
    settings: Mapping[str, Any],
    changed: Sequence[str],
    load: Callable[[Checkpoint, Sequence[int], int], None],
) -> None:
    """Continue a training, with its plan, from a checkpoint. `load` loads the stages.

    Raises `CheckpointError` if the checkpoint does not fit; then nothing has changed.
    """
    before = progress_of(saved)
    before.check_settings(settings, changed)
    updates = before.updates_under(training.plan)
    load(saved, updates, before.steps)
    training.steps, training.updates, training.not_finite = before.steps, updates, None
    if before.loss_scale is not None:
        unchanged = {**settings, **before.settings}  # early versions recorded no settings
        same = all(unchanged.get(name) == settings.get(name) for name in SCALE_SETTINGS)
        training.scaling.restore(before.loss_scale, same)
    training.last_save = saved_text(training.steps, saved.directory)


def finite(directory: Path, training: Saved, values: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """Return a training's values; to read one that is not finite raises `CheckpointError`.

    Raises `CheckpointError` if a loss or gradient that was not finite has been applied.
    """
    if training.not_finite is not None:
        raise CheckpointError(
            f"the content of {directory} is not replaced: {training.not_finite} This "
            "mini-batch has updated the weights; load() an earlier checkpoint, or save"
            " with force=True"
        )
    return {role: _finite(directory, role, tensors) for role, tensors in values.items()}


def _finite(directory: Path, role: str, tensors: Tensors) -> Tensors:
    """Return the same tensors; to read one that is not finite raises `CheckpointError`."""

    def each(names: Sequence[str]) -> Iterator[Array]:
        for name, value in zip(names, tensors.each(names), strict=True):
            if np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all():
                raise CheckpointError(
                    f"the content of {directory} is not replaced: the {role} "
                    f"{name!r} is not finite; load() an earlier checkpoint, or "
                    "save with force=True"
                )
            yield value

    return Tensors(tensors.outlines, each)


@dataclass(frozen=True)
class _OptimizerRecord:
    name: str
    state: tuple[str, ...]


@dataclass(frozen=True)
class _Record:
    """The manifest of a checkpoint. Early versions wrote no members, loss scale, settings, names
    or notes."""

    step: Count
    updates: Annotated[tuple[Count, ...], Entries(1)]
    plan: dict[str, Any]
    optimizer: _OptimizerRecord
    members: tuple[str, ...] = ()
    loss_scale: ScaleState | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """The progress of a training when it was saved."""

    steps: int
    updates: tuple[int, ...]
    """The number of updates, by stage."""
    plan: Plan
    loss_scale: ScaleState | None
    settings: Mapping[str, Any]
    """See `Setup.settings` in `hetpipe.pipeline.setup`."""
    notes: dict[str, Any]
    """The values that the caller of `Pipeline.save` gave."""
    optimizer: str = ""
    """The optimizer's name."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The names in the model's `state_dict`, each with the tensor's name in the checkpoint; empty
    if an early version wrote the checkpoint."""
    members: tuple[str, ...] = ()
    """The members of the cluster, also without layers; empty in checkpoints of early versions."""

    def updates_under(self, plan: Plan) -> list[int]:
        """Return the updates so far, by stage of `plan`.

        If the schedule, the replicas or the number of stages have changed, every stage gets the
        highest saved number.
        """
        same = self.plan.replicas == plan.replicas and self.plan.schedule == plan.schedule
        if same and len(self.updates) == len(plan.stages):
            return list(self.updates)
        return [max(self.updates)] * len(plan.stages)

    def check_settings(self, present: Mapping[str, Any], changed: Sequence[str]) -> None:
        """Raise `CheckpointError` for a setting that has changed and is not named by `changed`."""
        saved = self.settings
        if unknown := sorted(set(changed) - present.keys()):
            raise CheckpointError(
                f"changed={list(changed)}: a checkpoint keeps no setting {unknown[0]!r}; it keeps "
                f"{', '.join(present)}"
            )
        names = [
            name
            for name, value in saved.items()
            if name in present and present[name] != value and name not in changed
        ]
        if names:
            before = ", ".join(f"{name}={saved[name]!r}" for name in names)
            now = ", ".join(f"{name}={present[name]!r}" for name in names)
            raise CheckpointError(
                f"the checkpoint was trained with {before}, and would continue with {now}: give "
                f"the checkpoint's values, or allow the change by changed={names} (of `hetpipe "
                f"train`: {' '.join(f'--changed {name}' for name in names)})"
            )


def progress_of(checkpoint: Checkpoint) -> Progress:
    """Return the progress in a checkpoint. Raises `CheckpointError` if no pipeline wrote it."""
    record = Source("the checkpoint", CheckpointError).record(_Record, checkpoint.manifest)
    try:
        plan = Plan.from_json(record.plan)
    except PlanError as error:
        raise CheckpointError(f"the checkpoint: {error}") from error
    settings = {"ema": None, "loss_over": "micro-batch", **record.settings}
    return Progress(
        record.step, record.updates, plan, record.loss_scale, settings, record.notes,
        record.optimizer.name, record.names, record.members,
    )  # fmt: skip


def fit_states(tensors: Mapping[str, Tensors], stages: Sequence[StageGraphs]) -> dict[str, Tensors]:
    """Return a checkpoint's tensors, by role, for a training whose option `ema` may have changed,
    or for forwards alone.

    An average that the checkpoint lacks begins with the checkpoint's parameters. An average that
    the stages lack is left out, and so are all states if nothing is trained.
    """
    if all(stage.update is None for stage in stages):
        return {**tensors, STATE: Tensors.of({})}
    slots = [slot for stage in stages if stage.update for slot in stage.update.inputs]
    needed = {slot.name for slot in slots if slot.role == STATE and _is_average(slot.name)}
    states, params = tensors[STATE], tensors[PARAM]
    if needed and not any(map(_is_average, states)):
        parameters = {name: name.partition("/")[2] for name in needed}
        states = states.over(params.renamed({n: p for n, p in parameters.items() if p in params}))
    elif not needed:
        states = states.only([name for name in states if not _is_average(name)])
    return {**tensors, STATE: states}


def _is_average(state: str) -> bool:
    return state.startswith(f"{AVERAGE}/")


def check(
    manifest: Mapping[str, Any],
    tensors: Mapping[str, Tensors],
    stages: Sequence[StageGraphs],
    optimizer: Optimizer,
    unread: Collection[str],
) -> None:
    """Raise `CheckpointError` if the checkpoint belongs to another model or optimizer. The stages
    need not read the tensors that are named in `unread`."""
    saved = manifest.get("optimizer")
    if saved != _described(optimizer) and optimizer is not NO_OPTIMIZER:
        raise CheckpointError(
            f"the checkpoint's optimizer is {_text(saved)}, but {_text(_described(optimizer))} was "
            "given, and their states differ; resume with the checkpoint's optimizer (lr may "
            "differ); a new training needs another folder"
        )
    programs = [p for stage in stages for p in (stage.update, *_forwards(stage)) if p is not None]
    slots = {slot.key: slot for program in programs for slot in program.inputs}
    for role in ROLES:
        have = tensors[role].outlines if role in tensors else {}
        needed = {name: slot for (kind, name), slot in slots.items() if kind == role}
        extra = have.keys() - needed.keys() - set(unread)
        for name in sorted(extra | (needed.keys() - have.keys())):
            holds, lacks = ("checkpoint", "model") if name in have else ("model", "checkpoint")
            raise CheckpointError(
                f"the {holds} has the {role} {name!r}, which the {lacks} lacks: {OTHER_MODEL}"
            )
        for name, slot in needed.items():
            shape, dtype = have[name].shape, have[name].dtype
            if (shape, dtype) != (slot.shape, host_dtype(slot.dtype)):
                raise CheckpointError(
                    f"{role} {name!r} is {dtype}{list(shape)} in the checkpoint and "
                    f"{slot.dtype}{list(slot.shape)} in the model: {OTHER_MODEL}"
                )


OTHER_MODEL = "the checkpoint is of another model; a new training needs another folder"


def _forwards(stage: StageGraphs) -> list[Program]:
    return [passes.forward for passes in stage.passes.values()] or [*stage.inference.values()]


def _described(optimizer: Optimizer) -> dict[str, Any]:
    """Return the properties of an optimizer that decide which state it has."""
    slots = dict.fromkeys(slot for rule in optimizer.rules for slot in rule.state)
    return {"name": optimizer.name, "state": [slot for slot in slots if slot != AVERAGE]}


def _text(described: Any) -> str:
    if not isinstance(described, Mapping):
        return repr(described)
    state = ", ".join(described.get("state", [])) or "nothing"
    return f"{described.get('name')} (state: {state})"
