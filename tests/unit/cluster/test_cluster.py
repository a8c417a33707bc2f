"""Clusters: the devices of a machine that take part, and the contents of cluster files."""

import os
import warnings
from dataclasses import replace
from functools import partial

import pytest

from hetpipe.cluster import file_tables
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.cluster_file import BandwidthWarning
from hetpipe.cluster.local import DeviceWarning
from hetpipe.cluster.member import Member
from hetpipe.cluster.topology import Link, Server, Topology
from hetpipe.cluster.units import parse_bandwidth, parse_link, parse_time
from hetpipe.crew.crew import Crew
from hetpipe.errors import ClusterError
from hetpipe.report.tables import device_table
from hetpipe.sdk.host.registry import Provider
from hetpipe.sdk.info import Capabilities, DeviceInfo

EMULATED = Capabilities(emulated=True)
REFERENCE = Capabilities(reference=True)


def device(id, kind="cpu", domain="ram", capabilities=Capabilities()):  # noqa: B008 - frozen
    backend = id.partition(":")[0]
    return DeviceInfo(id, backend, kind, "name", "vendor", "1", 1 << 30, domain,
                      capabilities=capabilities)  # fmt: skip


FOUND = [
    device("plain:cpu:0", capabilities=REFERENCE),
    device("soft:fast:0"),
    device("soft:slow:0"),
    device("soft:board:0", "fpga", capabilities=EMULATED),
    device("soft:board:1", "fpga", capabilities=EMULATED),
    device("torchy:cpu:0"),
    device("torchy:gpu:0", "gpu", "gpu0"),
    device("torchy:gpu:1", "gpu", "gpu1"),
]


@pytest.fixture
def machine(monkeypatch):
    """Imitate a machine with FOUND and the cores 4 to 11; return a function that changes the
    cores."""

    def discover(names):
        found = [info for info in FOUND if names is None or info.backend in names]
        return found, {"broken": "no driver; install one"}

    def set_cores(*cores):
        monkeypatch.setattr("hetpipe.cluster.member.available_cores", lambda: cores)
        monkeypatch.setattr("hetpipe.cluster.local.available_cores", lambda: cores)

    monkeypatch.setattr("hetpipe.cluster.local.discover_devices", discover)
    monkeypatch.setattr("hetpipe.cluster.local.trusted", lambda info: "")
    set_cores(*range(4, 12))
    return set_cores


def test_accelerators_and_one_cpu_worker_per_backend_share_the_cores(machine):
    assert Cluster.local().members == (
        Member("soft:fast:0", "soft:fast:0", (4, 5, 6)),
        Member("torchy:cpu:0", "torchy:cpu:0", (7, 8, 9)),
        Member("torchy:gpu:0", "torchy:gpu:0"),
        Member("torchy:gpu:1", "torchy:gpu:1"),
    )


def test_no_core_stays_free_that_processors_need(machine):
    machine(3, 7, 8)
    assert [member.cores for member in Cluster.local().members] == [(3,), (7, 8), (), ()]


def test_each_memory_domain_gets_its_own_cpu_workers(machine, monkeypatch):
    numa = [device("soft:fast:0"), device("soft:fast:1", domain="ram1"), device("soft:slow:0")]
    monkeypatch.setattr("hetpipe.cluster.local.discover_devices", lambda names: (numa, {}))
    assert Cluster.local().ids == ("soft:fast:0", "soft:fast:1")


def test_rank_chooses_among_the_cpu_devices_of_a_backend(machine):
    times_s = {"soft:fast:0": 2.0, "soft:slow:0": 1.0}
    local = Cluster.local(["soft"], rank=lambda info: times_s.get(info.id, 0.0))
    assert local.ids == ("soft:slow:0",)


def card(id, domain, address, **capabilities):
    found = device(id, "gpu", domain, Capabilities(**capabilities))
    return replace(found, address=address)


CARDS = [
    device("plain:cpu:0", domain="host"),
    card("plain:a:0", "pci:0000:3b:00", "pci:0000:3b:00", untried=True),
    card("plain:a:1", "host", "pci:0000:00:02", untried=True),
    card("plain:b:0", "pci:0000:af:00/0", "pci:0000:af:00", untried=True),
    card("torchy:gpu:0", "pci:0000:3b:00", "pci:0000:3b:00"),
    card("torchy:gpu:1", "host", "pci:0000:00:02"),
    card("torchy:gpu:2", "pci:0000:af:00/0", "pci:0000:af:00"),
    card("torchy:gpu:3", "pci:0000:af:00/1", "pci:0000:af:00"),
    card("unknown:gpu:0", "unknown:gpu:0", "", untried=True),
]
TORCHY = ("torchy:gpu:0", "torchy:gpu:1", "torchy:gpu:2", "torchy:gpu:3")


def test_a_card_joins_once_although_two_drivers_show_it(machine, monkeypatch):
    """Both drivers' devices joined: they were measured against each other, and the card's memory
    counted twice. Parts of a card are several devices of one driver."""
    monkeypatch.setattr("hetpipe.cluster.local.discover_devices", lambda names: (CARDS, {}))
    assert Cluster.local().ids == ("plain:cpu:0", *TORCHY, "unknown:gpu:0")
    ranked = Cluster.local(rank=lambda info: float(info.id != "plain:a:0"))
    assert ranked.ids == ("plain:cpu:0", "plain:a:0", *TORCHY[1:], "unknown:gpu:0")
    both = ["plain:a:0", "torchy:gpu:0"]
    assert Cluster.local(devices=both).ids == tuple(both)


def test_a_driver_that_fails_its_test_leaves_the_card_to_another(machine, monkeypatch):
    monkeypatch.setattr("hetpipe.cluster.local.discover_devices", lambda names: (CARDS[1:5], {}))
    failing = {"torchy:gpu:0": "wrong results", "plain:b:0": "a crash"}
    monkeypatch.setattr("hetpipe.cluster.local.trusted", lambda info: failing.get(info.id, ""))
    with pytest.warns(DeviceWarning, match="stays out"):
        assert Cluster.local().ids == ("plain:a:0", "plain:a:1")


def test_the_table_of_devices_names_the_device_that_has_the_card():
    providers = dict.fromkeys(("plain", "torchy", "unknown"), Provider("somewhere"))
    table = device_table(CARDS, ["torchy:gpu:0", "unknown:gpu:0"], providers)
    joins = [str(row[table.columns.index("joins")]) for row in table.rows]
    assert joins[:2] == ["when named", "when named (is torchy:gpu:0)"]
    assert joins[4:6] == ["yes", "when named"]


def test_backends_narrow_the_choice(machine):
    assert Cluster.local(backends=["torchy"]).ids == (
        "torchy:cpu:0",
        "torchy:gpu:0",
        "torchy:gpu:1",
    )
    with pytest.raises(
        ClusterError, match="no usable device: found plain:cpu:0; backend broken is"
    ):
        Cluster.local(backends=["plain"])


def test_named_devices_keep_their_order_and_join_even_if_emulated(machine):
    named = Cluster.local(devices=["torchy:gpu:1", "soft:board", "plain:cpu:0", "soft:slow:"])
    assert named.ids == (
        "torchy:gpu:1", "soft:board:0", "soft:board:1", "plain:cpu:0", "soft:slow:0",
    )  # fmt: skip
    assert [len(member.cores) for member in named.members] == [0, 1, 2, 2, 2]


def test_a_prefix_ends_at_a_colon(machine):
    with pytest.raises(ClusterError, match="no device 'soft:boa'; did you mean soft:board:0 or"):
        Cluster.local(devices=["soft:boa"])
    with pytest.raises(ClusterError, match="backend broken is unusable: no driver; install one"):
        Cluster.local(devices=["gpu"])


def test_a_device_named_twice_is_two_members_that_share_its_cores(machine):
    twice = Cluster.local(
        devices=["torchy:cpu", "soft:fast:0", "torchy:cpu:0"],
        emulate_speed={"torchy:cpu:0#1": 0.5},
    )
    assert twice.members == (
        Member("torchy:cpu:0#0", "torchy:cpu:0", (4, 5)),
        Member("soft:fast:0", "soft:fast:0", (6, 7, 8)),
        Member("torchy:cpu:0#1", "torchy:cpu:0", (9, 10, 11), 0.5),
    )


def test_fewer_cores_than_workers(machine):
    machine(3, 7)
    shares = [
        m.cores for m in Cluster.local(devices=["soft:fast", "soft:slow", "torchy:cpu"]).members
    ]
    assert shares == [(3,), (3,), (7,)]


def test_a_speed_for_no_member_is_refused(machine):
    with pytest.raises(ClusterError, match="names 'gpu'; the members are soft:fast:0, "):
        Cluster.local(emulate_speed={"gpu": 0.5})
    with pytest.raises(ClusterError, match="soft:fast:0: speed is 0, it must be above 0"):
        Cluster.local(emulate_speed={"soft:fast:0": 0})


def test_links_work_in_both_directions():
    slow = Link(0.001, 1e6)
    cluster = Cluster((Member("a", "x"), Member("b", "x")), {frozenset("ab"): slow})
    assert cluster.link("a", "b") == cluster.link("b", "a") == slow
    assert Cluster((Member("a", "x"), Member("b", "x"))).link("a", "b") == Link()
    assert cluster.link("a", "a") == Link(0.0, float("inf"))
    assert cluster.member("b").device == "x"
    asks = cluster.member, partial(cluster.link, "a"), partial(cluster.way, "a")
    for ask in asks:
        with pytest.raises(ClusterError, match="no device 'c'; known: a, b"):
            ask("c")


A, B = Member("a", "x"), Member("b", "x")


@pytest.mark.parametrize(
    ("members", "links", "transport", "message"),
    [
        ((), {}, "auto", "no device"),
        ((A, A), {}, "auto", "two devices have the id 'a'"),
        ((A, B), {frozenset("ac"): Link()}, "auto", "a link names 'c'; known: a, b"),
        ((A, B), {frozenset("a"): Link()}, "auto", "joins two different devices"),
        ((A, B), {frozenset("ab"): Link(-1.0)}, "auto", "latency is -1.0 s"),
        ((A, B), {frozenset("ab"): Link(None, 0.0)}, "auto", "bandwidth is 0.0 B/s"),
        ((A,), {}, "pigeon", "no transport 'pigeon'; known: auto, local, shared-memory"),
        ((Member("a", "x", (4, 12)),), {}, "auto", r"cores \[12\] are not among .*: 4, 5, 6"),
        ((Member("a", "x", (), -1.0),), {}, "auto", "speed is -1.0"),
        ((Member("a", "x", (), 1.5),), {}, "auto", "speed is 1.5, it must be above 0, at most 1"),
        ((Member("a", "x", (), float("nan")),), {}, "auto", "speed is nan"),
        ((Member("a", ""),), {}, "auto", "a: it has neither a device nor a board"),
        ((Member("a", "x", board="t4"),), {}, "auto", "a: it has both a device and a board"),
        ((Member("a", "", (4,), board="t4"),), {}, "auto", "a is a board, t4, but only att"),
        ((Member("a", "", (), 0.5, "t4"),), {}, "auto", "t4, with modelled times, but only"),
        ((Member("a", "x", numerics="y"),), {}, "auto", "a has numerics, y, but no board"),
        (
            (Member("a", "", (), 0.5, "t4", numerics="y"),),
            {},
            "auto",
            "a is a board, t4, with modelled times",
        ),
        ((Member("a", "x", board="t4", numerics="y"),), {}, "auto", "both a device and a board"),
        ((Member("a", "x", server="s"),), {}, "auto", "a: no server 's'; known: none"),
    ],
)
def test_an_invalid_cluster_is_refused(machine, members, links, transport, message):
    with pytest.raises(ClusterError, match=message):
        Cluster(members, links, transport)


FILE = """\
# two machines' worth of devices, rehearsed on one
transport = "shared-memory"

[[device]]
id = "slow"
device = "torchy:cpu:0"
cores = [4]
speed = 0.5

[[device]]
device = "soft:board:7"

[[link]]
between = ["soft:board:7", "slow"]
bandwidth = "1 Gb/s"
latency = "1 ms"
"""


@pytest.fixture
def write(tmp_path, machine):
    def write(text):
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        return path

    return write


def test_a_cluster_file(write):
    assert Cluster.load(write(FILE)) == Cluster(
        (Member("slow", "torchy:cpu:0", (4,), 0.5), Member("soft:board:7", "soft:board:7")),
        {frozenset(("slow", "soft:board:7")): Link(1e-3, 125e6)},
        "shared-memory",
    )


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        (
            "transport",
            "transprt",
            2,
            "'transprt'; did you mean transport\\? known: trans",
        ),
        (
            '"shared-memory"',
            '"wire"',
            2,
            "transport is 'wire', it should be 'auto', 'local', 'shared-memory', 'tcp', 'tls' or",
        ),
        ('"shared-memory"', "3", 2, "transport is 3, it should be 'auto'"),
        (
            'device = "torchy:cpu:0"\n',
            "",
            4,
            r'device\.0 has neither a device nor a board; write device = "backend:name:index" or',
        ),
        (
            "speed = 0.5",
            "sped = 0.5",
            8,
            "'sped'; did you mean speed\\? known: device",
        ),
        ("speed = 0.5", "speed = 0", 8, "speed is 0, it should be above 0; write a number"),
        ("speed = 0.5", "speed = 2", 8, "speed is 2, it should be at most 1; write a number"),
        ("speed = 0.5", 'speed = "half"', 8, "speed is 'half', it should be a number"),
        (
            "cores = [4]",
            "cores = [40]",
            7,
            r"cores \[40\], which are not among this machine's: 4, 5",
        ),
        ("cores = [4]", "cores = [4.5]", 7, r"cores\.0 is 4\.5, it should be a whole number"),
        ("cores = [4]", "cores = 4", 7, "cores is 4, it should be a list"),
        ('"soft:board:7"\n\n', '"soft:board:7"\nid = "slow"\n\n', 12, "two devices have the id"),
        ('"slow"]', '"fast"]', 14, "names no device: 'fast'; known: slow, soft:board:7"),
        ('"slow"]', '"soft:board:7"]', 14, "joins two different devices"),
        ('"soft:board:7", ', "", 14, r'between is .*; write between = \["one", "other"\]'),
        ("1 Gb/s", "1 Gbps", 15, "bandwidth '1 Gbps': write a number and b/s .bits. or B/s"),
        ('"1 Gb/s"', "1e9", 15, "bandwidth is 1000000000.0, it should be text"),
        ("1 Gb/s", "0 Gb/s", 15, "bandwidth is 0.0 B/s, must be above 0"),
        ("1 ms", "1 h", 16, "latency '1 h': write a number and one of s, ms, us, ns"),
        ("latency", "delay", 16, "'delay'; known: between, bandwidth, latency"),
        ("[[link]]", "[[lnk]]", 13, "unknown key 'lnk'"),
        ("[[link]]", "[link]", 13, r"it should be a list; write each as a \[\[link\]\] table"),
        ("speed = 0.5", "speed = ", 8, "Invalid value"),
    ],
)
def test_errors_point_at_the_line(write, old, new, line, message):
    assert old in FILE
    path = write(FILE.replace(old, new, 1))
    with pytest.raises(ClusterError, match=message) as caught:
        Cluster.load(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")


def test_a_second_link_between_two_devices(write):
    extra = '\n[[link]]\nbetween = ["slow", "soft:board:7"]\n'
    with pytest.raises(ClusterError, match=r"toml:18: link\.1 is a second link between slow"):
        Cluster.load(write(FILE + extra))


def test_a_members_place_is_the_line_of_its_device(write):
    path = write(FILE)
    assert Cluster.load(path).places == {"slow": f"{path}:6", "soft:board:7": f"{path}:11"}
    path = write(FILE.partition("\n\n")[2])  # a file that begins with a table
    assert Cluster.load(path).places == {"slow": f"{path}:3", "soft:board:7": f"{path}:8"}


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("cores = [4]", "cores = [true]", 7, r"device\.0\.cores\.0 is True, it should be a whole"),
        ("speed = 0.5", "speed = nan", 8, r"device\.0\.speed is nan, it should be a finite number"),
        ("[4]", "[" * 5000 + "]" * 5000, 1, "nested too deeply"),
        ("[4]", "[" + "9" * 5000 + "]", 1, "4300 digits"),
        ("[4]", "[0x" + "f" * 5000 + "]", 7, r"device\.0\.cores\.0 is a number of 20000 bits"),
        ('"slow"', '"\xff"', 5, "byte 0xff is not UTF-8"),
        ("1 Gb/s", "1e999 Gb/s", 15, "bandwidth is inf B/s, must be above 0 and finite"),
        ("1 ms", "1e99 s", 16, r"latency is 1e\+99 s, must be at most 1e\+09"),
        ('id = "slow"', 'id = ""', 5, r"device\.0\.id is '', it should be text that is not empty"),
    ],
)  # fmt: skip
def test_extreme_values_are_refused_with_their_line(write, old, new, line, message):
    path = write("")
    path.write_bytes(FILE.replace(old, new, 1).encode("latin-1"))
    with pytest.raises(ClusterError, match=message) as caught:
        Cluster.load(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")


DESCRIBED = """\
[[device]]
device = "torchy:cpu:0"

[[device]]
board = "t4"
count = 3
server = "a"

[[server]]
name = "a"
count = 2
inside = { shape = "bus", bandwidth = "10 GB/s", latency = "5 us", duplex = "half" }

[[device]]
id = "odd"
board = "a100-40"
server = "b"

[[device]]
board = "t4"
server = "a"

[[server]]
name = "b"

[network]
shape = "switch"
bandwidth = "10 Gb/s"
all_reduce = "2 GB/s"

[[link]]
between = ["odd", "t4.7"]
bandwidth = "1 GB/s"
"""


def test_a_file_of_servers_with_boards_and_an_attached_device(write):
    path = write(DESCRIBED)
    cluster = Cluster.load(path)
    t4s = tuple(
        Member(f"t4.{n}", "", board="t4", server="a.0" if n < 4 else "a.1") for n in range(8)
    )
    odd = Member("odd", "", board="a100-40", server="b")
    inside = Topology(5e-6, 1e10, "bus", "half")
    assert cluster == Cluster(
        (Member("torchy:cpu:0", "torchy:cpu:0"), *t4s, odd),
        {frozenset(("odd", "t4.7")): Link(None, 1e9)},
        servers=(Server("a.0", inside), Server("a.1", inside), Server("b")),
        network=Topology(0.0, 1.25e9, "switch", "full", 2e9),
    )
    assert cluster.described == (*t4s, odd)
    assert cluster.places["t4.6"] == f"{path}:5"
    assert cluster.places["t4.7"] == f"{path}:20"  # from the second table, in copy a.1
    assert cluster.places["odd"] == f"{path}:16"


def test_too_many_servers_are_refused_before_they_are_made(tmp_path, monkeypatch):
    """Each table is within its bounds, but their sum is not."""
    monkeypatch.setattr(
        file_tables.ServerTable, "copies", property(lambda table: pytest.fail("made"))
    )
    path = tmp_path / "servers.toml"
    tables = "".join(f'[[server]]\nname = "s{n}"\ncount = 100000\n' for n in range(100))
    path.write_text(tables + '[[device]]\nboard = "v100-pcie-16"\n')
    with pytest.raises(ClusterError) as refused:
        Cluster.load(path)
    why = "server.1 makes 200000 servers of the cluster; a cluster has at most 100000"
    assert str(refused.value) == f"{path}:6: {why}"


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
def test_a_file_in_the_home_folder(tmp_path, monkeypatch, start):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.toml").write_bytes(start + b'[[device]]\nboard = "t4"\nid = "a"\n')
    assert Cluster.load("~/c.toml").ids == ("a",)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_as_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ClusterError, match=r"pipe\.toml: cannot be read: it is a pipe or a device"):
        Cluster.load(tmp_path / "pipe.toml")
    with pytest.raises(ClusterError, match="no file can have"):
        Cluster.load(f"{tmp_path}/a\0b")


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ('"t4"', '"t3"', 5, r"device\.1\.board is unknown: no board 't3'; `hetpipe"),
        ('board = "t4"\n', 'board = "t4"\ndevice = "a:b:0"\n', 5, r"device\.1 has both a dev"),
        ("count = 3", "count = 0", 6, r"device\.1\.count is 0, it should be at least 1; write"),
        ("count = 3", "count = 100001", 6, "count is 100001, it should be at most 100000"),
        ("count = 3", "count = 60000", 6, "makes 120001 devices of the cluster; a cluster has at "),
        ("count = 3", "cores = [4]", 6, r"device\.1\.cores is for attached devices and numerics"),
        ("count = 3", 'device = "a:b:0"\nnumerics = "a:b:0"', 5, r"device\.1 has both a dev"),
        ("count = 3", 'numerics = ""', 6, r"device\.1\.numerics is '', it should be text that is"),
        (
            'board = "t4"\ncount = 3', 'numerics = "a:b:0"', 5,
            r"device\.1\.numerics computes the numbers of a board, but the table has no board; add",
        ),
        ("count = 3", "speed = 0.5", 6, r"device\.1\.speed is only for attached devices"),
        ('server = "a"', 'server = "c"', 7, "names no server: 'c'; known: a, b"),
        ('name = "a"', "", 9, r'server\.0 lacks the key .name.; write name = "a"'),
        ('name = "b"', 'name = "a.1"', 24, r"server\.1\.name gives 'a\.1': two servers have"),
        ('name = "b"', 'name = "a"', 24, r"server\.1\.name gives 'a': two servers have the name"),
        ("count = 2", "count = 0", 11, r"server\.0\.count is 0, it should be at least 1; write"),
        ('"bus"', '"ring"', 12, r"server\.0\.inside\.shape is 'ring', it should be 'point-to-p"),
        ('"half"', '"quarter"', 12, r"server\.0\.inside\.duplex is 'quarter', it should be 'full'"),
        ("10 GB/s", "10 Gbps", 12, r"server\.0\.inside\.bandwidth: bandwidth '10 Gbps': write"),
        ("5 us", "5 GB/s", 12, r"server\.0\.inside\.latency: latency '5 GB/s': write a number and"),
        ("{ shape", "{ shap", 12, r"inside has an unknown key 'shap'; did you mean shape\? known"),
        ('"switch"', '"swich"', 27, r"network\.shape is 'swich', it should be 'point-to-point', "),
        ('bandwidth = "10 Gb/s"\n', "", 26, r"network lacks the key .bandwidth.; write bandwidth"),
        ("2 GB/s", "2 s", 29, r"network\.all_reduce: bandwidth '2 s': write a number and b/s"),
        ("[network]", "[[network]]", 26, r"network is .*, it should be an object; write \{ shape"),
        ('id = "odd"', 'id = "t4.0"', 15, r"device\.2\.id is 't4\.0': two devices have the id"),
        ('"t4.7"', '"t4.8"', 32, r"names no device: 't4\.8'; did you mean t4\.7, .* known: torchy"),
    ],
)  # fmt: skip
def test_errors_in_servers_and_networks_point_at_the_line(write, old, new, line, message):
    assert old in DESCRIBED
    path = write(DESCRIBED.replace(old, new, 1))
    with pytest.raises(ClusterError, match=message) as caught:
        Cluster.load(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")


@pytest.mark.parametrize("bandwidth", ["25 GB/s", "100 GB/s", "1 Mb/s"])
def test_an_implausible_bandwidth_warns(write, bandwidth):
    path = write(DESCRIBED.replace("10 Gb/s", bandwidth))
    with pytest.warns(BandwidthWarning, match=r"toml:28: the network has .* write Gb/s if bits"):
        loaded = Cluster.load(path)
    assert loaded.network is not None
    assert loaded.network.bandwidth_Bps == parse_bandwidth(bandwidth)


def test_the_warning_advises_bits_only_for_bytes(write):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Cluster.load(write(DESCRIBED.replace("10 Gb/s", "400 Gb/s")))
    for bandwidth in ("4000 Gb/s", "0.001 Gb/s"):
        path = write(DESCRIBED.replace("10 Gb/s", bandwidth))
        with pytest.warns(BandwidthWarning, match=r"servers have 8e\+06 to 2e\+12 b/s: check it$"):
            Cluster.load(path)


def test_a_file_may_name_many_devices_and_an_error_does_not_list_them(write):
    text = DESCRIBED.replace("count = 3", "count = 4999")
    assert len(Cluster.load(write(text)).ids) == 10_002
    with pytest.raises(ClusterError, match=r"no device: 't4\.77x'; did you mean t4"):
        Cluster.load(write(text.replace('"t4.7"', '"t4.77x"')))


@pytest.mark.parametrize("transport", ["local", "shared-memory"])
def test_no_worker_is_started_on_a_board(transport):
    boards = tuple(Member(f"t4.{n}", "", board="t4") for n in range(10))
    members = (Member("here", "numpy:cpu:0"), *boards)
    with pytest.raises(
        ClusterError, match=r"only described: t4\.0, .*, t4\.7 and 2 more; plan and"
    ):
        Crew.start(Cluster(members, transport=transport))
    with pytest.raises(ClusterError, match=r"only described: t4\.0, t4\.1; plan and simulate"):
        Crew.start(Cluster(members[:3], transport=transport))


def test_a_worker_can_open_boards_with_numerics(write):
    """Several boards may share numerics, and `cores` may pin their worker."""
    board = 'board = "t4"\nnumerics = "torchy:cpu:0"\ncores = [4]\ncount = 3\nserver = "a"'
    text = DESCRIBED.replace('board = "t4"\ncount = 3\nserver = "a"', board)
    path = write(text)
    cluster = Cluster.load(path)
    with_numerics = [member for member in cluster.members if member.numerics]
    names = ["t4.0", "t4.1", "t4.2", "t4.4", "t4.5", "t4.6"]
    assert [member.id for member in with_numerics] == names
    for member in with_numerics:
        assert (member.opened_device, member.device, member.cores) == ("torchy:cpu:0", "", (4,))
    assert [member.id for member in cluster.boards_without_numerics] == ["t4.3", "t4.7", "odd"]
    assert len(cluster.described) == 9
    assert cluster.places["t4.4"] == f"{path}:6"


def test_empty_and_missing_files_are_refused(write, tmp_path):
    with pytest.raises(ClusterError, match="toml:1: the cluster has no device"):
        Cluster.load(write(""))
    with pytest.raises(ClusterError, match="No such file"):
        Cluster.load(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("text", "bandwidth_Bps"),
    [
        ("8 b/s", 1), ("1kB/s", 1e3), ("1 Gb/s", 125e6), ("2.5 GB/s", 2.5e9), ("1 MiB/s", 2**20),
        ("1 Tb/s", 125e9), ("8 Kib/s", 1024), ("1e3 MB/s", 1e9),
    ],
)  # fmt: skip
def test_bandwidths(text, bandwidth_Bps):
    assert parse_bandwidth(text) == bandwidth_Bps


@pytest.mark.parametrize(
    "text", ["", "1", "1 G", "Gb/s", "1 gb/s", "1 iB/s", "1 KB/s", "-1 Gb/s", "1.2.3 B/s"]
)
def test_wrong_bandwidths(text):
    with pytest.raises(ClusterError, match="bandwidth"):
        parse_bandwidth(text)


def test_times():
    assert [parse_time(text) for text in ("2 s", "1ms", "3 us", "1 ns")] == [2, 1e-3, 3e-6, 1e-9]
    for wrong in ("", "1", "ms", "1 min", "-1 ms"):
        with pytest.raises(ClusterError, match="latency"):
            parse_time(wrong)


def test_a_link_is_bandwidth_and_latency() -> None:
    assert parse_link("1 Gb/s, 1 ms") == Link(latency_s=1e-3, bandwidth_Bps=1.25e8)
    with pytest.raises(ClusterError, match='write bandwidth and latency, as "1 Gb/s, 1 ms"'):
        parse_link("1 Gb/s")
