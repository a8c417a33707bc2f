"""Options of a pipeline, as records that check themselves.

`Pipeline` takes the fields of all records as keywords. A new option needs a field of a
record, a line of `Options`, and the code that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from hetpipe.errors import HetpipeError, PlanError
from hetpipe.pipeline.lossscale import LossScale
from hetpipe.plan.plan import splits_of
from hetpipe.schedule.rule import rule_of
from hetpipe.schedule.weights import policy_for, policy_of
from hetpipe.wire.messages import Clip
from hetpipe.words import choices

if TYPE_CHECKING:
    from hetpipe.buckets import Buckets
    from hetpipe.capture.precision import Precision
    from hetpipe.cost.table import CostTable
    from hetpipe.plan.plan import Plan


SURVIVES = AUTO, OFF = ("auto", "off")
MICRO_BATCH, MINI_BATCH = LOSSES_OVER = ("micro-batch", "mini-batch")


class Options(TypedDict, total=False):
    """The keywords of `Pipeline`, for type checkers; the records below explain them."""

    plan: Plan | None
    costs: CostTable | None
    cuts: Sequence[int] | None
    replicas: Sequence[int] | None
    microbatches: int | None
    schedule: str
    weights: str
    split: Mapping[str, int] | None
    priced: bool
    rebalance: str | None
    recompute: str | Sequence[str]
    precision: str | None
    cut_dtype: str | None
    sync_batch_norm: bool
    loss_over: str
    buckets: Buckets | Sequence[int] | None
    check_finite: bool
    pass_limit_s: float | None
    seed: int
    clip_norm: float | None
    clip_each: bool
    accumulate: int
    loss_scale: float | LossScale | None
    ema: float | None
    changed: Sequence[str]
    checkpoint: str | Path | None
    every: int
    keep: int
    survive: str
    spares: Sequence[str]
    snapshot_every: int | None
    snapshot_nbytes: int | None


@dataclass(frozen=True)
class PlanOptions:
    """Options of the plan. Raises `HetpipeError` for options that no plan can satisfy."""

    plan: Plan | None = None
    """A plan; it replaces `cuts`, `replicas`, `microbatches`, `schedule`, `weights` and `split`."""
    costs: CostTable | None = None
    """The costs with which `plan` was made. Without this option hetpipe uses stored costs, or
    measures costs if `priced`, `rebalance` or `survive` is given."""
    cuts: Sequence[int] | None = None
    """The number of the first layer of every stage but the first."""
    replicas: Sequence[int] | None = None
    """The number of replicas of each stage; stages take the cluster's members in order."""
    microbatches: int | None = None
    schedule: str = "auto"
    weights: str = "auto"
    """The policy for versions of the weights, see `hetpipe.schedule.weights`."""
    split: Mapping[str, int] | None = None
    """Layers to split in two, and the output channels of the first part of each layer."""
    priced: bool = False
    """Whether costs are measured even if no decision needs them."""
    rebalance: str | None = None
    """`auto`: layers move between steps when the devices' speeds have changed."""

    def __post_init__(self) -> None:
        splits_of(self.split)
        if self.asked and self.plan is not None:
            raise HetpipeError(
                f"the plan already contains {', '.join(self.asked)}: remove these options or the "
                "plan"
            )
        if self.microbatches is not None:
            _check_count("microbatches", self.microbatches)
        if self.rebalance not in (None, "auto"):
            raise HetpipeError(
                f"rebalance={self.rebalance!r}: give 'auto', or leave the option out and call "
                "rebalance()"
            )
        for replicas in self.replicas or ():
            _check_count("replicas", replicas)
        self._check_names()
        cuts = list(self.cuts or ())
        for cut in cuts:
            _check_count("cuts", cut)
        if cuts != sorted(set(cuts)):
            raise PlanError(f"cuts {cuts}: give indices of layers in ascending order, each once")
        if self.replicas is not None and len(self.replicas) != len(cuts) + 1:
            raise PlanError(
                f"replicas {list(self.replicas)} are of {len(self.replicas)} stages, and cuts "
                f"{cuts} make {len(cuts) + 1}: give a number of replicas for each stage"
            )

    @property
    def decided(self) -> bool:
        """Whether the options decide everything, so that no choice is left to costs."""
        parts = (self.cuts, self.microbatches, None if self.schedule == "auto" else self.schedule)
        return self.plan is not None or (self.replicas is None and None not in parts)

    @property
    def measures(self) -> bool:
        """Whether costs must be measured."""
        return not self.decided or self.priced or self.rebalance is not None

    @property
    def channels(self) -> dict[str, int]:
        """The output channels of the first part of each split layer, by the layer's name."""
        splits = splits_of(self.split) if self.plan is None else self.plan.splits
        return {split.layer: split.channels for split in splits}

    @property
    def asked(self) -> list[str]:
        """The names of the options that were given and that a plan would decide."""
        return [name for name, value in self.keywords.items() if value not in (None, "auto")]

    @property
    def keywords(self) -> dict[str, Any]:
        """The options that a plan would decide, as keywords of `Pipeline`."""
        decided = ("cuts", "replicas", "microbatches", "schedule", "weights", "split")
        return {name: getattr(self, name) for name in decided}

    def _check_one_stage(self) -> None:
        """Raise `PlanError` for several stages under a schedule that has only one."""
        rule, replicas = rule_of(self.schedule), list(self.replicas or ())
        if not rule.averages and (self.cuts or len(replicas) > 1):
            raise PlanError(
                f"{rule.name} has 1 stage, the whole model on every replica, so cuts "
                f"{list(self.cuts or ())} and replicas {replicas} do not fit: leave out cuts, and "
                "give one number of replicas, as [2], or none; or use pipedream"
            )

    def _check_names(self) -> None:
        """Raise `HetpipeError` for an unknown schedule or policy, or if schedule and policy do not
        fit."""
        for name in ("schedule", "weights"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise HetpipeError(f"{name}={value!r}: give a name, as text")
        if self.schedule != "auto":
            policy_for(rule_of(self.schedule), self.weights)
            self._check_one_stage()
        elif self.weights != "auto" and not policy_of(self.weights).flushes:
            raise PlanError(
                f"weights={self.weights!r} goes with an asynchronous schedule: give such a "
                "schedule as well, for example schedule='pipedream'"
            )


@dataclass(frozen=True)
class PassOptions:
    """Options of forwards and backwards."""

    recompute: str | Sequence[str] = "none"
    """`inputs` (stages keep only their inputs, and backwards repeat the forward), `min-cut` (stages
    keep few values) or `none`; for all stages, or one per stage."""
    precision: str | None = None
    """`bfloat16` or `float16`: the dtype in which passes compute."""
    cut_dtype: str | None = None
    """`float16`: the dtype of tensors that cross a cut."""
    sync_batch_norm: bool = False
    """Whether replicas that divide micro-batches share the statistics of batch norms."""
    loss_over: str = MICRO_BATCH
    """`micro-batch`: each micro-batch has a loss. `mini-batch`: all outputs together have one loss,
    which torch computes in the pipeline's process, under the schedule `gpipe`."""
    buckets: Buckets | Sequence[int] | None = None
    """The lengths to which batches of varying length are padded; see `hetpipe.buckets`."""
    check_finite: bool = False
    """Whether to check that all outputs of passes are finite; the check slows passes down."""
    pass_limit_s: float | None = None
    """Seconds after which a pass is stuck. None: no limit; with `survive` one by recent steps."""
    seed: int = 0
    """The seed of dropout."""

    def __post_init__(self) -> None:
        if self.loss_over not in LOSSES_OVER:
            raise HetpipeError(
                f"loss_over={self.loss_over!r} is not known; {choices(self.loss_over, LOSSES_OVER)}"
            )
        if self.pass_limit_s is not None and not _is_positive(self.pass_limit_s):
            raise HetpipeError(f"pass_limit_s={self.pass_limit_s!r}: give seconds above 0")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise HetpipeError(f"seed={self.seed!r}: give a whole number")

    @property
    def whole_loss(self) -> bool:
        """Whether all outputs of a mini-batch together have one loss."""
        return self.loss_over == MINI_BATCH

    @property
    def dtypes(self) -> Precision:
        """The dtypes of passes and of cuts. Raises `HetpipeError`."""
        from hetpipe.capture.precision import Precision  # it loads torch

        return Precision(self.precision, self.cut_dtype)


@dataclass(frozen=True)
class UpdateOptions:
    """Options of updates."""

    clip_norm: float | None = None
    """The largest norm of all gradients together; with `clip_each`, of each stage's gradients."""
    clip_each: bool = False
    accumulate: int = 1
    """The number of mini-batches whose mean gradient makes one update."""
    loss_scale: float | LossScale | None = None
    ema: float | None = None
    """The decay of an exponential moving average of the weights; None keeps no average."""
    changed: Sequence[str] = ()
    """Names of settings that may differ from the checkpoint's settings."""

    def __post_init__(self) -> None:
        if isinstance(self.changed, str):
            raise HetpipeError(f"changed={self.changed!r}: give a list, as [{self.changed!r}]")
        _check_count("accumulate", self.accumulate)
        if self.clip_norm is not None and not _is_positive(self.clip_norm):
            raise HetpipeError(f"clip_norm={self.clip_norm!r}: give a finite number above 0")
        if self.ema is not None and not (_is_positive(self.ema) and self.ema < 1):
            raise HetpipeError(
                f"ema={self.ema!r}: give the decay of the average, a number above 0 and below 1 "
                "such as 0.999, or leave it out"
            )
        rule = self.loss_scale
        if not (rule is None or isinstance(rule, LossScale) or _is_positive(rule)):
            raise HetpipeError(
                f"loss_scale={rule!r}: give a finite number above 0, or hp.LossScale(...)"
            )

    @property
    def clip(self) -> Clip | None:
        """The clip of gradients, if there is one."""
        return None if self.clip_norm is None else Clip(self.clip_norm, self.clip_each)


@dataclass(frozen=True)
class SaveOptions:
    """Options of automatic checkpoints."""

    checkpoint: str | Path | None = None
    """The folder of the checkpoints; a pipeline continues from the newest one there."""
    every: int = 100
    """The number of mini-batches between two checkpoints."""
    keep: int = 3
    """The number of checkpoints that stay."""

    def __post_init__(self) -> None:
        _check_count("every", self.every)
        _check_count("keep", self.keep)
        defaults = {field.name: field.default for field in fields(self)}
        names = [name for name, default in defaults.items() if getattr(self, name) != default]
        if names and self.checkpoint is None:
            raise HetpipeError(f"{names[0]}={getattr(self, names[0])!r}: give checkpoint= as well")


@dataclass(frozen=True)
class SurvivalOptions:
    """Options for the loss of devices."""

    survive: str = OFF
    """`auto`: a training continues without lost devices. `off`: a loss ends it."""
    spares: Sequence[str] = ()
    """Members that have no layers until another member is lost."""
    snapshot_every: int | None = None
    """Mini-batches between two snapshots. By default a snapshot costs little, and a replay takes
    about a second."""
    snapshot_nbytes: int | None = None
    """The most bytes that snapshots and kept mini-batches may take in this process's memory; by
    default half of the free memory."""

    def __post_init__(self) -> None:
        if self.survive not in SURVIVES:
            raise HetpipeError(
                f"survive={self.survive!r} is not known; {choices(str(self.survive), SURVIVES)}"
            )
        if isinstance(self.spares, str):
            raise HetpipeError(f"spares={self.spares!r}: give a list, as [{self.spares!r}]")
        for name in ("snapshot_every", "snapshot_nbytes"):
            if (value := getattr(self, name)) is not None:
                _check_count(name, value)
        given = [name for name in ("spares", "snapshot_every", "snapshot_nbytes")
                 if getattr(self, name)]  # fmt: skip
        if given and not self.survives:
            raise HetpipeError(f"{given[0]} is given without survive='auto': give both, or neither")

    @property
    def survives(self) -> bool:
        """Whether a training continues without a lost device."""
        return self.survive == AUTO


Records = tuple[PlanOptions, PassOptions, UpdateOptions, SaveOptions, SurvivalOptions]


def records_of(options: Mapping[str, Any]) -> Records:
    """Return the options as records. Raises `HetpipeError` for an unknown option."""
    kinds = (PlanOptions, PassOptions, UpdateOptions, SaveOptions, SurvivalOptions)
    names = {kind: [field.name for field in fields(kind)] for kind in kinds}
    keywords = [name for of_kind in names.values() for name in of_kind]
    for name in options:
        if name not in keywords:
            raise HetpipeError(f"a pipeline has no option {name!r}; {choices(name, keywords)}")
    planned, passes, updates, saves, survival = (
        kind(**{name: options[name] for name in names[kind] if name in options}) for kind in kinds
    )
    assert isinstance(planned, PlanOptions)
    assert isinstance(passes, PassOptions)
    assert isinstance(updates, UpdateOptions)
    assert isinstance(saves, SaveOptions)
    assert isinstance(survival, SurvivalOptions)
    return planned, passes, updates, saves, survival


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise HetpipeError(f"{name}={value!r}: give a whole number of 1 or more")


def _is_positive(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 < value < math.inf
