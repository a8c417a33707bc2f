"""Memory and bytes as the papers count them: `python -m hetpipe.bench.memory`.

Three tables: DAPPLE's table 5 (peak memory of GPipe and 1F1B as micro-batches grow in number),
PipeDream's figure 16 (memory of every stage of an asynchronous pipeline, against one replica of
data parallelism) and its figure 17 (bytes communicated per sample). Peaks are counted while the
stages train, see `hetpipe.engine.memory`; predictions and bytes communicated come from shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from hetpipe import optim
from hetpipe.bench.gpt import Embedding
from hetpipe.bench.machine import describe
from hetpipe.bench.text import token_loss
from hetpipe.bench.zoo import load_workload, optimizer_of
from hetpipe.capture.captured import Captured
from hetpipe.capture.program import CUT, STATE, TANGENT, Program, StageGraphs
from hetpipe.cluster.cluster import Cluster, Member
from hetpipe.cost.table import CostTable, LayerBytes
from hetpipe.engine.crew import Crew, Keeping, StepRequest, StepResult
from hetpipe.engine.streaming import Streaming
from hetpipe.plan.costs import StageCosts
from hetpipe.schedule.generators import generate
from hetpipe.schedule.stream import Stream
from hetpipe.sdk.registry import get_backend

if TYPE_CHECKING:
    from hetpipe.optim.rule import Optimizer

MIB = 2**20
DEVICE = "pytorch:cpu:0"
BLOCKS, WIDTH, HEADS, LENGTH, VOCABULARY = 12, 256, 4, 128, 512  # of the encoder
SAMPLES = 2  # of a micro-batch of it, as in DAPPLE's table 5
STAGES = 4  # of PipeDream's figures
CUTS = {
    "digits": ("4.conv1", "5.conv2", "6.conv2"),
    "gpt": ("blocks.1", "blocks.2", "blocks.3"),
    "lstm": ("layers.0", "layers.1", "head"),
}
"""The first layer of every stage but the first."""


class Encoder(nn.Module):
    """Like BERT (Devlin et al., 2019), without dropout: (n, length) of tokens -> (.., vocabulary).

    Width, heads and blocks are those of the benchmark unless given.
    """

    def __init__(
        self,
        blocks: int = BLOCKS,
        width: int = WIDTH,
        heads: int = HEADS,
        length: int = LENGTH,
        vocabulary: int = VOCABULARY,
    ) -> None:
        super().__init__()
        block = partial(
            nn.TransformerEncoderLayer, width, heads, 4 * width, 0.0, "gelu", batch_first=True
        )
        self.embedding = Embedding(vocabulary, length, width)
        self.blocks = nn.Sequential(*(block() for _ in range(blocks)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.embedding(x)))
        return logits


@dataclass(frozen=True)
class Subject:
    """A captured model, an example mini-batch and the first layer of every stage but the first."""

    captured: Captured
    batch: tuple[Any, Any]
    optimizer: Optimizer
    cuts: tuple[int, ...] = ()
    device: str = DEVICE

    def graphs(self, samples: int, recompute: str = "none", cuts: Any = None) -> list[StageGraphs]:
        """The stages for micro-batches of so many samples."""
        at = self.cuts if cuts is None else cuts
        table = get_backend(self.device.partition(":")[0]).decompositions()
        count = len(at) + 1
        return self.captured.stage_graphs(
            at, [table] * count, [samples], self.optimizer, [recompute] * count
        )

    def starts(self, names: Sequence[str], samples: int) -> tuple[int, ...]:
        """The numbers of the first layers whose names begin so."""
        layers = [layer.name for layer in self.captured.layer_graph(samples).layers]
        return tuple(next(i for i, n in enumerate(layers) if n.startswith(s)) for s in names)


@dataclass(frozen=True)
class Footprint:
    """By stage: the most micro-batches in flight, the most bytes counted, the bytes predicted."""

    in_flight: tuple[int, ...]
    peak_nbytes: tuple[int, ...]
    predicted_nbytes: tuple[int, ...]


def crew_of(stages: int, device: str = DEVICE) -> Crew:
    """A worker for every stage, all in this process."""
    members = tuple(Member(f"stage {n}", device) for n in range(stages))
    return Crew.start(Cluster(members, transport="local"))


def flushed(
    crew: Crew,
    subject: Subject,
    schedule: str,
    microbatches: int,
    in_flight: Sequence[int] | None = None,
    recompute: str = "none",
) -> Footprint:
    """Two steps of a synchronous schedule over the stages."""
    request = _request(subject, microbatches)
    graphs = subject.graphs(request.samples[0], recompute)
    _load(crew, subject, graphs, "flush")
    rows = generate(schedule, len(graphs), microbatches, in_flight=in_flight)
    for number in (1, 2):
        result = crew.step(
            StepRequest(
                rows, request.samples, request.feeds, request.loss_tangents, 0.0, number,
                grad_scale=1.0,
            )
        )  # fmt: skip
    return _footprint(subject, [result], request.samples[0], [1] * len(graphs))


def streamed(crew: Crew, subject: Subject, in_flight: Sequence[int] | None = None) -> Footprint:
    """PipeDream with stashed weights, until as many versions as there can be have been."""
    request = _request(subject, 1)
    graphs = subject.graphs(request.samples[0])
    _load(crew, subject, graphs, "stash")
    streaming = Streaming(crew, Stream("pipedream", len(graphs), 1, in_flight), "stash")
    results = []
    for number in range(2 * streaming.window):
        streaming.admit(request)
        if number >= streaming.window:
            results.append(crew.collect())
    while crew.under_way:
        results.append(crew.collect())
    streaming.flush()
    depths = [max(found) for found in zip(*(r.most_in_flight for r in results), strict=True)]
    return _footprint(subject, results, request.samples[0], depths)


def _load(crew: Crew, subject: Subject, graphs: Sequence[StageGraphs], policy: str) -> None:
    values = {**subject.captured.parameters, **subject.captured.buffers}
    members = [member.id for member in crew.cluster.members][: len(graphs)]
    crew.load(graphs, members, values, keeping=Keeping(policy))


def _request(subject: Subject, microbatches: int) -> StepRequest:
    leaves = subject.captured.leaves(*subject.batch)
    samples = len(next(iter(leaves.values()))) // microbatches
    feeds = [
        {name: leaf[m * samples : (m + 1) * samples] for name, leaf in leaves.items()}
        for m in range(microbatches)
    ]
    shares = (1.0 / microbatches,) * microbatches
    return StepRequest((), (samples,) * microbatches, feeds, shares, 0.0, 1, grad_scale=1.0)


def _footprint(
    subject: Subject, results: Sequence[StepResult], samples: int, versions: Sequence[int]
) -> Footprint:
    in_flight, peaks = (
        tuple(max(found) for found in zip(*columns, strict=True))
        for columns in ([r.most_in_flight for r in results], [r.peak_nbytes for r in results])
    )
    costs = stage_costs(subject, samples)
    ends = zip((0, *subject.cuts), (*subject.cuts, costs.count), strict=True)
    predicted = tuple(
        int(costs.memory_nbytes(lo, hi, depth, live))
        for (lo, hi), depth, live in zip(ends, in_flight, versions, strict=True)
    )
    return Footprint(in_flight, peaks, predicted)


def stage_costs(subject: Subject, samples: int) -> StageCosts:
    """The planner's prices, of bytes alone."""
    graph = subject.captured.layer_graph(samples)
    stages = subject.graphs(samples, cuts=range(1, len(graph)))
    layers = tuple(
        LayerBytes(
            layer.name,
            layer.params_nbytes,
            _nbytes(stage.update, (STATE,), inputs=True),
            stage.passes[samples].saved_nbytes,
            cut,
        )
        for layer, stage, cut in zip(graph.layers, stages, (*graph.cut_nbytes, 0), strict=True)
    )
    return StageCosts(CostTable(subject.captured.name, samples, layers, {}))


def communicated_nbytes(subject: Subject, samples: int) -> tuple[float, float]:
    """Bytes per sample: of the pipeline, over all cuts both ways, and of data parallelism.

    A ring of m workers, each with a mini-batch of its own, moves 2 (m - 1) / m times the weights
    per worker and mini-batch.
    """
    passes = [stage.passes[samples] for stage in subject.graphs(samples)]
    ahead = sum(_nbytes(p.forward, (CUT,)) for p in passes)
    back = sum(_nbytes(p.backward, (TANGENT,)) for p in passes)
    workers = len(passes)
    weights = sum(array.nbytes for array in subject.captured.parameters.values())
    return (ahead + back) / samples, 2 * (workers - 1) / workers * weights / samples


def _nbytes(program: Program | None, roles: tuple[str, ...], inputs: bool = False) -> int:
    if program is None:
        return 0
    slots = program.inputs if inputs else program.outputs
    return sum(slot.nbytes for slot in slots if slot.role in roles)


def encoder(
    microbatches: int, samples: int = SAMPLES, stages: int = 2, device: str = DEVICE, **sizes: int
) -> Subject:
    """An encoder in equal stages, and a mini-batch of random tokens."""
    torch.manual_seed(0)
    model = Encoder(**sizes)
    length, _ = model.embedding.positions.shape
    tokens = torch.randint(0, model.head.out_features, (microbatches * samples, length))
    captured = Captured(model, token_loss, (tokens, tokens))
    whole = Subject(captured, (tokens, tokens), optim.adam(lr=1e-3), device=device)
    blocks = len(model.blocks)
    names = [f"blocks.{blocks * n // stages}." for n in range(1, stages)]
    return Subject(captured, whole.batch, whole.optimizer, whole.starts(names, samples), device)


def zoo(name: str) -> Subject:
    """A workload of the zoo, cut by `CUTS`, with its own mini-batch and optimizer."""
    workload = load_workload(name)
    if name == "gpt":  # stages without a flush cannot share the embedding
        workload.model.head.weight = nn.Parameter(workload.model.head.weight.detach().clone())
    (batch,) = islice(workload.batches(workload.mini_batch, 0), 1)
    captured = Captured(workload.model, workload.loss_fn, batch)
    whole = Subject(captured, batch, optimizer_of(workload))
    cuts = whole.starts(CUTS[name], workload.mini_batch)
    return Subject(captured, batch, whole.optimizer, cuts)


def dapple_table(crew: Crew) -> Table:
    """DAPPLE, table 5."""
    table = _table(
        f"DAPPLE's table 5: encoder, {BLOCKS} blocks of width {WIDTH}, {LENGTH} tokens, micro-batches"
        f" of {SAMPLES}, 2 stages, Adam; peak MiB by stage, counted (measured)",
        ("schedule", "recompute", "M", "in flight", "stage 0", "stage 1", "average", "predicted"),
    )
    subjects = {count: encoder(count) for count in (2, 8, 16)}
    for name, schedule in (("GPipe", "gpipe"), ("DAPPLE (1f1b)", "1f1b")):
        for recompute in ("none", "inputs", "min-cut"):
            for count, subject in subjects.items():
                found = flushed(crew, subject, schedule, count, recompute=recompute)
                average = sum(found.peak_nbytes) / len(found.peak_nbytes)
                known = _mib(found.predicted_nbytes) if recompute == "none" else ""
                table.add_row(
                    name, recompute, str(count), _list(found.in_flight),
                    *(f"{n / MIB:.1f}" for n in (*found.peak_nbytes, average)), known,
                )  # fmt: skip
    return table


def pipedream_tables(crew: Crew) -> tuple[Table, Table]:
    """PipeDream, figures 16 and 17."""
    memory = _table(
        f"PipeDream's figure 16: {STAGES} stages, one mini-batch of samples in flight per depth, "
        "stashed weights, against all of the model on one device (DP); peak MiB, counted "
        "(measured); in brackets predicted",
        ("model", "samples", *(f"stage {n}" for n in range(STAGES)), "DP"),
    )
    bytes_ = _table(
        f"PipeDream's figure 17: KiB communicated per sample, {STAGES} workers, computed from shapes",
        ("model", "samples", "weights MiB", "pipeline", "DP", "pipeline / DP"),
    )
    for name in CUTS:
        subject = zoo(name)
        samples = len(subject.batch[0])
        label = "gpt, untied" if name == "gpt" else name
        alone = Subject(subject.captured, subject.batch, subject.optimizer)
        found, single = streamed(crew, subject), flushed(crew, alone, "1f1b", 1)
        peaks = zip(
            (*found.peak_nbytes, *single.peak_nbytes),
            (*found.predicted_nbytes, *single.predicted_nbytes),
            strict=True,
        )
        memory.add_row(label, str(samples), *(f"{p / MIB:.1f} ({q / MIB:.1f})" for p, q in peaks))
        pipeline, data = communicated_nbytes(subject, samples)
        weights = sum(array.nbytes for array in subject.captured.parameters.values())
        bytes_.add_row(
            label, str(samples), f"{weights / MIB:.1f}", f"{pipeline / 1024:.1f}",
            f"{data / 1024:.1f}", f"{pipeline / data:.2f}",
        )  # fmt: skip
    return memory, bytes_


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for column in columns:
        text = column in ("schedule", "recompute", "model")
        table.add_column(column, justify="left" if text else "right")
    return table


def _mib(nbytes: Sequence[int]) -> str:
    return " ".join(f"{n / MIB:.1f}" for n in nbytes)


def _list(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def main() -> None:
    """Print the tables."""
    console = Console()
    console.print(describe())
    with crew_of(STAGES) as crew:
        for table in (dapple_table(crew), *pipedream_tables(crew)):
            console.print(table)


if __name__ == "__main__":
    main()
