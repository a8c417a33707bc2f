"""Studies of described clusters: plans, comparisons, changes and capacity, and their commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from profile_files import write_profile
from tables import make_table, plan_by
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.cluster.topology import Server, Topology
from hetpipe.cost import CostTable
from hetpipe.cost.pipedream_profile import ProfileGraph, ProfileNode
from hetpipe.errors import ClusterError, CostError, HetpipeError, PlanError
from hetpipe.plan.plan import Plan
from hetpipe.plan.planners.choice import plan as choose
from hetpipe.plan.pricing import stage_times
from hetpipe.plan.proposal import PlannerOptions, Proposal
from hetpipe.plan.sharing import crossing, share_media
from hetpipe.plan.simulation import simulate
from hetpipe.study.accuracy import error_note
from hetpipe.study.changes import changed, whatif
from hetpipe.study.comparison import compare
from hetpipe.study.largest import METHODS, Method, capacity
from hetpipe.study.models import of_model
from hetpipe.study.subject import Subject, of_profile
from hetpipe.study.subject import plan as planned

LAYERS, SAMPLES, MINI_BATCH = 12, 16, 64
MIB = 1 << 20

CLUSTER = """
[[device]]
board = "v100-pcie-16"
count = 2
server = "gpus"

[[device]]
board = "vcu129"
count = 2

[[device]]
board = "desktop-cpu"

[[server]]
name = "gpus"
inside = { shape = "point-to-point", bandwidth = "12 GB/s", latency = "5 us" }

[network]
shape = "switch"
bandwidth = "10 Gb/s"
latency = "20 us"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a cluster file and a profile of equal layers, 10 ms forward and 20 ms backward."""
    folder = tmp_path_factory.mktemp("study")
    nodes = tuple(
        ProfileNode(f"node{n}", f"Linear{n}", 0.010, 0.020, 4 * MIB, 16 * MIB)
        for n in range(LAYERS)
    )
    edges = tuple((f"node{n}", f"node{n + 1}") for n in range(LAYERS - 1))
    write_profile(ProfileGraph(nodes, edges), folder / "equal.txt")
    (folder / "mixed.toml").write_text(CLUSTER, encoding="utf-8")
    return folder


@pytest.fixture
def subject(folder: Path) -> Subject:
    return of_profile(folder / "equal.txt", SAMPLES, MINI_BATCH)


@pytest.fixture
def cluster(folder: Path) -> Cluster:
    return Cluster.load(folder / "mixed.toml")


def test_all_planners_are_compared_at_the_same_prices(subject: Subject, cluster: Cluster) -> None:
    comparison = compare(subject, cluster)
    by_name = {row.planner: row for row in comparison.rows}
    assert set(by_name) == {
        *("auto", "bapipe", "dapple", "exact", "pipedream"),
        *("even", "speed-sorted", "data-parallel"),
    }
    steps_s = [row.plan.step_s for row in comparison.rows if row.plan]
    assert steps_s == sorted(steps_s)
    assert comparison.best.origin == "auto", "it weighs what all the others propose"
    for row in comparison.rows:
        assert row.plan is not None, row.why_not
        assert row.plan.label == "modelled"
        assert row.plan.lower_bound_s is not None
        assert row.plan.lower_bound_s <= row.plan.step_s
        share = comparison.share(row)
        assert share is not None
        assert 0 < share <= 1


def test_a_simulation_without_a_cluster_has_the_plans_step(
    subject: Subject, cluster: Cluster
) -> None:
    plan, costs = planned(subject, cluster, planner="exact")
    simulation = simulate(plan, costs)
    assert plan.label == "modelled"
    assert simulation.outcome.step_s == pytest.approx(plan.step_s, rel=1e-9)
    for peak_nbytes, stage in zip(simulation.outcome.peak_nbytes, plan.stages, strict=True):
        assert peak_nbytes <= stage.memory_nbytes


def test_messages_share_the_links_of_a_cluster(subject: Subject, tmp_path: Path) -> None:
    """On one slow bus for four devices a plan takes longer than with a link for each pair."""
    file = tmp_path / "bus.toml"
    text = """
        [[device]]
        board = "t4"
        count = 4
        server = "a"
        [[server]]
        name = "a"
        inside = { shape = "SHAPE", bandwidth = "100 MB/s", latency = "5 us" }
    """
    steps_s = {}
    for shape in ("point-to-point", "bus"):
        file.write_text(text.replace("SHAPE", shape), encoding="utf-8")
        cluster = Cluster.load(file)
        options = PlannerOptions(MINI_BATCH, (8,), replicas=False)
        plan, costs = planned(subject, cluster, options, "exact")
        assert len(plan.stages) == 4
        alone_s = simulate(plan, costs).outcome.step_s
        steps_s[shape] = simulate(plan, costs, cluster).outcome.step_s / alone_s
    assert steps_s["point-to-point"] == pytest.approx(1.0)
    assert steps_s["bus"] > 1.001


@pytest.mark.parametrize(
    ("replicas", "shape", "seconds"),
    [
        ((2, 2), "bus", (8.0, 8.0)),  # both halves of 8 MiB on one bus, each way
        ((2, 2), "point-to-point", (4.0, 4.0)),
        ((3, 1), "bus", (8.0, 8.0)),
        ((3, 1), "point-to-point", (8.0, 8.0)),  # into one device
    ],
)
def test_all_replicas_use_a_shared_link(
    replicas: tuple[int, int], shape: Any, seconds: tuple[float, float]
) -> None:
    names = "abcd"
    table = make_table(dict.fromkeys(names, 1.0), 2, bandwidth=MIB)
    layers = tuple(replace(layer, cut_nbytes=8 * MIB) for layer in table.layers)
    table = replace(table, layers=layers)
    members = tuple(Member(name, "", board="t4", server="s") for name in names)
    server = Server("s", Topology(0.0, float(MIB), shape=shape))
    cluster = Cluster(members, servers=(server,))
    first = replicas[0]
    tables = {4: table, 1: make_table(dict.fromkeys(names, 1.0), 2, samples=1)}
    groups = tuple(names[:first]), tuple(names[first:])
    plan = plan_by(tables, Proposal((1,), groups, "1f1b", 1), 4)
    shared = share_media(stage_times(plan, table), plan, table, cluster)
    found = shared.forward_links[0].occupancy_s, shared.backward_links[0].occupancy_s
    assert found == pytest.approx(seconds)


def shared_case(
    replicas: tuple[int, int], shape: Any, cut_mib: int = 8
) -> tuple[Plan, dict[int, CostTable], Cluster]:
    """Return a plan of two equal layers on two stages, whose replicas sum by rings over 1 MiB/s
    links.

    A layer takes 1 s forward and 2 s backward on one device, and has 2 MiB of parameters.
    """
    names = "abcd"[: sum(replicas)]
    tables = {}
    for samples in (1, 4):
        table = make_table(dict.fromkeys(names, 1.0), 2, samples=samples, bandwidth=MIB)
        layers = tuple(
            replace(each, params_nbytes=2 * MIB, cut_nbytes=cut_mib * MIB) for each in table.layers
        )
        links = {way: replace(link, label="modelled") for way, link in table.links.items()}
        tables[samples] = replace(table, layers=layers, links=links)
    members = tuple(Member(name, "", board="t4", server="s") for name in names)
    cluster = Cluster(members, servers=(Server("s", Topology(0.0, float(MIB), shape=shape)),))
    groups = tuple(names[: replicas[0]]), tuple(names[replicas[0] :])
    plan = plan_by(tables, Proposal((1,), groups, "1f1b", 1), 4)
    return plan, tables, cluster


@pytest.mark.parametrize(
    ("shape", "sums_s", "step_s"),
    [
        # Each replica moves 2 x 1/2 of 2 MiB. Stage 1 begins its sum at 2 s, stage 0 at 3 s.
        ("point-to-point", (2.0, 2.0), 3.0 + 2.0 + 0.1),
        # Both replicas use the bus: 4 s. From 2 to 3 s stage 1 sums alone, then both stages
        # share it: stage 1 needs 3 s more, which take 6; then 1 s of stage 0's 4 s remains.
        ("bus", (4.0, 4.0), 3.0 + 6.0 + 1.0 + 0.1),
    ],
)
def test_sums_over_replicas_share_a_bus(
    shape: Any, sums_s: tuple[float, float], step_s: float
) -> None:
    plan, tables, cluster = shared_case((2, 2), shape, cut_mib=0)
    shared = share_media(stage_times(plan, tables[4]), plan, tables[4], cluster)
    assert tuple(each.occupancy_s for each in shared.sums) == pytest.approx(sums_s)
    assert simulate(plan, tables[4], cluster).step_s == pytest.approx(step_s)


@pytest.mark.parametrize(
    ("shape", "step_s"),
    [
        # The gradients of the cut arrive at 4.5 s, and the backward of stage 0 takes 2 s more.
        ("point-to-point", 4.5 + 2.0 + 0.1),
        # Beside the sum the 1 s of the gradients takes 2 s; then 3 of the sum's 4 s remain.
        ("bus", 5.5 + 3.0 + 0.1),
    ],
)
def test_a_sum_and_the_gradients_of_a_cut_share_a_bus(shape: Any, step_s: float) -> None:
    """The backward of stage 1, on two devices, ends at 1 + 1 + 0.5 + 1 = 3.5 s."""
    plan, tables, cluster = shared_case((1, 2), shape, cut_mib=1)
    assert simulate(plan, tables[4], cluster).step_s == pytest.approx(step_s)


@pytest.mark.parametrize("shape", ["point-to-point", "bus"])
def test_a_note_tells_the_cost_of_shared_links(shape: Any) -> None:
    """Planners price each pair of devices alone; a note gives the step of the simulation."""
    _, tables, cluster = shared_case((2, 2), shape, cut_mib=0)
    best = choose(tables, cluster, PlannerOptions(4, (1,)), "auto")
    assert max(best.replicas) > 1
    step_s = simulate(best, tables[4], cluster).step_s
    notes = [note for note in best.notes if "share" in note]
    if shape == "bus":
        assert step_s > best.step_s * 1.01
        assert [note.startswith(f"the step is {1e3 * step_s:.2f} ms where") for note in notes] == [
            True
        ]
    else:
        assert (step_s, notes) == (pytest.approx(best.step_s), [])


def test_the_replica_with_the_most_rows_moves_longest() -> None:
    table = make_table({"a": 3.0, "b": 1.0, "c": 4.0}, 2, bandwidth=MIB)
    tables = {4: table, 1: make_table({"a": 3.0, "b": 1.0, "c": 4.0}, 2, samples=1)}
    plan = plan_by(tables, Proposal((1,), (("a", "b"), ("c",)), "1f1b", 1), 4)
    assert plan.stages[0].shares == (3.0, 1.0)
    assert crossing(plan, 0) == {("a", "c"): 0.75, ("b", "c"): 0.25}
    plan = plan_by(tables, Proposal((1,), (("a", "b"), ("c", "b")), "1f1b", 1), 4)
    assert stage_times(plan, table).forward_links[0].occupancy_s == pytest.approx(0.75)


class TestChanges:
    @pytest.mark.slow
    def test_each_change_alone(self, subject: Subject, cluster: Cluster) -> None:
        changes = ["-vcu129.1", "+a100-40", "desktop-cpu.0=h100", "network=100 Gb/s, 5 us"]
        answer = whatif(subject, cluster, changes)
        assert [row.change for row in answer.changes] == changes
        factors = [answer.factor(row) for row in answer.changes]
        assert all(factor is not None for factor in factors)
        less, more, better, quicker = (factor or 0.0 for factor in factors)
        assert less >= 1 - 1e-9
        assert more < 1
        assert better < 1
        assert quicker <= 1.02

    def test_one_more_device_never_makes_auto_slower(
        self, subject: Subject, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The planner is made to use all devices, as a search that finds nothing better does."""
        now, _ = planned(subject, cluster)

        def slower(*arguments: Any) -> Plan:
            made = choose(*arguments)
            return made if arguments[1] is cluster else replace(made, step_s=2 * made.step_s)

        monkeypatch.setattr("hetpipe.study.subject.planned", slower)
        (row,) = whatif(subject, cluster, ["+desktop-cpu"]).changes
        assert row.plan is not None
        assert row.plan.step_s == pytest.approx(now.step_s)
        assert "desktop-cpu.1" not in row.plan.all_devices

    def test_the_error_of_modelled_times_is_stated(
        self, subject: Subject, cluster: Cluster
    ) -> None:
        tiny_model = of_model("mlp").subject
        assert error_note(subject, [cluster]) == (
            "modelled times: as profiled on v100-pcie-16; of unknown error on desktop-cpu, vcu129"
        )
        assert error_note(tiny_model, [cluster]) == (
            "modelled times: off by 34 % for the median layer on v100-pcie-16; off by 24 % for the "
            "median product on vcu129; of unknown error on desktop-cpu"
        )
        assert error_note(subject, [Cluster.with_ids(["a"])]) == ""

    def test_changes_leave_the_cluster_unchanged(self, cluster: Cluster) -> None:
        before = cluster.ids
        assert "vcu129.1" not in changed(cluster, "-vcu129.1").ids
        assert changed(cluster, "+vcu129").ids[-1] == "vcu129.2"
        assert changed(cluster, "+v100-pcie-16@gpus").members[-1].server == "gpus"
        assert cluster.ids == before

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ("more", "write -ID"),
            ("-nobody", "no device 'nobody'"),
            ("a~b=1 Gb/s, 1 ms", "no device 'a'"),
            ("network=fast", 'write bandwidth and latency, as "1 Gb/s, 1 ms"'),
        ],
    )
    def test_invalid_changes_are_refused(self, cluster: Cluster, change: str, why: str) -> None:
        with pytest.raises(HetpipeError, match=why):
            changed(cluster, change)

    def test_a_change_of_a_missing_network_is_refused(self) -> None:
        alone = Cluster.published("bapipe-4-vcu118")
        if alone.network is None:
            with pytest.raises(ClusterError, match="no network between servers"):
                changed(alone, "network=10 Gb/s, 1 us")


class TestCapacity:
    @pytest.mark.slow
    def test_capacity_grows_with_devices_and_recompute(self, subject: Subject) -> None:
        cluster = Cluster.published("bapipe-4-v100")
        answer = capacity(subject, cluster, block=(1, LAYERS - 1))
        assert answer.devices == (1, 2, 4)
        for counts in answer.largest.values():
            assert list(counts) == sorted(counts)
        assert len(set(answer.largest[Method("data-parallel")])) == 1, "each device has it whole"
        once, again = (answer.largest[Method("1f1b", recompute=mode)] for mode in (False, True))
        assert again[-1] > once[-1], "the first stage has 4 micro-batches in flight"
        stash, one = (answer.largest[Method("pipedream", w)] for w in ("stash", "pipeoptim"))
        assert one[-1] > stash[-1], "two versions at most, not four"

    def test_one_more_does_not_fit(self, subject: Subject) -> None:
        """Compare with a device that holds the whole model: per layer 3 x 16 MiB and
        activations."""
        cluster = Cluster.published("bapipe-4-v100")
        answer = capacity(subject, cluster, 2, (0, LAYERS - 1), [Method("data-parallel")])
        (counts,) = answer.largest.values()
        layer_nbytes = 3 * 16 * MIB + 2 * 4 * MIB  # weights, gradients, momentum; 32 samples
        held = 16 * 1024 * MIB // (layer_nbytes * LAYERS)
        assert abs(counts[0] - held) <= 1

    def test_a_number_of_devices_that_is_no_power_of_two(self, subject: Subject) -> None:
        cluster = Cluster.published("bapipe-4-v100")
        three = replace(cluster, members=cluster.members[:3])
        answer = capacity(subject, three, 2, (0, LAYERS - 1), [Method("1f1b")])
        assert answer.devices == (1, 2, 3)
        (counts,) = answer.largest.values()
        assert counts[2] > counts[1]

    def test_samples(self, subject: Subject) -> None:
        answer = capacity(subject, Cluster.published("bapipe-4-v100"), 8)
        assert answer.counted == "samples of a micro-batch"
        assert min(answer.largest[METHODS[0]]) > SAMPLES

    def test_a_missing_block_is_refused(self, subject: Subject, cluster: Cluster) -> None:
        with pytest.raises(PlanError, match=r"block 3..12: the model has layers 0..11"):
            capacity(subject, cluster, block=(3, 12))


def run(*arguments: str) -> Any:
    """Run a command and return its JSON."""
    done = CliRunner().invoke(app, [*arguments, "--json", "-"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout[done.stdout.index("{") :])


class TestCommands:
    def asked(self, folder: Path) -> list[str]:
        profile = ["--profile", str(folder / "equal.txt"), "--samples", str(SAMPLES)]
        return [
            *profile,
            "--cluster",
            str(folder / "mixed.toml"),
            "--global-batch",
            str(MINI_BATCH),
        ]

    def test_plan_and_simulate(self, folder: Path, tmp_path: Path) -> None:
        out, trace = tmp_path / "plan.json", tmp_path / "trace.json"
        data = run("plan", *self.asked(folder), "--planner", "exact", "--out", str(out))
        assert data["planner"] == "exact"
        assert data["stages"][0]["layers"][0] == 0
        assert data["stages"][-1]["layers"][1] == LAYERS - 1
        assert 0 < data["lower_bound_s"] <= data["predicted_step_s"]
        assert data["peak_nbytes"] > 0
        again = run("simulate", str(out), "--trace", str(trace))
        assert again["step_s"] == pytest.approx(data["predicted_step_s"])
        assert [worker["name"] for worker in again["workers"]] == list(
            Plan.from_json({key: data[key] for key in again["plan"]} | again["plan"]).devices
        )
        assert json.loads(trace.read_text())["traceEvents"]

    def test_compare_with_a_picture(self, folder: Path, tmp_path: Path) -> None:
        picture = tmp_path / "plans.svg"
        asked = [*self.asked(folder), "--planners", "auto,even", "--picture", str(picture)]
        data = run("compare", *asked)
        assert [row["planner"] for row in data["rows"]] == ["auto", "even"]
        assert "<svg" in picture.read_text()

    @pytest.mark.slow
    def test_plans_of_attached_devices_are_measured(self, tmp_path: Path) -> None:
        both = '[[device]]\nid = "{}"\ndevice = "numpy:cpu:0"\n'
        cluster = tmp_path / "attached.toml"
        cluster.write_text(both.format("a") + both.format("b"))
        asked = ["mlp", "--cluster", str(cluster), "--planners", "exact,data-parallel"]
        rows = run("compare", *asked)["rows"]
        assert {row["planner"] for row in rows} == {"exact", "data-parallel"}
        assert [row["why_not"] for row in rows] == ["", ""]
        assert all(row["measured_step_s"] > 0 for row in rows)
        unmeasured = run("compare", *asked, "--no-measure")["rows"]
        assert [row["measured_step_s"] for row in unmeasured] == [None, None]

    def test_whatif_removes_each_device(self, folder: Path) -> None:
        data = run("whatif", *self.asked(folder), "--planner", "exact", "--microbatches", "8")
        assert [row["change"] for row in data["rows"]][:2] == ["", "-v100-pcie-16.0"]
        assert data["rows"][0]["factor"] == 1.0

    def test_options_for_profiles_without_cut_bytes_or_unit(self, folder: Path) -> None:
        importers = Path(__file__).parents[2] / "data" / "importers"
        cluster = ["--cluster", str(folder / "mixed.toml"), "--samples", "2"]
        metis = ["plan", "--profile", str(importers / "metis.json"), *cluster]
        assert run(*metis, "--cut-nbytes", "160")["stages"]
        with pytest.raises(CostError, match="give cut_nbytes"):
            run(*metis)
        layers = ["plan", "--profile", str(importers / "layers.json"), *cluster]
        in_ms, in_s = (
            run(*layers, "--planner", "exact", "--unit-s", unit) for unit in ("1e-3", "1")
        )
        assert in_s["predicted_step_s"] > 100 * in_ms["predicted_step_s"]
        for asked in (layers, ["plan", *self.asked(folder)]):
            with pytest.raises(CostError, match="leave cut_nbytes"):
                run(*asked, "--cut-nbytes", "160")

    def test_half_precision_is_priced_at_the_boards_rate_for_it(self) -> None:
        asked = ["plan", "vgg16-small", "--cluster", "bapipe-4-v100", "--planner", "pipedream"]
        whole, half = (run(*asked, *more) for more in ([], ["--precision", "float16"]))
        assert half["predicted_step_s"] != whole["predicted_step_s"]
        with pytest.raises(HetpipeError, match="no peak for bfloat16; it has float32, float16"):
            run(*asked, "--precision", "bfloat16")

    @pytest.mark.slow
    def test_capacity(self, folder: Path) -> None:
        data = run("capacity", *self.asked(folder), "--repeat", "1:11")
        assert data["counted"] == "repetitions of layers 1..11"
        assert len(data["rows"]) == len(METHODS)

    @pytest.mark.parametrize(
        ("arguments", "why"),
        [
            ([], "give either MODEL or --profile FILE"),
            (["digits", "--profile", "x.txt"], "give either MODEL or --profile FILE"),
            (["--profile", "absent.txt", "--samples", "4"], "absent.txt"),
            (["--profile", "x.txt", "--precision", "float16"], "leave out --precision"),
            (["mlp", "--precision", "half"], "no precision 'half'"),
        ],
    )
    def test_refusals(self, folder: Path, arguments: list[str], why: str) -> None:
        with pytest.raises(HetpipeError, match=why):
            CliRunner().invoke(
                app,
                ["compare", *arguments, "--cluster", str(folder / "mixed.toml")],
                catch_exceptions=False,
            )

    def test_a_profile_needs_its_micro_batch(self, folder: Path) -> None:
        asked = ["compare", "--profile", str(folder / "equal.txt"), "--cluster", "dapple-b"]
        with pytest.raises(CostError, match="does not say its micro-batch"):
            CliRunner().invoke(app, asked, catch_exceptions=False)


def test_a_profile_cannot_be_run(folder: Path) -> None:
    subject, cluster = (
        of_profile(folder / "equal.txt", SAMPLES, 2**8),
        Cluster.published("dapple-b"),
    )
    with pytest.raises(HetpipeError, match="equal is a profile, which cannot be run"):
        compare(subject, cluster, planners=["even"], measured=True)


def test_the_error_of_a_small_cluster_names_missing_bytes_and_a_cure(folder: Path) -> None:
    subject = of_profile(folder / "equal.txt", SAMPLES, 2**20)
    one = Cluster.load(folder / "mixed.toml")
    with pytest.raises(PlanError, match="bytes are missing; it fits with micro-batches of"):
        planned(subject, one, PlannerOptions(2**20, (1,), replicas=False), "exact")
