"""BaPipe: its speed-ups over data parallelism, and the largest GNMT that its pipelines hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.topology import Link
from hetpipe.cost.pipedream_profile import read_profile
from hetpipe.cost.table import CostTable
from hetpipe.errors import PlanError
from hetpipe.papers.fpga import table6
from hetpipe.papers.reproduced.gnmt import Gnmt
from hetpipe.papers.reproduced.table import Figure, expected
from hetpipe.plan.plan import Plan
from hetpipe.plan.planners.choice import plan as planned
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions, Proposal
from hetpipe.study.subject import Subject, of_profile, sizes_of

PROFILES = {"vgg16": ("vgg16", 128), "resnet50": ("resnet50", 128), "gnmt8": ("gnmt", 32)}
"""The published profile of a model, and its samples."""
BATCH = 64
"""Samples per device of data parallelism and PipeDream, and the default for BaPipe."""
GPIPE = {"vgg16": (8, 32), "gnmt8_4": (8, 64), "gnmt8_8": (12, 64)}
"""GPipe's micro-batches and samples per device, by case or model."""
HALF_BATCH = {4: 0.62, 8: 0.55}
"""Data-parallel throughput of VGG-16 at 32 samples per device over throughput at 64, by devices."""

PCIE, SUMS, GLOO = "PCIe", "Gloo's sums", "all Gloo"
"""Assumptions about links: all messages at PCIe's data-sheet rate; sums of gradients at Gloo's rate
and other messages at PCIe's; all messages at Gloo's rate."""
LINKS = (PCIE, SUMS, GLOO)
METHODS = ("pipedream", "gpipe", "bapipe")

NOTES = {
    ("vgg16", "pipedream"): "it replicates the convolutions; in our simulation, passes hide a part "
    "of the sums of their gradients",
    ("vgg16", "gpipe"): "a flush exposes the transfers of the first layers' large activations",
    ("vgg16", "bapipe"): "with one device per stage, the first layers' large activations are sent: "
    "below PipeDream, which replicates these layers, and data parallelism wins where sends are as "
    "slow as sums",
    ("resnet50", "pipedream"): "on 4 devices with slow sums, two stages with replicas gain",
    ("resnet50", "gpipe"): "data parallelism, as in the paper",
    ("resnet50", "bapipe"): "with all messages by Gloo it chooses data parallelism; by PCIe it is "
    "level with data parallelism, whose sums here wait for all backwards; slow sums alone would "
    "favour a pipeline",
    ("gnmt8", "pipedream"): "no bubbles; with all messages by Gloo it is below BaPipe, whose "
    "1F1B-SO hides transfers",
    ("gnmt8", "gpipe"): "few micro-batches, so filling and draining the pipeline costs much",
    ("gnmt8", "bapipe"): "on 8 devices all our pipelines are ahead of the paper's: here each link "
    "has its full rate, while Gloo's messages share the host",
}
"""Reasons why our figures differ from the paper's, by model and method."""
LARGEST_NOTES = {
    "dp": "the paper's own counts imply more bytes than ours: GPipe's 74 layers on 8 devices leave "
    "0.21 GB for the activations of a layer at 32 samples, 7 times the bytes in the profile",
    "pipedream": "balanced by time, the first stage keeps N versions and N mini-batches, as many "
    "bytes as a whole model; each stage has only its own gradients and moments, a gain that the "
    "paper does not show",
    "gpipe": "devices divide the weights but not the activations, so layers grow less than devices",
    "bapipe": "stage n keeps only N - n micro-batches; activations are smaller in our bytes, so "
    "layers grow more with the devices than in the paper (4.9 times)",
}

GNMT_PARAMS = {32: 445.6, 42: 550.6, 60: 739.5, 74: 886.4, 118: 1350.0, 158: 1780.0}
"""Millions of parameters by layers, from table 4."""


@dataclass(frozen=True)
class Model:
    """A model on 4 or 8 devices of the paper's cluster: `key` is, for instance, `vgg16_4`.

    `batch` has the samples per device of BaPipe. 0 micro-batches mean data parallelism.
    """

    key: str
    path: Path
    microbatches: int
    batch: int

    @property
    def model(self) -> str:
        return self.key.rpartition("_")[0]

    @property
    def devices(self) -> int:
        return int(self.key.rpartition("_")[2])

    @property
    def cluster(self) -> Cluster:
        return Cluster.published(f"bapipe-{self.devices}-v100")

    @property
    def subject(self) -> Subject:
        return of_profile(self.path, PROFILES[self.model][1], self.devices * BATCH)

    def priced(self, cluster: Cluster, options: PlannerOptions) -> Priced:
        """Return the costs on a cluster, for these options."""
        return Priced(self.subject.costs(cluster, sizes_of(options.mini_batch)), options)

    def data_parallel(self, cluster: Cluster, batch: int = BATCH) -> Plan:
        """Return the plan with the whole model and `batch` samples on each device."""
        priced = self.priced(cluster, PlannerOptions(self.devices * batch))
        return priced.plan(Proposal((), (cluster.ids,), "data-parallel", 1), "data-parallel")


def speedups(data: Path) -> tuple[str, list[Figure]]:
    """Return table 3, with three assumptions about the links."""
    figures = expected(data, "bapipe")["speedup_over_dp"]
    rates = {devices: gloo_Bps(data, devices) for devices in HALF_BATCH}
    rows = []
    for key, figure in figures.items():
        case = case_of(data, key, figure)
        by_links = {links: plans(case, links, rates[case.devices]) for links in LINKS}
        for method in METHODS:
            ours = {links: speedup(by_links[links], method) for links in LINKS}
            text = ", ".join(f"{links} {_times(factor)}" for links, factor in ours.items())
            name = f"{case.model} on {case.devices}, {method}"
            rows.append(Figure(name, f"{figure[method]:.2f}x", text, _note(case, method, by_links)))
    shown = " and ".join(f"{rate / 1e9:.1f} GB/s on {n}" for n, rate in rates.items())
    return (
        "Speed-up over data parallelism at 64 samples a device. Times and bytes are scaled from "
        "the one published batch in proportion to the samples, plus a launch for each layer. Three "
        f"assumptions about links: {PCIE}, all messages at the data sheet's 15.75 GB/s; {SUMS}, "
        "sums of gradients at the rate that follows from the paper's data-parallel VGG-16 at 32 "
        f"and 64 samples ({shown}); {GLOO}, all messages at that rate",
        rows,
    )


def case_of(data: Path, key: str, figure: Mapping[str, float]) -> Model:
    """Return the model of table 3's case `key`; `figure` has the case's micro-batches and batch."""
    path = data / "profiles" / "pipedream" / f"{PROFILES[key.rpartition('_')[0]][0]}.txt"
    return Model(key, path, int(figure.get("M", 0)), int(figure.get("B", BATCH)))


def plans(case: Model, links: str, rate_Bps: float) -> dict[str, Plan | None]:
    """Return the plans of all methods and of data parallelism; None for a plan that does not fit.

    GPipe has the stages of BaPipe's pipeline (section 4.2.1). If the paper has no pipeline, GPipe
    is data parallelism.
    """
    slow = slower(case.cluster, rate_Bps)
    cluster = slow if links == GLOO else case.cluster
    sums = cluster if links == PCIE else slow
    parallel = case.data_parallel(sums)
    samples = case.devices * case.batch
    counts = (case.microbatches,) if case.microbatches else ()
    tables = case.subject.costs(cluster, sizes_of(samples))
    pipeline = _pipeline(tables, cluster, PlannerOptions(samples, counts, replicas=False))
    quickest = max(
        (plan for plan in (pipeline, case.data_parallel(sums, case.batch)) if plan is not None),
        key=lambda plan: plan.samples_per_s,
    )
    return {
        "data-parallel": parallel,
        "pipedream": _pipedream(case, links, rate_Bps),
        "gpipe": _gpipe(case, cluster, pipeline) if case.microbatches else parallel,
        "bapipe": quickest,
    }


def gloo_Bps(data: Path, devices: int) -> float:
    """Return the rate of a link in the all-reduces of the paper's data-parallel runs.

    From 32 to 64 samples per device, passes grow and the all-reduce does not. So the ratio of the
    throughputs and the times of the passes in the profile give the time of the all-reduce. This
    time and the bytes of a ring give the rate.
    """
    case = case_of(data, f"vgg16_{devices}", {})
    passes_s = []
    for batch in (BATCH // 2, BATCH):
        plan = case.data_parallel(case.cluster, batch)
        passes_s.append(plan.step_s - plan.stages[0].all_reduce_s)
    doubled = 2 * HALF_BATCH[devices]
    sum_s = (passes_s[1] - doubled * passes_s[0]) / (doubled - 1)
    params_nbytes = sum(read_profile(case.path).chain().params_nbytes)
    return 2 * (devices - 1) / devices * params_nbytes / sum_s


def slower(cluster: Cluster, rate_Bps: float) -> Cluster:
    """Return the cluster with another rate between all devices of its one server."""
    (server,) = cluster.servers
    assert server.inside is not None  # the cluster's file describes the links inside
    inside = replace(server.inside, bandwidth_Bps=rate_Bps)
    return replace(cluster, servers=(replace(server, inside=inside),))


def _pipedream(case: Model, links: str, rate_Bps: float) -> Plan:
    """Return PipeDream's plan. Its planner knows one rate: the sums' rate if sums are slow."""
    options = PlannerOptions(BATCH, (1,), ("pipedream",))
    slow = slower(case.cluster, rate_Bps)
    cluster = case.cluster if links == PCIE else slow
    tables = case.subject.costs(cluster, sizes_of(BATCH))
    chosen = planned(tables, cluster, options, "pipedream")
    if links != SUMS:
        return chosen
    groups = tuple(stage.devices for stage in chosen.stages)
    pairs = [frozenset(pair) for group in groups for pair in combinations(group, 2)]
    apart = replace(case.cluster, links=dict.fromkeys(pairs, Link(None, rate_Bps)))
    again = Proposal(chosen.cuts, groups, chosen.schedule, 1)
    return case.priced(apart, options).plan(again, "pipedream")


def _gpipe(case: Model, cluster: Cluster, pipeline: Plan | None) -> Plan | None:
    if pipeline is None:
        return None
    count, batch = GPIPE[case.key if case.key in GPIPE else case.model]
    groups = tuple(stage.devices for stage in pipeline.stages)
    priced = case.priced(cluster, PlannerOptions(case.devices * batch, (count,)))
    try:
        return priced.plan(Proposal(pipeline.cuts, groups, "gpipe", count), "gpipe")
    except PlanError:
        return None


def _pipeline(
    tables: Mapping[int, CostTable], cluster: Cluster, options: PlannerOptions
) -> Plan | None:
    try:
        return planned(tables, cluster, options, "bapipe")
    except PlanError:
        return None


def speedup(by_method: Mapping[str, Plan | None], method: str) -> float | None:
    """Return the speed-up over data parallelism; None if the method has no plan that fits."""
    plan, parallel = by_method[method], by_method["data-parallel"]
    assert parallel is not None  # data parallelism fits in all cases of the paper
    return None if plan is None else plan.samples_per_s / parallel.samples_per_s


def _times(factor: float | None) -> str:
    return "out of memory" if factor is None else f"{factor:.2f}x"


def _note(case: Model, method: str, by_links: Mapping[str, Mapping[str, Plan | None]]) -> str:
    """Return why a row differs from the paper, and the most that a method can gain."""
    parallel = by_links[SUMS]["data-parallel"]
    assert parallel is not None
    free = parallel.step_s / (parallel.step_s - parallel.stages[0].all_reduce_s)
    by_memory = [links for links in LINKS if by_links[links][method] is None]
    sentences = [NOTES[case.model, method], f"data parallelism with free sums: {free:.2f}x"]
    if by_memory:
        sentences.append(f"with {' and '.join(by_memory)}, a stage needs more than 16 GB")
    return "; ".join(sentences)


def largest_gnmt(data: Path) -> tuple[str, list[Figure]]:
    """Return table 4: the most layers of GNMT-L on 1, 2, 4, 8 devices, and its parameters."""
    figures = expected(data, "bapipe")["largest_gnmt_layers"]
    gnmt = Gnmt(data)
    rows = []
    for method, paper in figures.items():
        ours = gnmt.largest(method)
        rows.append(Figure(method, _listed(paper), _listed(ours), LARGEST_NOTES[method]))
    for layers, params in GNMT_PARAMS.items():
        ours_M = gnmt.params(layers) / 1e6
        rows.append(Figure(f"parameters of GNMT-{layers}", f"{params:.1f}M", f"{ours_M:.1f}M"))
    return (
        "Largest GNMT-L on 1, 2, 4, 8 devices of 16 GB, 32 samples each, M = 2N micro-batches. A "
        f"layer has {gnmt.params_nbytes * 4 / 1e6:.0f} MB of weights, gradients and Adam's two "
        f"moments, and {gnmt.saved_nbytes / 1e6:.0f} MB of outputs, which the profile lists at 32 "
        "samples; the inner tensors of an LSTM are not counted",
        rows,
    )


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


TABLES = {"3": speedups, "4": largest_gnmt, "6": table6}
