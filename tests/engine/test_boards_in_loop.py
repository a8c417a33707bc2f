"""Boards in the loop: a real device computes a board's numbers, and a model predicts its times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_backends import EarlyBackend
from hetpipe.backends.numpy import NumpyBackend
from models import MLP, batches
from reference import train

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member
from hetpipe.cost.board import board
from hetpipe.crew.crew import Crew
from hetpipe.errors import BackendError, ClusterError, CostError, HetpipeError, PlanError
from hetpipe.profile.measure import profile
from hetpipe.sdk.host import registry
from hetpipe.sdk.info import Capabilities, DeviceInfo

STEPS = 4
FILE = """
transport = "{transport}"

[[device]]
id = "gpu"
board = "v100-sxm-16"
numerics = "numpy:cpu:0"

[[device]]
id = "fpga"
board = "vcu118"
numerics = "{numerics}"

[[link]]
between = ["gpu", "fpga"]
bandwidth = "10 Gb/s"
latency = "100 us"
"""


class SmallBackend(NumpyBackend):
    """A device with one queue and little memory."""

    name = "small"

    def discover(self) -> list[DeviceInfo]:
        (info,) = super().discover()
        able = Capabilities(queues=1)
        own = {"id": "small:cpu:0", "backend": "small", "memory_domain": "small"}
        return [replace(info, **own, memory_nbytes=4000, capabilities=able)]


@pytest.fixture
def own_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_instances", dict(registry._instances))
    registry.register_backend(SmallBackend)
    registry.register_backend(EarlyBackend)


def cluster_of(folder: Path, numerics: str = "pytorch:cpu:0", transport: str = "local") -> Cluster:
    path = folder / "boards.toml"
    path.write_text(FILE.format(numerics=numerics, transport=transport), encoding="utf-8")
    return Cluster.load(path)


def pipeline(cluster: Cluster, **options: Any) -> hp.Pipeline:
    torch.manual_seed(0)
    asked = {"cuts": [2], "microbatches": 4, "schedule": "1f1b", **options}
    return hp.Pipeline(
        MLP(), F.cross_entropy, batches(1)[0], cluster=cluster, optimizer=hp.optim.sgd(0.1), **asked
    )


def torch_losses() -> list[float]:
    torch.manual_seed(0)
    data = batches(STEPS)
    return train(MLP(), F.cross_entropy, data, 4, lambda p: torch.optim.SGD(p, lr=0.1)).losses


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["local", "shared-memory"])
@pytest.mark.parametrize("numerics", ["numpy:cpu:0", "pytorch:cpu:0"])
def test_losses_equal_torch_and_times_come_from_the_board_models(
    tmp_path: Path, numerics: str, transport: str
) -> None:
    cluster = cluster_of(tmp_path, numerics, transport)
    with pipeline(cluster) as pipe:
        losses = [pipe.step(x, y) for x, y in batches(STEPS)]
        assert losses == pytest.approx(torch_losses(), rel=1e-5)
        assert pipe.plan.label == pipe.timeline.label == "modelled"
        assert pipe.modelled_step_s == pytest.approx(pipe.plan.step_s, rel=1e-9)
        assert pipe.timeline.spans == pipe.predicted.spans
        assert pipe.timeline.workers == ("gpu", "fpga")
        wall = pipe.wall_timeline
        assert wall.label == "measured on numerics"
        assert wall.workers == ("gpu: numpy:cpu:0", f"fpga: {numerics}")
        assert wall.step_s != pipe.timeline.step_s
        assert pipe.costs is not None
        for id, name in (("gpu", "v100-sxm-16"), ("fpga", "vcu118")):
            cost, there = pipe.costs.devices[id], board(name)
            assert (cost.label, cost.memory_nbytes) == ("modelled", there.memory_nbytes)
            assert cost.execution == there.execution
        assert pipe.corrected().corrected_s == pipe.plan.step_s  # a model has no drift


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [("gpipe", 4), ("fbp", 4), ("zb-h1", 4), ("data-parallel", 1), ("pipedream", 1)],
)
def test_the_modelled_step_is_the_predicted_one(
    tmp_path: Path, schedule: str, microbatches: int
) -> None:
    cluster = cluster_of(tmp_path)
    alike = replace(cluster.members[0], id="fpga")  # the same board, so that rows can be divided
    cluster = replace(cluster, members=(cluster.members[0], alike))
    options = {"cuts": None} if schedule == "data-parallel" else {}
    with pipeline(cluster, schedule=schedule, microbatches=microbatches, **options) as pipe:
        list(pipe.run(batches(STEPS)))
        assert pipe.modelled_step_s == pytest.approx(pipe.plan.step_s, rel=1e-9)
        assert pipe.timeline.label == "modelled"
        if schedule == "pipedream":  # all mini-batches that ran, and no others
            updates = [span for span in pipe.timeline.spans if str(span.action).startswith("0U")]
            assert len(updates) == STEPS


def test_the_planner_chooses_by_modelled_costs(tmp_path: Path) -> None:
    with pipeline(cluster_of(tmp_path), cuts=None, microbatches=None, schedule="auto") as pipe:
        assert pipe.plan.label == "modelled"
        pipe.step(*batches(1)[0])
        assert pipe.modelled_step_s == pytest.approx(pipe.plan.step_s, rel=1e-9)


@pytest.mark.slow
def test_a_smaller_mini_batch_has_its_own_modelled_time(tmp_path: Path) -> None:
    """The time equals the plan's for a mini-batch of that size."""
    x, y = batches(1)[0]
    with pipeline(cluster_of(tmp_path)) as pipe:
        pipe.step(x[:6], y[:6])
        shorter_s = pipe.modelled_step_s
    torch.manual_seed(0)
    with hp.Pipeline(
        MLP(), F.cross_entropy, (x[:6], y[:6]), cluster=cluster_of(tmp_path),
        optimizer=hp.optim.sgd(0.1), cuts=[2], microbatches=4, schedule="1f1b",
    ) as pipe:  # fmt: skip
        assert shorter_s == pytest.approx(pipe.plan.step_s, rel=1e-9)


@pytest.mark.slow
def test_a_real_member_keeps_measured_passes_beside_modelled_ones(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path)
    real = Member("gpu", "numpy:cpu:0")
    with pipeline(replace(cluster, members=(real, cluster.members[1]))) as pipe:
        losses = [pipe.step(x, y) for x, y in batches(STEPS)]
        assert losses == pytest.approx(torch_losses(), rel=1e-5)
        assert pipe.timeline.label == "modelled"
        assert pipe.costs is not None
        assert [pipe.costs.devices[id].label for id in ("gpu", "fpga")] == ["measured", "modelled"]

        def seconds(timeline: Any, stage: int, op: str) -> list[float]:
            return [
                span.end_s - span.start_s
                for span in timeline.spans
                if str(span.action).startswith(f"{stage}{op}")
            ]

        wall, modelled = pipe.wall_timeline, pipe.timeline
        for op in ("F", "B"):
            mean_s = sum(seconds(wall, 0, op)) / 4
            assert seconds(modelled, 0, op) == pytest.approx([mean_s] * 4)
            assert seconds(modelled, 1, op) == pytest.approx(seconds(pipe.predicted, 1, op))
        assert wall.workers == ("gpu", "fpga: pytorch:cpu:0")


def test_links_of_boards_delay_no_message(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path)
    real = Member("real", "numpy:cpu:0")
    other = replace(real, id="other")
    (link,) = cluster.links.values()
    links = {**cluster.links, frozenset(("real", "other")): link, frozenset(("real", "gpu")): link}
    cluster = replace(cluster, members=(*cluster.members, real, other), links=links)
    assert cluster.emulated_link("gpu", "fpga") is None
    assert cluster.emulated_link("real", "gpu") is None
    assert cluster.emulated_link("other", "real") == link


def test_a_plan_of_boards_is_saved_and_loaded(tmp_path: Path) -> None:
    cluster, (x, y) = cluster_of(tmp_path), batches(1)[0]
    with pipeline(cluster) as pipe:
        pipe.step(x, y)
        pipe.save(tmp_path / "checkpoint")
        plan, after = pipe.plan, pipe.step(x, y)
    torch.manual_seed(1)
    with hp.Pipeline.load(
        tmp_path / "checkpoint", MLP(), F.cross_entropy, (x, y), cluster=cluster,
        optimizer=hp.optim.sgd(0.1),
    ) as pipe:  # fmt: skip
        assert pipe.plan == plan
        assert pipe.step(x, y) == after
        assert pipe.modelled_step_s == pytest.approx(plan.step_s, rel=1e-9)


def test_modelled_and_measured_times_do_not_mix(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path)
    with pytest.raises(HetpipeError, match="time of gpu, fpga is modelled, so no measurement"):
        pipeline(cluster, cuts=None, rebalance="auto")
    with pipeline(cluster) as pipe:
        with pytest.raises(HetpipeError, match="time of gpu, fpga is modelled"):
            pipe.rebalance()
        with pytest.raises(ClusterError, match="gpu is a board, v100-sxm-16, with modelled times"):
            pipe.set_speed("gpu", 0.5)
        assert pipe.step(*batches(1)[0]) > 0
        plan = replace(pipe.plan, label="measured")
    captured = Captured(MLP(), F.cross_entropy, batches(1)[0])
    with (
        Crew.start(cluster) as crew,
        pytest.raises(ClusterError, match="gpu, fpga: boards are not profiled"),
    ):
        profile(captured, crew, hp.optim.sgd(0.1), [4])
    options = {"cuts": None, "microbatches": None, "schedule": "auto"}
    with pytest.raises(PlanError, match="plan's times are measured, but gpu, fpga are boards"):
        pipeline(cluster, plan=plan, **options)


def test_missing_numerics_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BackendError,
        match=r"toml:12: the numerics of member 'fpga': no device 'numpy:gpu:7'; did you mean",
    ):
        pipeline(cluster_of(tmp_path, "numpy:gpu:7"))


@pytest.mark.slow
def test_numerics_without_an_operator(tmp_path: Path, own_backends: None) -> None:
    """The planner gives such layers to other devices; cuts that would not are refused by name."""
    cluster = cluster_of(tmp_path, "early:cpu:0")

    class Sines(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(20, 8), torch.nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.sin(self.first(x)))

    def opened(**options: Any) -> hp.Pipeline:
        return hp.Pipeline(
            Sines(), F.cross_entropy, batches(1)[0], cluster=cluster,
            optimizer=hp.optim.sgd(0.1), **options,
        )  # fmt: skip

    with opened() as pipe:
        assert pipe.plan.devices == ("gpu", "fpga")
        assert "fpga cannot run layer first: its numerics, early:cpu:0 ca" in pipe.plan.notes[0]
    cluster = replace(cluster, members=cluster.members[::-1])
    with pytest.raises(PlanError, match=r"its numerics, early:cpu:0 cannot run aten.sin"):
        opened(cuts=[1], microbatches=4, schedule="1f1b")


def test_numerics_with_one_queue_or_little_memory(tmp_path: Path, own_backends: None) -> None:
    cluster = cluster_of(tmp_path, "small:cpu:0")
    with pytest.raises(HetpipeError, match=r"fpga is a board whose numerics, small:cpu:0, run 1"):
        pipeline(cluster, schedule="fbp")
    with pytest.raises(
        PlanError, match=r"small:cpu:0 is the numerics of fpga\. .* 4000: \d+ bytes"
    ):
        pipeline(cluster)


def test_missing_links_and_peaks_are_refused(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path)
    with pytest.raises(ClusterError, match="nothing describes the bandwidth between gpu and fpga"):
        pipeline(replace(cluster, links={}))
    cluster = replace(
        cluster, members=tuple(replace(m, numerics="pytorch:cpu:0") for m in cluster.members)
    )
    with pytest.raises(CostError, match=r"v100-sxm-16.* no peak for bfloat16"):
        pipeline(cluster, precision="bfloat16")


def test_a_stream_computes_the_losses_of_its_numerics(tmp_path: Path) -> None:
    """An asynchronous schedule fixes the order of all work, however long the work takes."""
    cluster = cluster_of(tmp_path)
    with pipeline(cluster, schedule="pipedream", microbatches=1) as pipe:
        losses = [result.loss for result in pipe.run(batches(STEPS))]
        plan, costs = pipe.plan, pipe.costs
    plain = tuple(Member(member.id, member.numerics) for member in cluster.members)
    same = {"cuts": None, "microbatches": None, "schedule": "auto", "plan": plan, "costs": costs}
    with pipeline(replace(cluster, members=plain), **same) as pipe:
        assert [result.loss for result in pipe.run(batches(STEPS))] == losses


def test_a_board_with_too_little_memory_is_refused_by_the_planner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hetpipe.profile import boards

    small = replace(board("vcu118"), memory_nbytes=1000)
    monkeypatch.setattr(boards, "board", lambda id: small if id == "vcu118" else board(id))
    with pytest.raises(PlanError, match=r"on fpga\) needs \d+ bytes .* and has 1000"):
        pipeline(cluster_of(tmp_path))


@pytest.mark.slow
def test_one_board_on_the_fpga_emulator(tmp_path: Path) -> None:
    found, _ = hp.discover_devices(["opencl"])
    numerics = "opencl:intel-fpga-emulator:0"
    if numerics not in [device.id for device in found]:
        pytest.skip("no FPGA emulator: install the extra `emulators`")
    with pipeline(cluster_of(tmp_path, numerics, "shared-memory")) as pipe:
        losses = [pipe.step(x, y) for x, y in batches(STEPS)]
        assert losses == pytest.approx(torch_losses(), rel=1e-4)
        assert pipe.wall_timeline.label == "emulated on numerics"
        assert pipe.modelled_step_s == pytest.approx(pipe.plan.step_s, rel=1e-9)
