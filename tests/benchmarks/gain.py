"""Throughput on mixed clusters that are only described: `python -m benchmarks.gain`.

All figures are simulated with modelled costs, from the profiles in the folder that HETPIPE_DATA
names. The table compares the planner auto with three others: PipeDream's planner, which assumes
equal devices, and stages of equally many layers, in the cluster's order (even) or with the quickest
device first (speed-sorted). The last column is auto over the sum of all devices' throughputs.
"""

from __future__ import annotations

from rich.console import Console

from hetpipe import environment
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.cluster.topology import Topology
from hetpipe.errors import HetpipeError
from hetpipe.report.tables import Table
from hetpipe.study.comparison import compare
from hetpipe.study.subject import of_profile

CLUSTERS: dict[str, tuple[str, ...]] = {
    "2 V100, 2 VCU129, 1 CPU": ("v100-pcie-16",) * 2 + ("vcu129",) * 2 + ("desktop-cpu",),
    "2 A100, 4 T4": ("a100-40",) * 2 + ("t4",) * 4,
    "1 A100, 7 T4": ("a100-40",) + ("t4",) * 7,
    "8 types": (
        "h100", "a100-40", "v100-pcie-16", "p100", "t4", "rtx-2080-ti", "vcu129", "u280",
    ),
}  # fmt: skip
PROFILES = {
    "vgg16": ("pipedream/vgg16", 128, 512),
    "resnet50": ("pipedream/resnet50", 128, 512),
    "gnmt": ("pipedream/gnmt", 32, 256),
    "bert-48": ("dapple/bert-48-pbs-2", 2, 64),
}
NETWORK = Topology(1e-5, 25e9 / 8)  # 10 us and 25 Gb/s between any two devices
PLANNERS = ("auto", "pipedream", "even", "speed-sorted")


def main() -> None:
    """Print a table of all clusters and models. Raises `HetpipeError` without the profiles."""
    folder = environment.path("HETPIPE_DATA")
    if folder is None:
        raise HetpipeError("HETPIPE_DATA is unset: it names the folder of the published profiles")
    columns = ["cluster", "model", *(f"{name}, samples/s" for name in PLANNERS), "auto of the sum"]
    table = Table("Simulated throughput, modelled costs, 25 Gb/s", columns, columns[2:])
    for name, boards in CLUSTERS.items():
        for model, (profile, samples, mini_batch) in PROFILES.items():
            path = folder / "profiles" / f"{profile}.txt"
            comparison = compare(
                of_profile(path, samples, mini_batch), cluster_of(boards), planners=PLANNERS
            )
            rates = {
                row.planner: row.plan.samples_per_s if row.plan else None for row in comparison.rows
            }
            share = (rates["auto"] or 0.0) / comparison.sum_samples_per_s
            shown = [rates[planner] for planner in PLANNERS]
            cells = ["no plan" if rate is None else f"{rate:.1f}" for rate in shown]
            table.add_row(name, model, *cells, f"{100 * share:.0f} %")
    Console(width=150).print(table)


def cluster_of(boards: tuple[str, ...]) -> Cluster:
    """Return a cluster of these boards, each on the network and not in a server."""
    members = tuple(Member(f"{board}.{n}", "", board=board) for n, board in enumerate(boards))
    return Cluster(members, network=NETWORK)


if __name__ == "__main__":
    main()
