"""Memory and traffic, counted as in the papers: `python -m hetpipe.papers.memory`.

The tables are DAPPLE's table 5 (peak memory of GPipe and 1F1B for more and more micro-batches),
PipeDream's figure 16 (memory of every stage of an asynchronous pipeline, against a replica in data
parallelism) and figure 17 (bytes communicated per sample). Peaks are counted while the stages train
(see `hetpipe.worker.memory`), and the planner predicts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from hetpipe import optim
from hetpipe.bench.machine import describe
from hetpipe.capture.captured import Captured
from hetpipe.capture.passes.partition import MODES, NONE
from hetpipe.papers.footprint import (
    DEVICE,
    CutModel,
    Footprint,
    communicated_nbytes,
    crew_of,
    flushed,
    predicted_nbytes,
    streamed,
    weights_nbytes,
)
from hetpipe.report.tables import Table, console
from hetpipe.zoo.gpt import Embedding
from hetpipe.zoo.load import load_workload, optimizer_of
from hetpipe.zoo.text import token_loss

if TYPE_CHECKING:
    from hetpipe.crew.crew import Crew
    from hetpipe.zoo.workload import Batch

MIB = 2**20
BLOCKS, WIDTH, HEADS, LENGTH, VOCABULARY = 12, 256, 4, 128, 512  # sizes of `Encoder`
SAMPLES = 2  # in a micro-batch, as in DAPPLE's table 5
STAGES = 4  # in PipeDream's figures
CUTS = {
    "digits": ("4.conv1", "5.conv2", "6.conv2"),
    "gpt": ("blocks.1", "blocks.2", "blocks.3"),
    "lstm": ("layers.0", "layers.1", "head"),
}
"""The first layer of every stage but the first, by model."""


class Encoder(nn.Module):
    """BERT (Devlin et al., 2019) without dropout: tokens (n, length) -> (n, length, vocabulary).

    Table 5 is measured with the default sizes.
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
        output: torch.Tensor = self.head(self.blocks(self.embedding(x)))
        return output


def starts(captured: Captured, names: Sequence[str], samples: int) -> tuple[int, ...]:
    """Return, for each name in `names`, the number of the first layer with this prefix."""
    layers = [layer.name for layer in captured.layer_graph(samples).layers]
    return tuple(next(i for i, n in enumerate(layers) if n.startswith(name)) for name in names)


def encoder(stages: int, samples: int = SAMPLES, device: str = DEVICE, **sizes: int) -> CutModel:
    """Return an encoder in equal stages, for micro-batches of `samples`."""
    torch.manual_seed(0)
    model = Encoder(**sizes)
    x = tokens(samples, len(model.embedding.positions), model.head.out_features)
    captured = Captured(model, token_loss, x)
    blocks = len(model.blocks)
    names = [f"blocks.{blocks * n // stages}." for n in range(1, stages)]
    cuts = starts(captured, names, samples)
    return CutModel(captured, optim.adam(lr=1e-3), cuts, device)


def tokens(samples: int, length: int = LENGTH, vocabulary: int = VOCABULARY) -> Batch:
    """Return a batch of random tokens, the same in each call."""
    x = torch.randint(0, vocabulary, (samples, length), generator=torch.Generator().manual_seed(0))
    return x, x


def zoo(name: str) -> tuple[CutModel, Batch]:
    """Return a workload's model, cut by `CUTS`, and a mini-batch of the workload."""
    workload = load_workload(name)
    batch = next(workload.batches(workload.mini_batch, 0))
    captured = Captured(workload.model, workload.loss_fn, batch)
    cuts = starts(captured, CUTS[name], workload.mini_batch)
    return CutModel(captured, optimizer_of(workload), cuts), batch


def dapple_table(crew: Crew) -> Table:
    """Return DAPPLE's table 5."""
    columns = ("schedule", "recompute", "M", "K", "stage 0", "stage 1", "average")
    table = Table(
        f"DAPPLE's table 5: encoder, {BLOCKS} blocks of width {WIDTH}, {LENGTH} tokens, Adam, "
        f"2 stages, M micro-batches of {SAMPLES}, K of them in flight by stage. Peak MiB by stage, "
        "counted (measured), without intermediates of programs; in brackets predicted",
        columns,
        columns[2:],
    )
    subject = encoder(2)
    for name, schedule in (("GPipe", "gpipe"), ("DAPPLE", "1f1b")):
        for recompute in MODES:
            for count in (2, 8, 16):
                batch = tokens(count * SAMPLES)
                counted = flushed(crew, subject, batch, schedule, count, recompute=recompute)
                average = sum(counted.peak_nbytes) / len(counted.peak_nbytes)
                planned = predicted_nbytes(subject, SAMPLES, counted) if recompute == NONE else ()
                table.add_row(
                    name, recompute, str(count), " ".join(map(str, counted.in_flight)),
                    *_peaks(counted, planned), f"{average / MIB:.1f}",
                )  # fmt: skip
    return table


def pipedream_tables(crew: Crew) -> tuple[Table, Table]:
    """Return PipeDream's figures 16 and 17 as tables."""
    stages = [f"stage {n}" for n in range(STAGES)]
    memory = Table(
        f"PipeDream's figure 16: {STAGES} stages, NOAM, weight stashing; DP: the whole model and "
        "one mini-batch on every device. Peak MiB, counted (measured); in brackets predicted",
        ("model", "samples", *stages, "DP"),
        ("samples", *stages, "DP"),
    )
    columns = ("samples", "weights, MiB", "pipeline", "DP", "pipeline / DP")
    communicated = Table(
        f"PipeDream's figure 17: KiB communicated per sample, {STAGES} workers; from shapes",
        ("model", *columns),
        columns,
    )
    for name in CUTS:
        subject, batch = zoo(name)
        whole, samples = subject.whole(), len(batch[0])
        both = (
            (subject, streamed(crew, subject, batch)),
            (whole, flushed(crew, whole, batch, "1f1b", 1)),
        )
        memory.add_row(
            name,
            str(samples),
            *(
                peak
                for cut, counted in both
                for peak in _peaks(counted, predicted_nbytes(cut, samples, counted))
            ),
        )
        pipeline, data = communicated_nbytes(subject, samples)
        communicated.add_row(
            name, str(samples), f"{weights_nbytes(subject) / MIB:.1f}", f"{pipeline / 1024:.1f}",
            f"{data / 1024:.1f}", f"{pipeline / data:.2f}",
        )  # fmt: skip
    return memory, communicated


def _peaks(counted: Footprint, predicted: Sequence[int]) -> list[str]:
    """Return MiB by stage, each with its prediction in brackets if there is one."""
    brackets = [f" ({nbytes / MIB:.1f})" for nbytes in predicted] or [""] * len(counted.peak_nbytes)
    return [f"{n / MIB:.1f}{p}" for n, p in zip(counted.peak_nbytes, brackets, strict=True)]


def main() -> None:
    shown = console()
    shown.print(describe())
    with crew_of(STAGES) as crew:
        for table in (dapple_table(crew), *pipedream_tables(crew)):
            shown.print(table)


if __name__ == "__main__":
    main()
