"""PipeOptim: the largest batches under four ways to keep versions of the weights."""

from __future__ import annotations

from pathlib import Path

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.between import at_size
from hetpipe.cost.pipedream_profile import read_profile
from hetpipe.papers.reproduced.gnmt import even_cuts
from hetpipe.papers.reproduced.table import Figure
from hetpipe.study.largest import Method, fits, most
from hetpipe.study.subject import of_chain, sizes_of

METHODS = {
    "GPipe": Method("gpipe"),
    "PipeDream": Method("pipedream", "stash"),
    "PipeDream-2BW": Method("pipedream", "2bw"),
    "PipeOptim": Method("pipedream", "pipeoptim"),
}
GPIPE_MICROBATCHES = 4  # per mini-batch; the other methods have one
LARGEST = {
    "ResNet-101": (86, 86, 86, 86),
    "GNMT-8": (130, 136, 140, 142),
    "GNMT-16": (124, 116, 120, 120),
}
"""Samples per device by model, in the order of the methods (table V)."""
PROFILES = {"GNMT-8": ("pipedream/gnmt", 32), "GNMT-16": ("dapple/gnmt-16-pbs-64", 64)}
"""The published profile of a model, and its samples. ResNet-101 has no published profile."""
MOST_SAMPLES = 512
NOTES = {
    "GPipe": "its last stage keeps the outputs over all words for 4 micro-batches, the last stage "
    "of an asynchronous pipeline for 1",
    "PipeDream": "stage n keeps N - n versions",
    "PipeDream-2BW": "two versions on each stage",
    "PipeOptim": "the weights and their prediction, which is also counted on the last stage",
}


def largest_batches(data: Path) -> tuple[str, list[Figure]]:
    """Return table V: samples per device on 4 devices of 16 GB."""
    rows = []
    for model, figures in LARGEST.items():
        ours = batches(data, model) if model in PROFILES else {}
        for (name, note), paper in zip(NOTES.items(), figures, strict=True):
            row = f"{model}, {name}"
            if model in PROFILES:
                rows.append(Figure(row, str(paper), str(ours[name]), note))
            else:
                rows.append(Figure(row, str(paper), "-", "this model has no published profile"))
    return (
        "Largest batch per device on 4 devices of 16 GB with Adam; all rows of a model have the "
        "same stages, balanced by time. Our bytes are the outputs in the profiles, without the "
        "inner tensors of an LSTM and the memory of libraries. So our batches are larger; compare "
        "only their order",
        rows,
    )


def batches(data: Path, model: str) -> dict[str, int]:
    """Return the most samples of a micro-batch, by method."""
    name, samples = PROFILES[model]
    chain = read_profile(data / "profiles" / f"{name}.txt").without_inputs().chain()
    cluster = Cluster.published("pipeoptim-b")
    tables = of_chain(model, chain, samples, MOST_SAMPLES, state_copies=2).costs(
        cluster, sizes_of(MOST_SAMPLES)
    )
    cuts = even_cuts(tables[max(tables)], cluster.ids)

    def largest(method: Method) -> int:
        count = GPIPE_MICROBATCHES if method.schedule == "gpipe" else 1
        return most(lambda size: fits(at_size(tables, size), cluster.ids, method, count, cuts))

    return {name: largest(method) for name, method in METHODS.items()}


TABLES = {"5": largest_batches}
