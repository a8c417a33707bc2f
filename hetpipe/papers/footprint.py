"""Memory and traffic of a model in stages: counted in training, and predicted from shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetpipe.capture.captured import Captured
from hetpipe.capture.program import CUT, STATE, TANGENT, Slot, StageGraphs, sharing_stages
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.cost.table import CostTable, LayerBytes, TiedBytes
from hetpipe.crew.crew import Crew
from hetpipe.crew.request import StepRequest, StepResult
from hetpipe.pipeline.schedules import Streaming
from hetpipe.plan.costs import StageCosts
from hetpipe.schedule.action import Schedule
from hetpipe.schedule.generators import generate
from hetpipe.schedule.requirements import HALVES
from hetpipe.schedule.stream import Stream
from hetpipe.schedule.weights import STASH, policy_of
from hetpipe.sdk.host.registry import get_backend
from hetpipe.wire.messages import Keep

if TYPE_CHECKING:
    from hetpipe.optim.rule import Optimizer
    from hetpipe.zoo.workload import Batch

DEVICE = "pytorch:cpu:0"


class CutModel:
    """A captured model in stages, which begin at layer 0 and at each layer in `cuts`."""

    def __init__(
        self,
        captured: Captured,
        optimizer: Optimizer,
        cuts: Sequence[int] = (),
        device: str = DEVICE,
    ) -> None:
        self.captured = captured
        self.optimizer = optimizer
        self.cuts = tuple(cuts)
        self._device = device
        self._operators = get_backend(device.partition(":")[0]).decompositions()
        self._graphs: dict[tuple[int, str, bool], list[StageGraphs]] = {}
        self._costs: dict[int, StageCosts] = {}

    def whole(self) -> CutModel:
        """Return the same model as one stage."""
        single = CutModel(self.captured, self.optimizer, (), self._device)
        single._costs = self._costs
        return single

    def graphs(
        self, samples: int, recompute: str = "none", halves: bool = False
    ) -> list[StageGraphs]:
        """Return the stages for micro-batches of `samples`."""
        key = (samples, recompute, halves)
        if key not in self._graphs:
            self._graphs[key] = self._cut(self.cuts, samples, recompute, halves)
        return self._graphs[key]

    def costs(self, samples: int) -> StageCosts:
        """Return the planner's costs for micro-batches of `samples`; they have only bytes."""
        if samples not in self._costs:
            graph = self.captured.layer_graph(samples)
            stages = self._cut(range(1, len(graph)), samples, "none", False)
            layers = tuple(
                LayerBytes(
                    layer.name,
                    layer.params_nbytes,
                    _nbytes(stage.update.inputs if stage.update else (), STATE),
                    stage.passes[samples].saved_nbytes,
                    cut,
                )
                for layer, stage, cut in zip(
                    graph.layers, stages, (*graph.cut_nbytes, 0), strict=True
                )
            )
            sizes = {name: array.nbytes for name, array in self.captured.parameters.items()}
            ties = {name: (owner, *rest) for stage in stages for name, owner, rest in stage.tied}
            tied = tuple(TiedBytes(name, sizes[name], at) for name, at in ties.items())
            table = CostTable(self.captured.name, samples, layers, {}, tied=tied)
            self._costs[samples] = StageCosts(table)
        return self._costs[samples]

    def _cut(
        self, cuts: Sequence[int], samples: int, recompute: str, halves: bool
    ) -> list[StageGraphs]:
        count = len(cuts) + 1
        return self.captured.stage_graphs(
            cuts, [self._operators] * count, [samples], self.optimizer, [recompute] * count, halves
        )


@dataclass(frozen=True)
class Footprint:
    """The peaks of each stage: micro-batches in flight, versions of the weights, bytes."""

    in_flight: tuple[int, ...]
    versions: tuple[int, ...]
    peak_nbytes: tuple[int, ...]


def crew_of(stages: int, device: str = DEVICE) -> Crew:
    """Start a worker for every stage, all in this process."""
    members = tuple(Member(f"stage {n}", device) for n in range(stages))
    return Crew.start(Cluster(members, transport="local"))


def flushed(
    crew: Crew,
    subject: CutModel,
    batch: Batch,
    schedule: str,
    microbatches: int,
    in_flight: Sequence[int] | None = None,
    recompute: str = "none",
) -> Footprint:
    """Run one step of a synchronous schedule, and return the peaks of the stages."""
    rows = generate(schedule, len(subject.cuts) + 1, microbatches, in_flight=in_flight)
    request = _request(subject, batch, microbatches, rows)
    halves = any(action.op in HALVES for row in rows for action in row)
    graphs = subject.graphs(request.samples[0], recompute, halves)
    _load(crew, subject, graphs, "flush")
    return _footprint([crew.step(request)])


def streamed(
    crew: Crew, subject: CutModel, batch: Batch, in_flight: Sequence[int] | None = None
) -> Footprint:
    """Run PipeDream until all stashed versions of weights are in use, and return the peaks."""
    request = _request(subject, batch, 1)
    graphs = subject.graphs(request.samples[0])
    _load(crew, subject, graphs, "stash")
    tied = sharing_stages(graphs)
    streaming = Streaming(crew, Stream("pipedream", len(graphs), 1, in_flight, tied=tied), STASH)
    results = []
    for number in range(2 * streaming.window):
        streaming.admit(request)
        if number >= streaming.window:
            results.append(crew.collect())
    while crew.under_way:
        results.append(crew.collect())
    streaming.flush()
    return _footprint(results)


def predicted_nbytes(subject: CutModel, samples: int, depths: Footprint) -> tuple[int, ...]:
    """Predict each stage's peak bytes from the counted depths and versions in `depths`."""
    costs = subject.costs(samples)
    ends = zip((0, *subject.cuts), (*subject.cuts, costs.count), strict=True)
    return tuple(
        int(costs.memory_nbytes(lo, hi, depth, versions))
        for (lo, hi), depth, versions in zip(ends, depths.in_flight, depths.versions, strict=True)
    )


def communicated_nbytes(subject: CutModel, samples: int) -> tuple[float, float]:
    """Return the bytes per sample that a pipeline and data parallelism communicate.

    The pipeline's bytes cross all cuts, forward and backward; a shared parameter and its gradient
    go to and from each end after the owner. In a ring of m workers with a
    mini-batch each, a worker moves 2 (m - 1) / m times the weights per mini-batch.
    """
    graphs = subject.graphs(samples)
    passes = [stage.passes[samples] for stage in graphs]
    ahead = sum(_nbytes(p.forward.outputs, CUT) for p in passes)
    back = sum(_nbytes(p.backward.outputs, TANGENT) for p in passes if p.backward is not None)
    parameters = subject.captured.parameters
    shared = sum(2 * parameters[name].nbytes for stage in graphs for name in stage.borrowed)
    workers = len(passes)
    weights = weights_nbytes(subject)
    return (ahead + back + shared) / samples, 2 * (workers - 1) / workers * weights / samples


def weights_nbytes(subject: CutModel) -> int:
    return sum(array.nbytes for array in subject.captured.parameters.values())


def _nbytes(slots: Sequence[Slot], role: str) -> int:
    return sum(slot.nbytes for slot in slots if slot.role == role)


def _load(crew: Crew, subject: CutModel, graphs: Sequence[StageGraphs], policy: str) -> None:
    values = {**subject.captured.parameters, **subject.captured.buffers}
    members = [member.id for member in crew.cluster.members][: len(graphs)]
    crew.load(graphs, members, values, keep=Keep(policy_of(policy)))


def _request(
    subject: CutModel, batch: Batch, microbatches: int, schedule: Schedule = ()
) -> StepRequest:
    leaves = subject.captured.leaves(*batch)
    samples = len(next(iter(leaves.values()))) // microbatches
    feeds = [
        {name: leaf[m * samples : (m + 1) * samples] for name, leaf in leaves.items()}
        for m in range(microbatches)
    ]
    shares = (1.0 / microbatches,) * microbatches
    sizes = (samples,) * microbatches
    return StepRequest(schedule, sizes, feeds, shares, {"lr": 0.0}, 1, grad_scale=1.0)


def _footprint(results: Sequence[StepResult]) -> Footprint:
    columns = (
        [r.most_in_flight for r in results],
        [r.live_versions for r in results],
        [r.peak_nbytes for r in results],
    )
    return Footprint(*(tuple(map(max, zip(*rows, strict=True))) for rows in columns))
