"""Importers: other planners' JSON read as chains, and refusals with their place."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.cluster import Cluster
from hetpipe.cost.importers import read_chain
from hetpipe.cost.pipedream_profile import read_profile
from hetpipe.errors import CostError
from hetpipe.study import of_file

DATA = Path(__file__).parents[2] / "data" / "importers"
MILLI = 1e-3


def milliseconds(times_s):
    return [pytest.approx(time_s / MILLI) for time_s in times_s]


def changed_copy(tmp_path, name, *changes):
    """Return a copy of an example with some values changed, each by its place; None deletes a
    key."""
    data = json.loads((DATA / name).read_text(encoding="utf-8"))
    for *place, last, value in changes:
        there = data
        for key in place:
            there = there[key]
        if value is None:
            del there[last]
        else:
            there[last] = value
    path = tmp_path / name
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_a_graph_of_layers():
    chain = read_chain(DATA / "layers.json")
    assert chain.names == ("node1", "node2", "node3", "node4")
    assert milliseconds(chain.forward_s) == [1.0, 0.25, 0.5, 2.0]
    assert milliseconds(chain.backward_s) == [2.0, 0.5, 0.75, 3.0]
    assert chain.activation_nbytes == (1000, 1000, 1000, 40)  # the last by its gradient
    assert chain.params_nbytes == (64, 0, 0, 400)
    assert chain.cut_nbytes == (1000, 2000, 1000, 0)  # two layers read the first


def test_the_caller_chooses_latency_and_unit():
    chain = read_chain(DATA / "layers.json", latency="cpu", unit_s=1.0)
    assert chain.forward_s == (10.0, 2.5, 5.0, 20.0)
    assert chain.backward_s == (20.0, 5.0, 7.5, 30.0)


def test_a_graph_of_operators():
    chain = read_chain(DATA / "operators.json")
    assert chain.names == ("Gather_1", "MatMul1", "Add1", "Gelu1", "MatMul2")
    assert milliseconds(chain.forward_s) == [1.0, 3.0, 1.0, 0.5, 2.0]
    # MatMul1 and Add1 share their class's backward; nodes without a class belong to the nearest
    # node.
    assert milliseconds(chain.backward_s) == [1.5, 0.75 * 8.0, 0.25 * 8.0, 0.125, 4.25]
    assert chain.params_nbytes == (512, 256, 16, 0, 0)  # counted at the first reader
    assert chain.activation_nbytes == (1024, 2048, 2048, 3000, 4096)
    assert chain.cut_nbytes == (1024, 2048, 2048, 2049, 0)


def test_random_workloads_keep_all_times_and_bytes(tmp_path):
    rng = random.Random(5)
    for _ in range(100):
        count = rng.randint(1, 8)
        outputs = [rng.randint(1, 99) for _ in range(count)]
        params = [rng.randint(0, 99) for _ in range(count)]
        classes = [rng.choice([0, 1, 2, None]) for _ in range(count)]
        ids = rng.sample(range(1000), 2 * count)
        nodes, edges = [], []
        for index, id in enumerate(ids):
            layer = index % count
            node = {
                "id": id,
                "supportedOnFpga": True,
                "isBackwardNode": index >= count,
                "cpuLatency": rng.random(),
                "fpgaLatency": rng.random(),
                "size": outputs[layer] + params[layer],
            }
            nodes.append(node | ({"colorClass": classes[layer]} if classes[layer] else {}))
        pairs = {(i, j) for j in range(count) for i in range(j) if rng.random() < 0.4}
        edges = [(i, j, outputs[i]) for i, j in pairs]
        edges += [(count + j, count + i, outputs[i]) for i, j in pairs]
        edges += [(i, count + i, outputs[i]) for i in range(count)]
        rng.shuffle(edges)
        edges = [{"sourceId": ids[i], "destId": ids[j], "size": n} for i, j, n in edges]
        path = tmp_path / "workload.json"
        path.write_text(json.dumps({"nodes": nodes, "edges": edges}), encoding="utf-8")

        chain = read_chain(path, unit_s=1.0)
        layers = [ids.index(int(name.removeprefix("node"))) for name in chain.names]
        assert sorted(layers) == list(range(count))
        place = {layer: index for index, layer in enumerate(layers)}
        assert all(place[i] < place[j] for i, j in pairs)
        assert chain.forward_s == tuple(nodes[layer]["fpgaLatency"] for layer in layers)
        backward_s = sum(node["fpgaLatency"] for node in nodes[count:])
        assert sum(chain.backward_s) == pytest.approx(backward_s)
        assert chain.params_nbytes == tuple(params[layer] for layer in layers)
        assert chain.activation_nbytes == tuple(outputs[layer] for layer in layers)
        for cut in range(count):
            crossing = {i for i, j in pairs if place[i] <= cut < place[j]}
            assert chain.cut_nbytes[cut] == sum(outputs[i] for i in crossing)


def test_resnet50_as_device_placement_writes_it(tmp_path):
    """The published file comes from PipeDream's profile: sizes are activations plus parameters."""
    if not (folder := os.environ.get("HETPIPE_DATA")):
        pytest.skip("HETPIPE_DATA is unset: it names the folder of the published profiles")
    profile = read_profile(Path(folder) / "profiles" / "pipedream" / "resnet50.txt")
    nodes, edges = [], []
    by_name = {node.name: node for node in profile.nodes}
    ids = {node.name: int(node.name.removeprefix("node")) for node in profile.nodes}
    for node in profile.nodes:
        for name, id, time_s in (
            (node.name, ids[node.name], node.forward_s),
            (f"{node.name}grad", 1000 + ids[node.name], node.backward_s),
        ):
            entry = {"name": name, "id": id, "colorClass": ids[node.name], "supportedOnFpga": 1}
            entry["isBackwardNode"] = int(id >= 1000)
            entry |= {"cpuLatency": 1e4 * time_s, "fpgaLatency": 1e3 * time_s}
            nodes.append(entry | {"size": float(node.activation_nbytes + node.params_nbytes)})
    for writer, reader in profile.edges:
        source, target = by_name[writer], by_name[reader]
        for offset, nbytes in ((0, source.activation_nbytes), (1000, target.activation_nbytes)):
            ends = {"sourceId": offset + ids[writer], "destId": offset + ids[reader]}
            edges.append(ends | {"cost": nbytes / 2**31, "size": float(nbytes)})
    entry = next(node for node in nodes if node["name"] == "node77")  # as in the published file
    assert (entry["size"], round(entry["cpuLatency"], 9)) == (205524992.0, 12.36)
    path = tmp_path / "resnet50_training.json"
    path.write_text(json.dumps({"nodes": nodes, "edges": edges}), encoding="utf-8")

    chain, expected = read_chain(path), profile.chain()
    assert milliseconds(chain.forward_s) == [time_s / MILLI for time_s in expected.forward_s]
    assert milliseconds(chain.backward_s) == [time_s / MILLI for time_s in expected.backward_s]
    times = {"forward_s": expected.forward_s, "backward_s": expected.backward_s}
    assert replace(chain, **times) == expected


def test_piper():
    chain = read_chain(DATA / "piper.json", unit_s=1.0)
    assert chain.names == ("Embedding.0", "Layer.1", "Layer.2")
    assert milliseconds(chain.forward_s) == [1.0, 3.0, 2.0]  # the fastest that is not recomputed
    assert milliseconds(chain.backward_s) == [2.0, 6.0, 4.0]
    assert chain.params_nbytes == (4000, 600, 600)
    assert chain.activation_nbytes == (100, 900, 901)
    assert chain.cut_nbytes == (64, 64 + 48, 0)


def test_metis():
    chain = read_chain(DATA / "metis.json", cut_nbytes=160)
    assert chain.names == ("layer0", "layer1", "layer2")
    assert milliseconds(chain.forward_s) == [0.25, 2.0, 1.0]
    assert milliseconds(chain.backward_s) == [0.5, 4.0, 2.0]
    assert chain.params_nbytes == (4096, 1024, 2048)
    assert chain.activation_nbytes == (160, 160, 160)
    assert chain.cut_nbytes == (160, 160, 0)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("layers.json", ("nodes", 2, "fpgaLatency", -1), "nodes.2.fpgaLatency is -1"),
        ("layers.json", ("nodes", 2, "cpuLatency", "2"), "nodes.2.cpuLatency is '2'"),
        ("layers.json", ("nodes", 2, "fpgaLatency", None), "nodes.2 lacks the key 'fpgaLatency'"),
        ("layers.json", ("nodes", 2, "size", True), "nodes.2.size is True"),
        ("layers.json", ("nodes", 2, "size", 1e300), "nodes.2.size is 1e+300"),
        ("layers.json", ("nodes", 2, "id", 1.5), "nodes.2.id is 1.5"),
        ("layers.json", ("nodes", 2, "isBackwardNode", 3), "nodes.2.isBackwardNode is 3"),
        ("layers.json", ("nodes", 2, "id", 2), "nodes.2 has the id 2 of nodes.1"),
        ("layers.json", ("nodes", 2, "isBackwardNode", 1), "from the backward node 3"),
        ("layers.json", ("nodes", 2, "supportedOnFpga", 0), "nodes.2 is not supported"),
        ("layers.json", ("nodes", []), "nodes is []"),
        ("layers.json", ("nodes", {}), "nodes is {}"),
        ("layers.json", ("edges", None), "lacks the key 'edges'"),
        ("layers.json", ("edges", 1, "size", None), "edges.1 lacks the key 'size'; write the"),
        ("layers.json", ("edges", 1, "destId", 9), "edges.1 names 9"),
        ("layers.json", ("edges", 3, "destId", 1), "edges.3 closes a circle, node"),
        ("layers.json", ("edges", 3, "destId", 3), "edges.3 closes a circle, node3 -> node3"),
        ("piper.json", ("nodes", 1, "TMPCs", "1", None), "nodes.1.TMPCs has the degrees 2"),
        ("piper.json", ("nodes", 1, "TMPCs", "1", []), "nodes.1.TMPCs.1 is []"),
        ("piper.json", ("nodes", 0, "TMPCs", None), "nodes.0 lacks the key 'TMPCs'"),
        ("piper.json", ("nodes", 1, "TMPCs", "1", 0, "memoryUsageA", -2), "memoryUsageA is -2"),
        ("piper.json", ("edges", 0, "sourceId", 7), "edges.0 names 7"),
        ("piper.json", ("edges", 2, "destId", 0), "edges.2 closes a circle"),
        ("piper.json", ("nodes", None), "has neither nodes nor execution_time"),
    ],
)
def test_an_error_names_the_place(tmp_path, name, change, says):
    path = changed_copy(tmp_path, name, change)
    with pytest.raises(CostError) as error:
        read_chain(path)
    assert str(error.value).startswith(f"{path}: ")
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("model", None), "lacks the key 'model'"),
        (("model", "num_layers", 4), "layer_compute_total_ms has 3 entries, model.num_layers is 4"),
        (
            ("model", "parameters", "parameters_per_layer_bytes", [1, 2]),
            "model.parameters.parameters_per_layer_bytes has 2 entries, model.num_layers is 3",
        ),
        (
            ("execution_time", "layer_compute_total_ms", 1, -6),
            "execution_time.layer_compute_total_ms.1 is -6",
        ),
        (
            ("execution_time", "layer_compute_total_ms", 1, "6"),
            "execution_time.layer_compute_total_ms.1 is '6'",
        ),
        (
            ("execution_time", "layer_compute_total_ms", None),
            "execution_time lacks the key 'layer_compute_total_ms'",
        ),
    ],
)
def test_an_error_in_metis_names_the_place(tmp_path, change, says):
    path = changed_copy(tmp_path, "metis.json", change)
    with pytest.raises(CostError) as error:
        read_chain(path, cut_nbytes=160)
    assert str(error.value).startswith(f"{path}: ")
    assert says in str(error.value)


def test_a_workload_without_backward_nodes_is_refused(tmp_path):
    data = json.loads((DATA / "layers.json").read_text(encoding="utf-8"))
    data["nodes"], data["edges"] = data["nodes"][:4], data["edges"][:4]
    path = tmp_path / "inference.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(CostError, match="no backward node among 4; give a workload of training"):
        read_chain(path)


def test_a_workload_without_forward_nodes_is_refused(tmp_path):
    changes = [("nodes", index, "isBackwardNode", True) for index in range(4)]
    with pytest.raises(CostError, match="no forward node among 8"):
        read_chain(changed_copy(tmp_path, "layers.json", *changes))


def test_studies_pass_on_the_arguments_of_importers():
    cluster = Cluster.published("pipedream-a")
    metis = of_file(DATA / "metis.json", 2, 8, "v100-pcie-16", cut_nbytes=160)
    assert [layer.cut_nbytes for layer in metis.costs(cluster, [2])[2].layers] == [160, 160, 0]
    path = DATA / "piper.json"
    quick, slow = (
        of_file(path, 2, 8, "v100-pcie-16", unit_s=unit_s).costs(cluster, [2])[2]
        for unit_s in (1e-3, 1.0)
    )
    device = cluster.ids[0]
    launch_s = slow.devices[device].overhead_s
    times_s = [costs.forward_s(device, 0, 3) - launch_s for costs in (quick, slow)]
    assert times_s[1] == pytest.approx(1000 * times_s[0])


def test_a_backward_node_of_no_forward_node_is_named(tmp_path):
    path = changed_copy(tmp_path, "layers.json", ("nodes", 7, "colorClass", 9), ("edges", 7, None))
    with pytest.raises(CostError, match=r"nodes\.7 is a backward node of no forward node"):
        read_chain(path)


def test_arguments_that_do_not_fit_the_file_are_refused():
    with pytest.raises(CostError, match=r"metis\.json: .* lacks the bytes that cross a cut"):
        read_chain(DATA / "metis.json")
    with pytest.raises(CostError, match="cut_nbytes is -1"):
        read_chain(DATA / "metis.json", cut_nbytes=-1)
    for name in ("layers.json", "piper.json"):
        with pytest.raises(CostError, match="leave cut_nbytes"):
            read_chain(DATA / name, cut_nbytes=160)
    with pytest.raises(CostError, match=r"no latency 'gpu'; .*known: accelerator, cpu"):
        read_chain(DATA / "layers.json", latency="gpu")
    for unit_s in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(CostError, match="a unit of time"):
            read_chain(DATA / "layers.json", unit_s=unit_s)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{\n  nodes\n}", ":2: column 3 is not JSON"),
        ('{"nodes": [NaN]}', ": NaN is not JSON"),
        ("[]", "has neither nodes nor execution_time"),
        ("3", "has neither nodes nor execution_time"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, text, says):
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CostError) as error:
        read_chain(path)
    assert str(path) in str(error.value)
    assert says in str(error.value)
    with pytest.raises(CostError, match="absent"):
        read_chain(tmp_path / "absent.json")
