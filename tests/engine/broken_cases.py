"""Trainings whose workers break, and the results that they must have."""

from __future__ import annotations

import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from captures import shared
from models import Transposed
from pipelines import pipeline
from torch import nn

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.capture.precision import Precision
from hetpipe.checkpoint import series
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.cost.table import CostTable, LayerCost
from hetpipe.crew.crew import Crew
from hetpipe.errors import NotFiniteError
from hetpipe.pipeline import absent, learning, planning, survivors
from hetpipe.pipeline.absent import Absent
from hetpipe.pipeline.move import Move
from hetpipe.pipeline.planning import free_table
from hetpipe.plan.plan import Plan

SAMPLES = 16
DEVICE = "numpy:cpu:0"
OPTIMIZER = hp.optim.adamw(lr=1e-2)  # one object, so that `captures` finds the stages again
NEAR = 1e-6
"""The most that losses and weights may differ if sums have another order."""

TICK_S = 0.02
NEVER_S = 1e9

Batch = tuple[torch.Tensor, torch.Tensor]


def make_plain() -> nn.Module:
    """Return a model with batch norm and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 8),
        nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 4),
    )  # fmt: skip


def make_tied() -> nn.Module:
    """Return a model with dropout, and with one weight in its first and last layer."""
    torch.manual_seed(0)
    first = nn.Linear(6, 4)
    layers = [
        nn.Linear(4, 4),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(4, 4),
        nn.Tanh(),
        Transposed(first),
    ]
    return nn.Sequential(first, *layers, nn.Linear(6, 4))


@cache
def batches(count: int) -> list[Batch]:
    """Return mini-batches that are equal at each call."""
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SAMPLES, 6, generator=draw), torch.randint(0, 4, (SAMPLES,), generator=draw))
        for _ in range(count)
    ]


class Noted(NamedTuple):
    """A value that a script has received from a pipeline."""

    time_s: float
    value: Any
    losses: int
    """The number of losses that the pipeline had survived."""


Script = Callable[[hp.Pipeline], Iterator[Any]]
"""Uses a pipeline, and yields its results."""


def train(pipe: hp.Pipeline, count: int = 4, begin: int = 0) -> Iterator[Any]:
    for result in pipe.run(batches(count)[begin:]):
        yield result.index, result.loss
    yield pipe.state_dict()


def step(pipe: hp.Pipeline) -> Iterator[Any]:
    for x, y in batches(4):
        yield pipe.step(x, y)
    yield pipe.state_dict()


def step_and_flush(pipe: hp.Pipeline) -> Iterator[Any]:
    """Apply accumulated gradients before there are as many as for an update."""
    for number, (x, y) in enumerate(batches(6)):
        yield pipe.step(x, y)
        if number == 3:
            pipe.flush()
    yield pipe.state_dict()


def evaluate(pipe: hp.Pipeline) -> Iterator[Any]:
    """Evaluate and predict between the results of a run."""
    for result in pipe.run(batches(4)):
        yield result.loss
        if result.index == 1:
            evaluation = pipe.evaluate(batches(3), {"mean": lambda out, y: out.mean()})
            yield evaluation.loss, evaluation.metrics["mean"]
        if result.index == 2:
            yield from pipe.predict_batches(x for x, _ in batches(4))
            yield pipe.predict(batches(1)[0][0][:5])
    yield pipe.state_dict()


def read(pipe: hp.Pipeline) -> Iterator[Any]:
    """Read, save, and load values between mini-batches."""
    yield pipe.step(*batches(1)[0])
    yield pipe.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        pipe.save(folder)
        saved = hp.checkpoint.load(folder)
        yield {
            f"{role} {name}": value
            for role, tensors in saved.tensors.items()
            for name, value in tensors.items()
        }
        yield pipe.step(*batches(2)[1])
        pipe.restore(folder)
        yield pipe.step(*batches(2)[1])
    yield pipe.state_dict()


def differentiate(pipe: hp.Pipeline) -> Iterator[Any]:
    for x, y in batches(3):
        yield pipe.gradients(x, y)
        yield pipe.step(x, y)
    yield pipe.state_dict()


def diagnose(pipe: hp.Pipeline) -> Iterator[Any]:
    for x, y in batches(2):
        yield pipe.step(x, y)
        assert not pipe.diagnose(x, y).blames_device
    yield pipe.state_dict()


def fit(pipe: hp.Pipeline) -> Iterator[Any]:
    history = pipe.fit(batches(3), 2, eval_data=batches(2))
    for row in history.epochs:
        yield row.loss, row.eval_loss
    yield pipe.state_dict()


def rebalance(pipe: hp.Pipeline) -> Iterator[Any]:
    """Move layers to the other devices of a slow one, there and back, where costs say so."""
    factors: dict[str, float] = {}

    def ratios_of(timelines: Any, plan: Plan, table: CostTable) -> dict[str, list[float]]:
        return {device: [factors.get(device, 1.0) for _ in timelines] for device in plan.devices}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "ratios_of", ratios_of)
        for result in pipe.run(batches(8)):
            yield result.loss
            if result.index in (3, 6):
                factors["m0"] = 4.0 if result.index == 3 else 1.0
                pipe.rebalance()
    yield pipe.state_dict()


def follow(pipe: hp.Pipeline) -> Iterator[Any]:
    """Move a layer before every second mini-batch, as `rebalance="auto"` does."""
    for number, (x, y) in enumerate(batches(5)):
        if number % 2 and (moved := _moved(pipe.plan)) is not None:
            pipe._rebalancer._next = Move(pipe.plan, moved, 0.0)
        yield pipe.step(x, y)
    yield pipe.state_dict()


def _moved(plan: Plan) -> Plan | None:
    """Return the plan with a layer moved between its last two stages, unless it is impossible."""
    if len(plan.stages) < 2 or max(plan.replicas) > 1:
        return None
    *others, first, second = plan.stages
    cut = first.hi - 1 if first.hi - first.lo > 1 else first.hi + 1
    stages = *others, replace(first, hi=cut), replace(second, lo=cut)
    return None if cut == second.hi else replace(plan, stages=stages)


def vary(pipe: hp.Pipeline) -> Iterator[Any]:
    """Train on mini-batches of other sizes that change afterwards, and some that are not finite."""
    for number, (x, y) in enumerate(batches(6)):
        own_x, own_y = x[: 16 - 4 * (number % 3)].clone(), y[: 16 - 4 * (number % 3)].clone()
        if number == 3 and not pipe._training.streams:
            own_x[5, 2] = math.nan
        try:
            yield pipe.step(own_x, own_y)
        except NotFiniteError:
            yield -1.0
        own_x.zero_()
        own_y.zero_()
    yield pipe.ema_state_dict()
    yield pipe.evaluate(batches(2), ema=True).loss
    yield pipe.state_dict()


def stumble(pipe: hp.Pipeline) -> Iterator[Any]:
    """Continue after a source of mini-batches has failed, and after a run that ends early."""

    def source() -> Iterator[Batch]:
        yield from batches(3)
        raise ValueError("no more")

    with suppress(ValueError):
        for result in pipe.run(source()):
            yield result.loss
    for number, result in enumerate(pipe.run(batches(6)[3:])):
        yield result.loss
        if number == 1:
            break
    yield from train(pipe, 8, 6)


def save(pipe: hp.Pipeline) -> Iterator[Any]:
    """Train, and read the last automatic checkpoint."""
    yield from train(pipe)
    pipe._autosave.finish()
    assert pipe._autosave._series is not None
    saved = series.load(pipe._autosave._series.directory)
    yield saved.manifest["step"], max(saved.manifest["updates"])
    yield from (saved.tensors[role] for role in ("param", "buffer", "state"))


def scale(pipe: hp.Pipeline) -> Iterator[Any]:
    for result in pipe.run(batches(6)):
        yield result.loss
        yield pipe.loss_scale, pipe.skipped
    yield pipe.state_dict()


@dataclass(frozen=True)
class Case:
    """A training. `members` as for `pipelines.pipeline`, or "" if the planner chooses the plan;
    `count` members are in the crew."""

    members: str | Sequence[str | Sequence[str]]
    count: int
    options: Mapping[str, Any]
    script: Script = train
    make: Callable[[], nn.Module] = make_plain
    returns: bool = False
    """Whether each lost member is back, and joins, before the next mini-batch."""

    @property
    def streams(self) -> bool:
        """Whether the plan changes the results: mini-batches follow each other without a flush."""
        is_stream = self.options["schedule"] in ("pipedream", "asp")
        return is_stream and self.script not in (step, follow, vary, save)

    @property
    def can_lose_two(self) -> bool:
        """Whether the results after two losses are known."""
        return self.count > 2 and (not self.streams or self.script is train)

    @property
    def used(self) -> list[str]:
        """The members with layers."""
        if not self.members:
            return [f"m{n}" for n in range(self.count) if f"m{n}" not in self.options["spares"]]
        places = [f"m{n}" for n in self.members] if isinstance(self.members, str) else self.members
        names = [(place,) if isinstance(place, str) else place for place in places]
        return sorted({name for place in names for name in place})


def _case(members: Any, count: int, schedule: str, **options: Any) -> Case:
    names = "script", "make", "returns"
    own = {name: options.pop(name) for name in names if name in options}
    spares = [f"m{n}" for n in range(count)][-1:] if options.pop("spare", False) else []
    every = options.pop("snapshot_every", 2)
    options = {"schedule": schedule, "spares": spares, "snapshot_every": every, **options}
    return Case(members, count, options, **own)


VARIED = {"ema": 0.9, "optimizer": hp.optim.adamw(lr=lambda update: 1e-2 / update)}
MIXED = ["m0", ("m1", "m2")]
CASES: dict[str, Case] = {
    "1f1b": _case("01", 2, "1f1b"),
    "1f1b-spare": _case("012", 4, "1f1b", spare=True),
    "1f1b-steps": _case("012", 3, "1f1b", script=step, snapshot_every=3),
    "gpipe": _case("012", 3, "gpipe"),
    "gpipe-spare": _case("01", 3, "gpipe", spare=True),
    "interleaved": _case("0101", 2, "interleaved"),
    "interleaved-spare": _case("0101", 3, "interleaved", spare=True),
    "zb-h1": _case("012", 4, "zb-h1", spare=True),
    "pipedream": _case("012", 3, "pipedream"),
    "pipedream-spare": _case("012", 4, "pipedream", spare=True),
    "pipeoptim": _case("012", 3, "pipedream", weights="pipeoptim"),
    "pipeoptim-spare": _case("012", 4, "pipedream", spare=True, weights="pipeoptim"),
    "asp": _case([("m0", "m1", "m2")], 3, "asp", microbatches=1),
    "asp-spare": _case([("m0", "m1")], 3, "asp", spare=True, microbatches=1, make=make_tied),
    "data-parallel": _case("", 2, "data-parallel", make=make_tied),
    "data-parallel-cut": _case("", 3, "data-parallel", cuts=[2], make=make_tied),
    "data-parallel-spare": _case("", 3, "data-parallel", spare=True, make=make_tied),
    "mixed": _case(MIXED, 3, "1f1b", make=make_tied),
    "mixed-spare": _case(MIXED, 4, "1f1b", spare=True),
    "tied": _case("012", 3, "1f1b", make=make_tied),
    "tied-pipedream": _case("012", 4, "pipedream", spare=True, make=make_tied),
    "accumulated": _case("012", 3, "1f1b", accumulate=2),
    "accumulated-long": _case("012", 3, "1f1b", accumulate=2, snapshot_every=8),
    "accumulated-flush": _case(
        "01", 3, "1f1b", spare=True, accumulate=3, snapshot_every=8, script=step_and_flush
    ),
    "accumulated-spare": _case("01", 3, "gpipe", spare=True, accumulate=2),
    "clipped": _case("012", 3, "1f1b", clip_norm=0.1),
    "evaluated": _case("012", 3, "1f1b", script=evaluate),
    "evaluated-stream": _case("012", 4, "pipedream", spare=True, script=evaluate),
    "read": _case("012", 3, "1f1b", script=read),
    "read-stream": _case("012", 4, "pipedream", spare=True, script=read),
    "gradients": _case("012", 3, "1f1b", script=differentiate),
    "diagnosed": _case("01", 3, "1f1b", spare=True, script=diagnose),
    "fit": _case("012", 3, "1f1b", script=fit),
    "rebalanced": _case("", 3, "1f1b", spare=True, script=rebalance, snapshot_every=16),
    "moved": _case("012", 3, "1f1b", script=follow),
    "moved-tied": _case("012", 3, "1f1b", script=follow, make=make_tied, snapshot_every=8),
    "moved-stream": _case("012", 4, "pipedream", spare=True, script=follow, snapshot_every=8),
    "returned": _case("012", 3, "1f1b", returns=True),
    "returned-spare": _case("01", 3, "1f1b", spare=True, returns=True, script=evaluate),
    "returned-stream": _case("012", 3, "pipedream", returns=True, script=step),
    "returned-accumulated": _case("012", 3, "1f1b", returns=True, accumulate=2),
    "varied": _case("012", 3, "1f1b", script=vary, snapshot_every=8, **VARIED),
    "varied-accumulated": _case(
        "012", 3, "1f1b", script=vary, snapshot_every=8, accumulate=2, **VARIED
    ),
    "varied-stream": _case(
        "012", 4, "pipedream", spare=True, script=vary, snapshot_every=8, **VARIED
    ),
    "stumbled": _case("012", 3, "1f1b", script=stumble, snapshot_every=16),
    "stumbled-stream": _case("012", 4, "pipedream", spare=True, script=stumble, snapshot_every=16),
    "scaled": _case(
        "012", 3, "1f1b", script=scale, snapshot_every=16, precision=Precision("float16"),
        loss_scale=hp.LossScale(2.0**19, interval=2),
    ),
    "saved": _case("", 3, "1f1b", script=save, every=1),
    "saved-stream": _case("", 3, "pipedream", spare=True, script=save, every=1, snapshot_every=8),
}  # fmt: skip


class Break(NamedTuple):
    """A break of a worker at a moment; `kind` as in `breaking`.

    A negative moment is a time during the start of a worker, in ticks.
    """

    member: str
    kind: str
    moment: int


NO_BREAK = Break("", "", 0)
"""Leaves a crew whole."""


@dataclass
class Run:
    """A training that has ended."""

    plan: Plan
    """The first plan."""
    notes: list[Noted] = field(default_factory=list)
    lost: tuple[hp.Lost, ...] = ()
    joined: tuple[hp.Joined, ...] = ()
    moments: dict[str, list[str]] = field(default_factory=dict)
    """By member, the moments of the workers that remain at the end."""
    broken_s: list[float] = field(default_factory=list)

    @property
    def wait_s(self) -> float:
        """Seconds from the first loss to the next result."""
        return min(
            (note.time_s - self.broken_s[0] for note in self.notes if note.losses), default=math.nan
        )


def opened(case: Case, crew: Crew, **options: Any) -> hp.Pipeline:
    """Open a pipeline whose costs say that layers take long and messages no time."""
    task = case.make(), nn.functional.cross_entropy, batches(1)[0]
    captured = shared(*task, case.options.get("precision", Precision()))
    options = {
        "microbatches": 4, "survive": "auto", "optimizer": OPTIMIZER, **case.options,
        **options,
    }  # fmt: skip
    if not case.members:
        return hp.Pipeline(*task, cluster=crew.cluster, crew=crew, captured=captured, **options)
    costs = _costs(captured, crew, SAMPLES // options["microbatches"])
    return pipeline(crew, *task, case.members, costs=costs, **options)


def _costs(captured: Captured, crew: Crew, samples: int) -> CostTable:
    graph = captured.layer_graph(samples)
    costs = free_table("case", graph, crew.cluster.ids, "modelled")
    layers = (LayerCost(samples, samples, 0.0),) * len(graph)
    rows = {id: replace(row, layers=layers) for id, row in costs.devices.items()}
    return replace(costs, devices=rows)


def _profile(
    captured: Captured, crew: Crew, optimizer: Any, sizes: Sequence[int], **how: Any
) -> dict[int, CostTable]:
    return {samples: _costs(captured, crew, samples) for samples in sizes}


def run(case: Case, breaks: Sequence[Break] = (), **options: Any) -> Run:
    """Run a training, and break it: the first break in the first crew, and so on."""
    left, ending = [*breaks], Ending()
    with tempfile.TemporaryDirectory() as folder:
        if "every" in case.options:
            options["checkpoint"] = Path(folder, "saved")

        def arm(crew: Crew) -> None:
            asked = left.pop(0) if left else NO_BREAK
            note = Path(folder, str(len(breaks) - len(left)))
            if asked.moment < 0 and asked.member in crew.cluster.ids:
                _kill_at_start(crew, asked, note, ending)
            none: tuple[Any, ...] = "", 0
            arms = dict.fromkeys(crew.cluster.ids, none)
            if asked.member in arms and asked.moment >= 0:
                arms[asked.member] = asked.kind, asked.moment, str(note)
            crew.begin_each("breaking:arm", arms)

        with (
            starting(arm, case.returns),
            make_crew(case) as crew,
            opened(case, crew, **options) as pipe,
        ):
            arm(crew)
            found = Run(pipe.plan)
            for value in case.script(pipe):
                found.notes.append(Noted(time.monotonic(), value, len(pipe.lost)))

            ending.begin()

            def moments() -> dict[str, list[str]]:
                ids = pipe._crew.cluster.ids
                return pipe._crew.call_each("breaking:moments", dict.fromkeys(ids, ()))

            # A worker that broke after its last reply is lost in this call.
            found.moments = pipe._delivery.call("moments", moments)
            found.lost, found.joined = pipe.lost, pipe.joined
        for file in sorted(Path(folder).glob("[0-9]")):
            found.broken_s.append(float(file.read_text()))
    return found


def _crew_of(case: Case, names: Sequence[str] = ()) -> Crew:
    ids = names or [f"m{n}" for n in range(case.count)]
    members = tuple(Member(name, DEVICE) for name in ids)
    return Crew.start(Cluster(members, transport="shared-memory"))


make_crew: Callable[[Case], AbstractContextManager[Crew]] = _crew_of
"""Starts the first crew of a run."""


class Ending:
    """The end of a training; no worker is killed after it has begun."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.begun = False

    def begin(self) -> None:
        with self.lock:
            self.begun = True


def _kill_at_start(crew: Crew, asked: Break, note: Path, ending: Ending) -> None:
    """Kill a worker that starts, some ticks after its process exists."""

    def kill() -> None:
        fleet: Any = crew._fleet
        number = crew.cluster.ids.index(asked.member)
        while len(fleet._children) <= number or fleet._children[number].pid is None:
            time.sleep(TICK_S / 10)
        time.sleep(TICK_S * -asked.moment)
        with ending.lock, suppress(ProcessLookupError):
            if not ending.begun:
                note.write_text(str(time.monotonic()))
                os.kill(fleet._children[number].pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


@contextmanager
def starting(arm: Callable[[Crew], None], returns: bool = False) -> Iterator[None]:
    """Call `arm` with each crew that starts after a loss. If lost members return, a look for them
    waits until they are back."""
    look = Absent.look

    def look_until_back(self: Absent, present: Cluster) -> bool:
        back = look(self, present)
        while self._trial is not None:
            time.sleep(TICK_S)
            back = look(self, present) or back
        return back

    class Armed(Crew):
        @classmethod
        def start(cls, *args: Any, **options: Any) -> Crew:  # type: ignore[override]
            crew = Crew.start(*args, **options)
            arm(crew)
            return crew

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survivors, "Crew", Armed)
        patch.setattr(planning, "profile", _profile)
        patch.setattr(absent, "FIRST_S", 0.0 if returns else NEVER_S)
        patch.setattr(Absent, "look", look_until_back)
        yield


@cache
def undisturbed(name: str) -> Run:
    """Return the run of a case without a break."""
    return run(CASES[name])


def problems(name: str, found: Run, breaks: Sequence[Break]) -> list[str]:
    """Return in words what is wrong with a broken run."""
    case, whole, texts = CASES[name], undisturbed(name), []
    if breaks and not found.broken_s:  # a second moment may come after the end
        texts.append("no break has happened")
    lost = [member for event in found.lost for member in event.members]
    named = [each.member for each in breaks if each.member]
    if lost != named[: len(found.broken_s)]:
        texts.append(f"lost {lost}")
    if len(found.notes) != len(whole.notes):
        texts.append(f"{len(found.notes)} results instead of {len(whole.notes)}")
    exact = all(shape(event.plan) == shape(found.plan) for event in found.lost)
    after = [[note.value for note in whole.notes]] * (len(found.lost) + 1)  # by number of losses
    if case.streams and not exact:
        for count in range(1, len(after)):
            after[count] = continued(case, found.lost[:count])
    losses = 0
    for number, note in enumerate(found.notes):
        # A result may have been collected before a loss, and be given to the caller after it. The
        # last one has the final weights.
        losses = note.losses if number == len(whole.notes) - 1 else losses
        near = [
            count
            for count in range(losses, note.losses + 1)
            if not difference(note.value, after[count][number], exact)
        ]
        if not near:
            distance = difference(note.value, after[note.losses][number], True)
            texts.append(f"result {number} differs by {distance:.1e}")
            break
        losses = near[0]
    return texts


def shape(plan: Plan) -> list[tuple[object, ...]]:
    """Return the parts of a plan that decide the order of sums and the versions of weights."""
    return [(plan.schedule, stage.lo, len(stage.devices), stage.shares) for stage in plan.stages]


def continued(case: Case, lost: Sequence[hp.Lost]) -> list[Any]:
    """Return the results of a training that continues from checkpoints at the same mini-batches,
    with the same plans."""
    places = [(event.step - event.replayed, event.plan) for event in lost]
    key = repr((case, places))
    if key not in _continued:
        _continued[key] = _continue(case, places)
    return _continued[key]


_continued: dict[str, list[Any]] = {}


def _continue(case: Case, places: Sequence[tuple[int, Plan]]) -> list[Any]:
    values: list[Any] = []
    options: dict[str, Any] = {}
    names: Sequence[str] = ()
    begin = 0
    with tempfile.TemporaryDirectory() as folder:
        for n in range(len(places) + 1):
            end = places[n][0] if n < len(places) else len(batches(4))
            with _crew_of(case, names) as crew, opened(case, crew, **options) as pipe:
                values += [*train(pipe, end, begin)][: -1 if n < len(places) else None]
                pipe.save(folder, force=True)
            if n < len(places):
                begin, plan = places[n]
                names = [*plan.all_devices, "spare"]
                options = {"plan": plan, "checkpoint": Path(folder), "spares": []}
    return values


def difference(found: Any, expected: Any, exact: bool) -> float:
    """Return how much two results differ; 0 if they are equal, or near and need not be `exact`."""
    pairs = zip(_arrays(found), _arrays(expected), strict=True)
    most = max(
        (
            math.inf if a.shape != b.shape else float((a - b).abs().max())
            for a, b in pairs
            if a.numel()
        ),
        default=0.0,
    )
    return most if math.isnan(most) or most > (0.0 if exact else NEAR) else 0.0


def _arrays(value: Any) -> list[torch.Tensor]:
    if isinstance(value, Mapping):
        return [array for name in sorted(value) for array in _arrays(value[name])]
    if isinstance(value, (list, tuple)):
        return [array for each in value for array in _arrays(each)]
    return [torch.as_tensor(value).double()]
