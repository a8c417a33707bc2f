"""Published profiles: reading, refusals with their line, and the bytes that cross a cut."""

import os
import random
from pathlib import Path

import pytest
from profile_files import write_profile

from hetpipe.cost.pipedream_profile import ProfileGraph, ProfileNode, read_profile
from hetpipe.errors import CostError

LINE = (
    "{} -- {} -- forward_compute_time=1.5, backward_compute_time=2, "
    "activation_size={}, parameter_size=8.000"
)
SIZES = {"alexnet": (23, 23), "gnmt": (48, 58), "resnet50": (177, 193), "vgg16": (41, 41)}


@pytest.fixture
def profiles():
    """Return the folder of published profiles."""
    if not (folder := os.environ.get("HETPIPE_DATA")):
        pytest.skip("HETPIPE_DATA is unset: it names the folder of the published profiles")
    return Path(folder) / "profiles"


def write_lines(tmp_path, *lines):
    path = tmp_path / "graph.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def node(name, activation_nbytes=4):
    return ProfileNode(name, "Linear", 1.0, 2.0, activation_nbytes, 8)


def test_a_profile_as_pipedream_and_as_dapple_write_it(tmp_path):
    path = write_lines(
        tmp_path,
        LINE.format("node1", "Input0", "16.000"),
        LINE.format("node2", "LSTM(4 -- 4)", "[9.0; 2.0; 1]"),
        "  node1 -- node2",
        "",
        LINE.format("node3", "Linear", "4"),
        "\tnode2 -- node3",
    )
    profile = read_profile(path)
    assert profile.nodes == (
        ProfileNode("node1", "Input0", 0.0015, 0.002, 16, 8),
        ProfileNode("node2", "LSTM(4 -- 4)", 0.0015, 0.002, 12, 8),
        ProfileNode("node3", "Linear", 0.0015, 0.002, 4, 8),
    )
    assert profile.edges == (("node1", "node2"), ("node2", "node3"))
    assert profile.without_inputs() == ProfileGraph(profile.nodes[1:], profile.edges[1:])


@pytest.mark.parametrize("model", SIZES)
def test_published_profiles_survive_a_round_trip(profiles, tmp_path, model):
    profile = read_profile(profiles / "pipedream" / f"{model}.txt")
    assert (len(profile.nodes), len(profile.edges)) == SIZES[model]
    write_profile(profile, tmp_path / "again.txt")
    assert read_profile(tmp_path / "again.txt") == profile
    assert len(profile.chain().names) == len(profile.nodes)


def test_dapples_profiles_are_read(profiles):
    nodes = {path.name: read_profile(path).nodes for path in (profiles / "dapple").glob("*.txt")}
    counts = {name: len(of_one) for name, of_one in nodes.items()}
    assert counts == {"bert-48-pbs-2.txt": 53, "gnmt-16-pbs-64.txt": 96, "vgg-19-pbs-32.txt": 26}
    lstm = next(one for one in nodes["gnmt-16-pbs-64.txt"] if one.name == "node7")
    assert lstm.activation_nbytes == 9175040 + 2 * 262144


def test_any_time_survives_a_round_trip(tmp_path):
    rng = random.Random(3)
    times = [
        0.0,
        5e-324,
        1e9,
        0.1 + 0.2,
        *(rng.random() * 10 ** rng.randint(-9, 3) for _ in "x" * 99),
    ]
    nodes = tuple(ProfileNode(f"n{i}", "", t, t / 3, 1 << i % 60, i) for i, t in enumerate(times))
    profile = ProfileGraph(nodes, ())
    write_profile(profile, tmp_path / "graph.txt")
    assert read_profile(tmp_path / "graph.txt") == profile


GOOD = [LINE.format("a", "Linear", 4), LINE.format("b", "Linear", 4), LINE.format("c", "Linear", 4)]


@pytest.mark.parametrize(
    ("lines", "number", "says"),
    [
        ([GOOD[0], GOOD[1].replace("=1.5", "=-1.5")], 2, "forward_compute_time is -1.5"),
        ([GOOD[0], GOOD[1].replace("=2", "=two")], 2, "backward_compute_time is 'two'"),
        ([GOOD[0].replace("=1.5", "=nan")], 1, "forward_compute_time is nan"),
        ([GOOD[0].replace("=1.5", "=1e999")], 1, "forward_compute_time is 1e999"),
        ([GOOD[0].replace("=4", "=4.5")], 1, "activation_size is 4.5"),
        ([GOOD[0].replace("=4", "=[4; ]")], 1, "activation_size is '[4; ]'"),
        ([GOOD[0].replace(", parameter_size=8.000", "")], 1, "parameter_size is missing"),
        ([GOOD[0].replace("=1.", "=7,1")], 1, "has no name before it; write name=number, with"),
        ([GOOD[0] + ", parameter_size=9"], 1, "'parameter_size' occurs twice"),
        ([GOOD[0] + " -- stage_id=x"], 1, "stage_id is 'x'"),
        (["a -- Linear"], 1, "lacks one of its parts"),
        ([GOOD[0], GOOD[1], GOOD[0]], 3, "a occurs twice, first in line 1"),
        ([*GOOD, "\ta -- b", "\tb -- d"], 5, "the edge names 'd'"),
        ([*GOOD, "\ta -- b -- c"], 4, "an edge has 3 names"),
        ([*GOOD, "\ta -- b", "\tb -- c", "\tc -- b"], 6, "closes a circle"),
        ([*GOOD, "\ta -- a", "\ta -- b"], 4, "closes a circle, a -> a"),
        ([""], 1, "no nodes"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, lines, number, says):
    path = write_lines(tmp_path, *lines)
    with pytest.raises(CostError) as error:
        read_profile(path)
    assert str(error.value).startswith(f"{path}:{number}: ")
    assert says in str(error.value)


def test_missing_and_binary_files_are_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("absent", "binary"):
        with pytest.raises(CostError, match=f"{name}:.* cannot be read|{name}:.* is not UTF-8"):
            read_profile(tmp_path / name)


def test_a_partitioned_profile_is_read_with_its_stages(tmp_path):
    """Read a profile in the form that PipeDream's optimizer writes."""
    lines = [*(f"{line} -- stage_id={stage}" for stage, line in enumerate(GOOD[:2])), GOOD[2]]
    plain = read_profile(write_lines(tmp_path, *GOOD, "\ta -- b"))
    profile = read_profile(write_lines(tmp_path, *lines, "\ta -- b"))
    assert [each.stage for each in profile.nodes] == [0, 1, None]
    assert profile.chain() == plain.chain()
    write_profile(profile, tmp_path / "again.txt")
    assert read_profile(tmp_path / "again.txt") == profile


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    path = write_lines(tmp_path, *GOOD)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_profile(path).nodes[0].name == "a"


class Text(str):
    """Text that counts its comparisons."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Text.compared += 1
        return str.__eq__(self, other)


class Nbytes(int):
    """A number of bytes that counts its additions."""

    added = 0

    def __radd__(self, other):
        Nbytes.added += 1
        return int(self) + other


def test_a_long_circle_is_found_without_comparing_all_its_edges():
    names = [Text(f"n{number}") for number in range(1000)]
    edges = tuple(zip(names, [*names[1:], names[0]], strict=True))
    graph = ProfileGraph(tuple(map(node, names)), edges)
    Text.compared = 0
    assert sorted(graph.circle()) == sorted(edges)
    assert Text.compared < 100_000  # all pairs would be half a million


def test_far_readers_are_not_added_to_each_cut():
    size = 1000
    nodes = tuple(node(f"n{number}", Nbytes(4)) for number in range(size))
    chain = ProfileGraph(nodes, tuple((one.name, nodes[-1].name) for one in nodes[:-1])).chain()
    assert chain.cut_nbytes == (*(4 * number for number in range(1, size)), 0)
    assert Nbytes.added < 10 * size  # all pairs would be half a million


def test_writers_come_first_and_then_the_file_order():
    nodes = tuple(node(name) for name in "dcba")
    profile = ProfileGraph(nodes, (("a", "d"), ("b", "c")))
    assert "".join(one.name for one in profile.order()) == "bcad"
    with pytest.raises(CostError, match="circle"):
        ProfileGraph(nodes, (("a", "b"), ("b", "a"))).order()


def test_the_bytes_across_a_cut_equal_their_definition():
    rng = random.Random(7)
    for _ in range(200):
        count = rng.randint(1, 8)
        names = [f"n{i}" for i in range(count)]
        edges = tuple(
            (names[i], names[j]) for j in range(count) for i in range(j) if rng.random() < 0.4
        )
        nodes = [node(name, rng.randint(0, 99)) for name in names]
        rng.shuffle(nodes)
        profile = ProfileGraph(tuple(nodes), edges)
        chain, layers = profile.chain(), profile.order()
        assert chain.names == tuple(layer.name for layer in layers)
        place = {name: i for i, name in enumerate(chain.names)}
        assert all(place[writer] < place[reader] for writer, reader in edges)
        for cut in range(count):
            crossing = {a for a, b in edges if place[a] <= cut < place[b]}
            sizes = [layer.activation_nbytes for layer in layers if layer.name in crossing]
            assert chain.cut_nbytes[cut] == sum(sizes)
