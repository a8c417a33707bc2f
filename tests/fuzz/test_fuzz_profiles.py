"""Profiles of other planners: errors name the place, and one that is read has costs on a board."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from damage import changed, damaged_json, dumped, spoilt
from documents import DATA, IN_JSON
from fuzzing import ACCEPTED, REFUSED, check_both_ends, outcomes, result_of
from hypothesis import strategies as st
from invented import values
from profile_files import write_profile

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.cluster.topology import Topology
from hetpipe.cost import importers, workloads
from hetpipe.cost.importers import read_chain
from hetpipe.cost.pipedream_profile import ChainCosts, read_profile
from hetpipe.errors import CostError
from hetpipe.study.subject import of_chain

IMPORTED = {path.stem: json.loads(path.read_text())
            for path in sorted((DATA / "importers").glob("*.json"))}  # fmt: skip
KINDS = [workloads._Workload, workloads._PiperWorkload, importers._MetisProfile]
BOARDS = Cluster(
    (Member("a", "", board="v100-pcie-16"), Member("b", "", board="u250")),
    network=Topology(0.0, 1e9),
)
GRAPH = b"""\
node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=0.0, parameter_size=0.000
node2 -- Conv2d(3, 64) -- forward_compute_time=5.9, backward_compute_time=7.1, activation_size=[4096.0; 1024.0], parameter_size=7168.000
node3 -- ReLU(inplace) -- forward_compute_time=0.4, backward_compute_time=1e-1, activation_size=4096.0, parameter_size=0.000
node4 -- Linear -- forward_compute_time=1.4, backward_compute_time=3.1, activation_size=40, parameter_size=40960
\tnode1 -- node2
\tnode2 -- node3
\tnode2 -- node4
\tnode3 -- node4
"""  # noqa: E501


def attempt(path: Path, content: bytes, **more: Any) -> str:
    path.write_bytes(content)
    chain = result_of(lambda: read_chain(path, **more), (CostError,))
    if isinstance(chain, str):
        assert re.search(IN_JSON, chain.removeprefix(str(path))), chain
        return REFUSED
    use(chain)
    return ACCEPTED


def attempt_graph(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    graph = result_of(lambda: read_profile(path), (CostError,))
    if isinstance(graph, str):
        assert re.search(r":\d+: |: cannot be read", graph), graph
        return REFUSED
    write_profile(graph, path)
    assert read_profile(path) == graph
    inner = graph.without_inputs()
    if inner.nodes:
        use(result_of(inner.chain, ()))
    return ACCEPTED


def use(chain: Any) -> None:
    """Compute costs on boards; some layer may be impossible on a board."""
    assert isinstance(chain, ChainCosts)
    if len(chain.names) < 50:
        costs = of_chain("fuzzed", chain, 32, 256).costs
        result_of(lambda: costs(BOARDS, [32, 1]), (CostError,))


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPORTED)
def test_damaged(name: str, tmp_path: Path) -> None:
    files, more = damaged_json(st.just(IMPORTED[name])), {}
    more = {"cut_nbytes": 10} if name == "metis" else {}
    more |= {"latency": "cpu"} if name == "operators" else {}
    check_both_ends(outcomes(files, lambda file: attempt(tmp_path / "p.json", file, **more)))


def fitted(workload: dict[str, Any]) -> dict[str, Any]:
    """Return nodes with unique ids and edges between them."""
    if "nodes" not in workload:
        count = workload["model"]["num_layers"] = 2
        times, model = workload["execution_time"], workload["model"]["parameters"]
        times["layer_compute_total_ms"] = (times["layer_compute_total_ms"] + [1.0] * 2)[:count]
        nbytes = model["parameters_per_layer_bytes"]
        model["parameters_per_layer_bytes"] = (nbytes + [1.0] * 2)[:count]
        return workload
    nodes = workload["nodes"]
    for number, node in enumerate(nodes):
        node["id"] = number
        if "TMPCs" in node:
            node["TMPCs"] = {"1": next(iter(node["TMPCs"].values()), _PIPER)}
        else:
            node |= {"isBackwardNode": number % 2 == 1, "supportedOnFpga": True}
    for edge in workload["edges"]:
        one, other = edge["sourceId"] % len(nodes), edge["destId"] % len(nodes)
        edge |= {"sourceId": min(one, other), "destId": max(one, other)}
    return workload


_PIPER = [{"timePerSample": 1.0, "parameterSize": 1.0, "memoryUsageA": 1.0}]


@pytest.mark.slow
def test_invented(tmp_path: Path) -> None:
    whole = st.one_of(*(values(kind, strict=True).map(fitted) for kind in KINDS))
    loose = st.one_of(*(values(kind) for kind in KINDS))
    files = (whole | changed(whole) | loose).map(dumped)

    def check(content: bytes) -> str:
        more = {"cut_nbytes": 7} if b'"execution_time"' in content else {}
        return attempt(tmp_path / "p.json", content, **more)

    check_both_ends(outcomes(files, check))


def test_damaged_graphs(tmp_path: Path) -> None:
    files = spoilt(st.just(GRAPH))
    check_both_ends(outcomes(files, lambda content: attempt_graph(tmp_path / "g.txt", content)))


NUMBERS = st.sampled_from(
    ["1", "0", "0.5", "1e3", "1e18", "1e19", "0e999999999", "0e-999999999", "1e-999999999", "-0",
     "7,17", "-1", "nan", "snan", "inf", "[1; 2]", "[;]", "[]", "1_0", "٣", "9" * 5000, "1e-400",
     ""]
)  # fmt: skip
PLAIN = st.sampled_from(["1", "0", "2.5", "4e3"])


STAGES = st.sampled_from(["", "", " -- stage_id=0", " -- stage_id=12", " -- stage_id=-1", " -- x"])


def line(number: int, name: str, description: str, costs: list[str], stage: str) -> str:
    keys = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
    text = ", ".join(f"{key}={cost}" for key, cost in zip(keys, costs, strict=False))
    return f"{name or f'node{number}'} -- {description} -- {text}{stage}"


def test_invented_graphs(tmp_path: Path) -> None:
    names = st.sampled_from(["", "", "", "", "node1", "a b", " -- ", "x" * 50_000, "\u2028", "é"])
    costs = st.lists(st.sampled_from(["1", "0", "4e3"]), min_size=4, max_size=4) | st.lists(
        PLAIN | NUMBERS, min_size=3, max_size=5
    )
    descriptions = st.sampled_from(["Linear", "Input", ""])
    nodes = st.lists(st.tuples(names, descriptions, costs, STAGES), max_size=4)
    ends = st.sampled_from(["node0", "node1", "node2", "node9", "a b", ""])
    edges = st.lists(st.tuples(ends, ends).map(" -- ".join), max_size=4)
    texts = st.builds(
        lambda rows, pairs: "\n".join(
            [*(line(n, *row) for n, row in enumerate(rows)), *(f"\t{pair}" for pair in pairs)]
        ),
        nodes,
        edges,
    )
    starts = st.sampled_from([b"", b"", b"\xef\xbb\xbf", b"\xff\xfe"])
    files = st.builds(bytes.__add__, starts, texts.map(str.encode))
    check_both_ends(outcomes(files, lambda content: attempt_graph(tmp_path / "g.txt", content)))
