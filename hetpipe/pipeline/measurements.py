"""Measurements of the last mini-batches, and modelled times for plans with boards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hetpipe.errors import HetpipeError
from hetpipe.pipeline.batches import size_of
from hetpipe.pipeline.fit import boards_of
from hetpipe.pipeline.learning import sums_of
from hetpipe.plan.pricing import predict, predicted_step_s, stage_times
from hetpipe.profile.boards import modelled_costs
from hetpipe.schedule.lanes import laned_stages
from hetpipe.simulate.simulator import simulate

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.cost.table import CostTable
    from hetpipe.crew.crew import Crew
    from hetpipe.crew.request import StepResult
    from hetpipe.pipeline.setup import Setup
    from hetpipe.pipeline.training import Ran, Training
    from hetpipe.plan.plan import Plan
    from hetpipe.profile.rounds import Effort
    from hetpipe.simulate.timeline import Timeline
    from hetpipe.simulate.times import StageTimes

MODELLED = "modelled"


class Measurements:
    """The timelines and bytes of the last mini-batches.

    A property raises `HetpipeError` if it needs a mini-batch and none has run. If the plan has
    boards, `timeline` and `modelled_step_s` are modelled from the plan's `costs`.
    """

    def __init__(self, training: Training, costs: CostTable | None) -> None:
        self._training = training
        self.renew(costs)

    def renew(self, costs: CostTable | None) -> None:
        """Use another plan and its costs from now on."""
        setup = self._training.setup
        with_boards = costs is not None and boards_of(self._training.plan, setup.crew.cluster)
        self._board_time = BoardTime(setup, costs) if costs is not None and with_boards else None

    @property
    def _crew(self) -> Crew:
        return self._training.setup.crew

    @property
    def timeline(self) -> Timeline:
        """The measured timeline; for a plan with boards, the timeline in modelled time."""
        if self._board_time is None:
            return replace(self._measured("timeline"), label=self._training.plan.label)
        ran, walls = self._ran("timeline")
        return self._board_time.timeline(ran, walls)

    @property
    def wall_timeline(self) -> Timeline:
        """The timeline by this machine's clock; rows of boards also name the numerics."""
        wall = self._measured("wall_timeline")
        if self._board_time is None:
            return replace(wall, label=self._training.plan.label)
        names = {m.id: f"{m.id}: {m.numerics}" for m in self._crew.cluster.described}
        parts = (name.partition(" lane ") for name in wall.workers)
        workers = tuple(names.get(id, id) + lane + number for id, lane, number in parts)
        return replace(wall, workers=workers, label=f"{self._crew.label} on numerics")

    @property
    def modelled_step_s(self) -> float | None:
        """Modelled seconds of the last mini-batch; None without boards in the plan."""
        if self._board_time is None:
            return None
        return self._board_time.step_s(*self._ran("modelled_step_s"))

    @property
    def peak_nbytes(self) -> tuple[int, ...]:
        """By stage, the most bytes of buffers that a device had in the last mini-batches."""
        results = self._last_results("peak_nbytes")
        return tuple(map(max, zip(*(result.peak_nbytes for result in results), strict=True)))

    @property
    def device_nbytes(self) -> dict[str, int]:
        """By member, the bytes in use after the last mini-batch, if its device counts them."""
        return dict(self._last_results("device_nbytes")[-1].device_nbytes)

    def _last_results(self, asked: str) -> Sequence[StepResult]:
        """Return the results of the last mini-batches. Raises `HetpipeError` if none has run."""
        if not self._training.recent:
            raise HetpipeError(f"no step has been taken yet: call step() before {asked}")
        return self._training.recent

    def _measured(self, asked: str) -> Timeline:
        results = self._last_results(asked)
        spans = tuple(span for result in results for span in result.timeline.spans)
        return replace(results[0].timeline, spans=spans)

    def _ran(self, asked: str) -> tuple[Ran, list[Timeline]]:
        """Return the last run and its measured timelines."""
        walls = [result.timeline for result in self._last_results(asked)]
        assert self._training.ran is not None
        return self._training.ran, walls


@dataclass(frozen=True)
class BoardTime:
    """The modelled times of a plan with boards; `costs` are the costs that made the plan.

    The executed schedule is simulated. A pass on a board takes its modelled seconds, a pass on an
    attached device the mean of its last measured seconds, and a transfer the seconds of the costs.
    The schedule fixes the order of all actions, so the numerics' speed changes no modelled time.
    """

    setup: Setup
    costs: CostTable

    def timeline(self, ran: Ran, walls: Sequence[Timeline]) -> Timeline:
        """Return the modelled timeline of the last run, whose measured timelines are `walls`.

        A stream's timeline has as many mini-batches as `walls`, and starts with an empty pipeline.
        Raises `HetpipeError` if the plan has replicas and is made for mini-batches of another size.
        """
        plan, costs, times = self._priced(ran, walls)
        if ran.schedule is None:
            timeline = predict(plan, costs, times=times, mini_batches=len(walls))
        else:
            workers = tuple(dict.fromkeys(plan.devices))
            timeline = simulate(ran.schedule, times, workers=workers)
        return replace(timeline, label=MODELLED)

    def step_s(self, ran: Ran, walls: Sequence[Timeline]) -> float:
        """Return modelled seconds per mini-batch; for a stream, with a full pipeline."""
        if ran.schedule is None:
            return predicted_step_s(*self._priced(ran, walls))
        return self.timeline(ran, walls).total_s

    def _priced(self, ran: Ran, walls: Sequence[Timeline]) -> tuple[Plan, CostTable, StageTimes]:
        plan, costs = self._at(ran.samples)
        laned = set() if ran.schedule is None else laned_stages(ran.schedule)
        return plan, costs, self._with_measured(stage_times(plan, costs), walls, laned)

    def _at(self, samples: tuple[int, ...]) -> tuple[Plan, CostTable]:
        """Return plan and costs for a mini-batch of these micro-batches."""
        setup, plan = self.setup, self.setup.plan
        if (size_of(samples), len(samples)) == (plan.mini_batch, plan.microbatches):
            return plan, self.costs
        if max(plan.replicas) > 1:
            raise HetpipeError(
                f"a mini-batch of {size_of(samples)} samples has no modelled time: replicas were "
                f"planned for {plan.mini_batch} samples; make a plan for {size_of(samples)}"
            )
        size = max(samples)
        modelled = modelled_costs(setup.captured, setup.crew.cluster, setup.optimizer, [size])[size]
        devices = {**self.costs.devices, **modelled.devices}
        costs = replace(modelled, devices=devices, links=self.costs.links)
        overhead_s, whole_loss = self.costs.step_overhead_s, self.costs.whole_loss
        costs = replace(costs, step_overhead_s=overhead_s, whole_loss=whole_loss)
        crossing = tuple(costs.layers[cut - 1].cut_nbytes for cut in plan.cuts)
        plan = replace(
            plan, mini_batch=sum(samples), microbatches=len(samples), cut_nbytes=crossing
        )
        return plan, costs

    def _with_measured(
        self, times: StageTimes, walls: Iterable[Timeline], laned: Collection[int]
    ) -> StageTimes:
        """Return the times, with measured means for stages that are only on attached devices.

        `laned` stages keep the times of the costs: their passes lengthen each other, and the
        simulator already counts this.
        """
        boards = {member.id for member in self.setup.crew.cluster.described}
        stages = enumerate(self.setup.plan.stages)
        real = [n for n, stage in stages if not boards & {*stage.devices} and n not in laned]
        seconds = {
            "F": list(times.forward_s),
            "B": list(times.backward_s),
            "U": list(times.update_s),
        }
        sums = [sums_of(wall) for wall in walls] if real else []
        for stage in real:
            for part, own in seconds.items():
                key = stage, part
                count = sum(counts[key] for _, counts in sums)
                total_s = sum(sums_s[key] for sums_s, _ in sums if key in sums_s)
                if count and total_s > 0:  # the sum is NaN if the clock has jumped
                    own[stage] = total_s / count
        forward_s, backward_s, update_s = map(tuple, seconds.values())
        return replace(times, forward_s=forward_s, backward_s=backward_s, update_s=update_s)


def effort_of(captured: Captured, profiles: Iterable[Effort]) -> dict[str, int]:
    """Return the counts of the model's exports and traces and, after a profile, of layers, unlike
    layers, compilations and runs."""
    counts = {"exports": captured.exports, "traces": captured.traces.count}
    for profile in profiles:
        counts |= {
            "layers": profile.layers,
            "unlike layers": profile.patterns,
            "compilations": profile.compilations,
            "profile runs": profile.runs,
        }
    return counts
