"""Exports the kernels of a plan's stages as bundles, for offline compilers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hetpipe.errors import BackendError, PlanError
from hetpipe.pipeline.batches import micro_sizes
from hetpipe.pipeline.lossscale import choose_scaling, watch_gradients
from hetpipe.pipeline.options import PassOptions, UpdateOptions
from hetpipe.pipeline.stages import loading_of
from hetpipe.profile.drift import probes_of
from hetpipe.profile.probing import NBYTES, ORDERS, probe_graphs
from hetpipe.sdk.formats.bundle import Manifest, SourceEntry, sha256_of, write_bundle
from hetpipe.wire.wire import Content
from hetpipe.words import words

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.capture.program import StageGraphs
    from hetpipe.cost.board import Board
    from hetpipe.cost.table import CostTable
    from hetpipe.crew.workers import Workers
    from hetpipe.optim.rule import Optimizer
    from hetpipe.plan.plan import Plan
    from hetpipe.sdk.formats.bundle import Exported
    from hetpipe.sdk.info import DeviceInfo


@dataclass(frozen=True)
class Exportable:
    """A training to export; its options decide which programs the stages have."""

    captured: Captured
    plan: Plan
    optimizer: Optimizer
    costs: CostTable | None = None
    """The costs of the plan."""
    passes: PassOptions = PassOptions()  # noqa: RUF009 - frozen
    updates: UpdateOptions = UpdateOptions()  # noqa: RUF009 - frozen
    evaluates: bool = False
    """Whether to export the forwards of evaluation as well."""
    stand_in: str | None = None
    """A member; if given, all stages are written for its device, not for the plan's members."""

    @property
    def placed(self) -> Plan:
        """The plan; if there is a stand-in, all stages of the plan are on it."""
        if self.stand_in is None:
            return self.plan
        stages = [
            replace(stage, devices=(self.stand_in,) * len(stage.devices))
            for stage in self.plan.stages
        ]
        return replace(self.plan, stages=tuple(stages))

    def graphs(self, workers: Workers) -> list[list[StageGraphs]]:
        """Return the graphs of all replicas, by stage. Raises `CaptureError` and `HetpipeError`."""
        plan, captured = self.plan, self.captured
        scaling = choose_scaling(
            self.updates.loss_scale, captured.precision.compute, not plan.rule.flushes
        )
        clip = watch_gradients(self.updates.clip, scaling, not plan.rule.flushes)
        loading = loading_of(captured, plan, self.optimizer, workers, self.passes.recompute, clip)
        sizes = set(micro_sizes(plan.mini_batch, plan.microbatches))
        evaluated = sizes if self.evaluates else set()
        return replace(loading, plan=self.placed, ahead=False).graphs(
            {Content.FORWARD: sizes, Content.EVALUATION: evaluated}
        )

    def probes(self, member: str) -> dict[str, bytes]:
        """Return the programs of a member's probe, which corrects predictions."""
        probe = None if self.costs is None else probes_of(self.costs).get(member)
        sizes = (ORDERS[0], NBYTES[0]) if probe is None else (probe.order, probe.nbytes)
        return probe_graphs(*sizes)


@dataclass(frozen=True)
class Written:
    """A stage's written bundle, or the reason why the stage has none."""

    stage: int
    replica: int
    member: str
    folder: Path | None = None
    manifest: Manifest | None = None
    why: str = ""


def check_layers(plan: Plan, captured: Captured) -> None:
    """Raise `PlanError` if a plan belongs to another model."""
    if plan.layers != tuple(captured.layer_names):
        raise PlanError(
            f"the plan has {len(plan.layers)} layers, {plan.layers[0]} to "
            f"{plan.layers[-1]}, but the model has {len(captured.layer_names)}, "
            f"{captured.layer_names[0]} to {captured.layer_names[-1]}: give the plan's"
            " model"
        )


def export(
    training: Exportable,
    workers: Workers,
    folder: Path,
    boards: Mapping[str, Board],
    command: str,
) -> list[Written]:
    """Write a bundle for each stage and replica: `folder`/stage-0, or stage-0.1 for replica 1.

    `boards` maps members of the plan to boards, which know their compilers' commands. `command` is
    the command line that repeats the export. A stage on a device that exports nothing has a reason
    instead of a bundle. Raises `BackendError` if no device exports, and `PlanError` if the plan
    names unknown members.
    """
    plan, infos = training.placed, workers.infos
    lacking = _lacking(plan, infos)
    results = []
    for number, replicas in enumerate(training.graphs(workers)):
        for replica, graphs in enumerate(replicas):
            member = plan.stages[number].devices[replica]
            if member in lacking:
                results.append(Written(number, replica, member, why=lacking[member]))
                continue
            args = (graphs, training.probes(member))
            ((exported, facts),) = workers.call([member], "hetpipe.worker.divided:export", *args)
            board = boards.get(training.plan.stages[number].devices[replica])
            manifest = Manifest(
                plan.model, number, replica, infos[member].id, facts, board.id if board else "",
                _compiler(board), command, exported.programs, _sources(exported, board),
            )  # fmt: skip
            place = folder / (f"stage-{number}.{replica}" if replica else f"stage-{number}")
            texts = {source.file: source.text for source in exported.sources}
            manifest = write_bundle(place, manifest, texts)
            results.append(Written(number, replica, member, place, manifest))
    return results


def _lacking(plan: Plan, infos: Mapping[str, DeviceInfo]) -> dict[str, str]:
    """Return the members whose devices export nothing, with reasons; raise `export`'s errors."""
    for number, stage in enumerate(plan.stages):
        for member in stage.devices:
            if member not in infos:
                raise PlanError(
                    f"stage {number} of the plan is on {member!r}, but the cluster"
                    f" has {words(infos)}: name the plan's devices, or one device "
                    "for all stages with --device"
                )
    lacking = {
        member: f"backend {infos[member].backend!r} of {infos[member].id} exports no kernels"
        for member in plan.all_devices
        if not infos[member].capabilities.exports
    }
    if len(lacking) == len(set(plan.all_devices)):
        reasons = "; ".join(dict.fromkeys(lacking.values()))
        raise BackendError(
            f"nothing to export: {reasons}; name, by --device, a device that exports kernels"
        )
    return lacking


def _compiler(board: Board | None) -> str:
    if board is None:
        return "none is known: no board was named"
    return "none is known for this board" if board.offline is None else board.offline.compiler


def _sources(exported: Exported, board: Board | None) -> tuple[SourceEntry, ...]:
    return tuple(
        SourceEntry(
            source.file,
            sha256_of(source.text.encode()),
            source.options,
            source.kernels,
            _commands(board, source.file, source.options, [k.name for k in source.kernels]),
            None,
        )
        for source in exported.sources
    )


def _commands(
    board: Board | None, file: str, options: Sequence[str], kernels: Sequence[str]
) -> tuple[str, ...]:
    if board is None or board.offline is None:
        return ()
    return board.offline.commands(Path(file).stem, file, options, kernels)
