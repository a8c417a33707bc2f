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
"""The profile of a model, and its batch."""
BATCH = 64
"""Samples per device of data parallelism and PipeDream, and the default for BaPipe."""
GPIPE = {"vgg16": (8, 32), "gnmt8_4": (8, 64), "gnmt8_8": (12, 64)}
"""GPipe's micro-batches and samples per device, by case or model."""
HALF_BATCH = {4: 0.62, 8: 0.55}
"""Data-parallel throughput of VGG-16 at 32 samples per device over 64 samples, by devices."""

PCIE, SUMS, GLOO = "PCIe", "Gloo's sums", "all Gloo"
"""Links: all at the data sheet's rate, gradients' sums at Gloo's rate, or all at Gloo's rate."""
LINKS = (PCIE, SUMS, GLOO)
METHODS = ("pipedream", "gpipe", "bapipe")

NOTES = {
    ("vgg16", "pipedream"): "it replicates the convolutions, and ours hides a part of their sums",
    ("vgg16", "gpipe"): "a flush exposes the transfers of the first layers' large activations",
    ("vgg16", "bapipe"): "a stage a device sends the first layers' large activations: below "
    "PipeDream's replicas here, and data parallelism where sends are as slow as sums",
    ("resnet50", "pipedream"): "on 4 devices with slow sums replicas of two stages gain",
    ("resnet50", "gpipe"): "data parallelism, as the paper has it",
    ("resnet50", "bapipe"): "data parallelism all by Gloo; by PCIe level with it, whose sums here "
    "wait for all backwards; slow sums alone would favour a pipeline",
    ("gnmt8", "pipedream"): "no bubbles; all by Gloo it is below BaPipe, whose 1F1B-SO hides "
    "transfers",
    ("gnmt8", "gpipe"): "it fills and drains the pipeline in few micro-batches",
    ("gnmt8", "bapipe"): "on 8 devices all of ours are ahead: each link has its rate to itself, "
    "while Gloo's messages share the host",
}
"""Why our figures differ, by model and method."""
LARGEST_NOTES = {
    "dp": "the paper's own counts imply more than our bytes: its 74 layers on 8 devices of GPipe "
    "leave 0.21 GB each for activations, 7 times what the profile lists",
    "pipedream": "balanced by time, the first stage keeps N versions and N mini-batches, a whole "
    "model's; it gains by gradients and moments of its stage alone, which the paper does not see",
    "gpipe": "weights are divided and activations are not, so layers grow less than devices",
    "bapipe": "stage n keeps N - n micro-batches alone; activations weigh less in our bytes, so "
    "layers grow with the devices more than the paper's 4.9 times",
}

GNMT_PARAMS = {32: 445.6, 42: 550.6, 60: 739.5, 74: 886.4, 118: 1350.0, 158: 1780.0}
"""Millions of parameters by layers, from table 4."""


@dataclass(frozen=True)
class Model:
    """A model on some devices of the paper's cluster; 0 micro-batches mean data parallelism."""

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
        "Speed-up over data parallelism at 64 samples a device. Times and bytes of the one "
        "published batch in proportion to the samples, plus a launch for each layer. Links by "
        "PCIe's data sheet (15.75 GB/s); with sums of gradients at the rate of Gloo that follows "
        f"from the paper's data-parallel VGG-16 at 32 and 64 samples ({shown}); all at that rate",
        rows,
    )


def case_of(data: Path, key: str, figure: Mapping[str, float]) -> Model:
    """Return a case of table 3."""
    path = data / "profiles" / "pipedream" / f"{PROFILES[key.rpartition('_')[0]][0]}.txt"
    return Model(key, path, int(figure.get("M", 0)), int(figure.get("B", BATCH)))


def plans(case: Model, links: str, rate_Bps: float) -> dict[str, Plan | None]:
    """Return the plans of all methods and of data parallelism; None if memory is short.

    GPipe has the stages of BaPipe's pipeline (section 4.2.1), and is data parallelism if the paper
    has no pipeline.
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
    """Return the rate of a link in all-reduces of the paper's data-parallel runs.

    From 32 to 64 samples per device, passes grow and the sum does not. So the ratio of throughputs
    and the profile's passes give the sum's time; with the bytes of a ring, they give the rate.
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
    assert server.inside is not None  # the file of the cluster has it
    inside = replace(server.inside, bandwidth_Bps=rate_Bps)
    return replace(cluster, servers=(replace(server, inside=inside),))


def _pipedream(case: Model, links: str, rate_Bps: float) -> Plan:
    """Return PipeDream's plan. Its planner knows one rate: with slow sums, the rate of sums."""
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
    """Return the throughput over data parallelism's; None if memory is short."""
    plan, parallel = by_method[method], by_method["data-parallel"]
    assert parallel is not None  # data parallelism fits in all cases of the paper
    return None if plan is None else plan.samples_per_s / parallel.samples_per_s


def _times(factor: float | None) -> str:
    return "out of memory" if factor is None else f"{factor:.2f}x"


def _note(case: Model, method: str, by_links: Mapping[str, Mapping[str, Plan | None]]) -> str:
    """Return why a row differs, and the gain that the links allow."""
    parallel = by_links[SUMS]["data-parallel"]
    assert parallel is not None
    free = parallel.step_s / (parallel.step_s - parallel.stages[0].all_reduce_s)
    by_memory = [links for links in LINKS if by_links[links][method] is None]
    sentences = [NOTES[case.model, method], f"all devices without Gloo's sums: {free:.2f}x"]
    if by_memory:
        sentences.append(f"by {' and '.join(by_memory)} a stage saves more than 16 GB")
    return "; ".join(sentences)


def largest_gnmt(data: Path) -> tuple[str, list[Figure]]:
    """Return table 4: layers of GNMT-L on 1, 2, 4, 8 devices, and its parameters."""
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
        "Largest GNMT-L on 1, 2, 4, 8 devices of 16 GB, 32 samples each, M = 2N. A layer counts "
        f"{gnmt.params_nbytes * 4 / 1e6:.0f} MB for weights, gradients and Adam's two moments, and "
        f"{gnmt.saved_nbytes / 1e6:.0f} MB for the outputs that the profile lists at 32 samples, "
        "without what an LSTM keeps inside",
        rows,
    )


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


TABLES = {"3": speedups, "4": largest_gnmt, "6": table6}
