"""A device configured to load bundles compiles nothing and refuses bundles that do not fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bundles import AGAIN, build, change_manifest, count_sources, graph_of, result, write
from found_devices import infos
from hetpipe.backends.opencl.backend import OpenCLBackend
from hetpipe.backends.opencl.platform.runtimes import BUNDLES
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import cross_entropy

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster.member import Member
from hetpipe.crew.workers import Workers
from hetpipe.errors import BackendError, BundleError, WorkerError
from hetpipe.optim import adamw
from hetpipe.pipeline.exporting import Exportable, Written, export
from hetpipe.pipeline.options import UpdateOptions
from hetpipe.plan import Plan
from hetpipe.sdk.backend import Device
from hetpipe.sdk.formats.bundle import add_binary, read_manifest
from hetpipe.sdk.graph import canonical
from hetpipe.sdk.host.registry import open_device

IDS = [info.id for info in infos() if info.backend == "opencl"]
TRAINED = [id for id in IDS if "oclgrind" not in id]
FACTOR = 0.3125
GRAPH = graph_of(FACTOR)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return count_sources(monkeypatch)


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Device]:
    """Yield a device, and write a bundle of the graph with its binary to `tmp_path`/stage-0."""
    device = open_device(IDS[0])
    build(tmp_path / "stage-0", device, write(tmp_path / "stage-0", device, GRAPH))
    yield device
    device.close()


def open_loading(device_id: str, folder: Path) -> Device:
    """Open the device again, with its bundles loaded from `folder`."""
    return open_configured(device_id, {"bundles": folder.name}, folder.parent)


def open_configured(device_id: str, options: dict[str, Any], folder: Path) -> Device:
    """Open the device again, from a backend with these options."""
    backend = OpenCLBackend()
    backend.configure(options, folder)
    info = next(info for info in backend.discover() if info.id == device_id)
    return backend.open(info)


@pytest.mark.parametrize("device_id", IDS)
def test_a_bundle_is_loaded_and_nothing_is_compiled(
    device_id: str, tmp_path: Path, sources: list[str]
) -> None:
    device = open_device(device_id)
    expected = result(device, GRAPH)
    np.testing.assert_allclose(expected, np.tanh(np.linspace(-2, 2, 35)).reshape(5, 7) * FACTOR,
                               rtol=1e-5)  # fmt: skip
    sources.clear()
    manifest = build(tmp_path / "b" / "any", device, write(tmp_path / "b" / "any", device, GRAPH))
    assert len(sources) == 1
    assert manifest == read_manifest(tmp_path / "b" / "any")
    sources.clear()
    for folder in (tmp_path / "b", tmp_path / "b" / "any"):  # a folder of bundles, and a bundle
        loaded = open_loading(device_id, folder)
        np.testing.assert_array_equal(result(loaded, GRAPH), expected)
        loaded.close()
    assert sources == []


def test_the_manifest_says_how_to_call_each_kernel(tmp_path: Path, first: Device) -> None:
    manifest = read_manifest(tmp_path / "stage-0")
    (program,), (source,) = manifest.programs, manifest.sources
    (launch,), (kernel,) = program.launches, source.kernels
    assert launch.kernel == kernel.name
    assert f"__kernel void {kernel.name}(" in (tmp_path / "stage-0" / source.file).read_text()
    assert [(p.type, p.direction) for p in kernel.parameters] == [
        ("float *", "in"), ("float *", "out"), ("int", "value")
    ]  # fmt: skip
    x, y, count = launch.arguments
    assert x.shape == y.shape == (5, 7)
    assert (count.dtype, count.value) == ("int32", 35)
    assert manifest.facts == dict(first.binary_facts())


@pytest.mark.slow
@pytest.mark.parametrize("device_id", [id for id in IDS if "fpga-emulator" in id])
def test_kernels_joined_by_channels_are_loaded_from_a_bundle(
    device_id: str, tmp_path: Path, sources: list[str]
) -> None:
    """Each of two dataflows in one source has its own channels but shares their types."""
    products = canonical(
        make_fx(lambda x: (torch.tanh(torch.relu(x @ x.t()) @ x),))(torch.zeros(5, 7))
    )
    options: dict[str, Any] = {"families": {device_id: "fpga"}}
    device = open_configured(device_id, options, tmp_path)
    expected = result(device, products)
    manifest = build(tmp_path / "b", device, write(tmp_path / "b", device, products))
    assert sum(kernel.function == "array" for kernel in manifest.sources[0].kernels) == 2
    sources.clear()
    loaded = open_configured(device_id, {**options, "bundles": "b"}, tmp_path)
    np.testing.assert_array_equal(result(loaded, products), expected)
    assert sources == []


def refusal(device_id: str, folder: Path, graph: Any = GRAPH) -> str:
    loaded = open_loading(device_id, folder)
    try:
        with pytest.raises(BundleError) as caught:
            loaded.compile(graph)
    finally:
        loaded.close()
    return str(caught.value)


def test_a_stale_bundle_is_refused_with_both_hashes(
    tmp_path: Path, first: Device, sources: list[str]
) -> None:
    """A graph with another factor has another kernel."""
    message = refusal(first.info.id, tmp_path, graph_of(0.25))
    manifest = read_manifest(tmp_path / "stage-0")
    needed = re.search(r"need kernel fused_\w+ with the hash (\w{64}), but", message)
    assert needed is not None
    assert needed[1] not in {kernel.sha256 for kernel in manifest.sources[0].kernels}
    assert f"no kernel of that name (the hash of all its kernels is {manifest.sha256})" in message
    assert f"write it again: {AGAIN}" in message
    assert sources == []


def test_a_kernel_with_another_text_is_detected_by_its_hash(tmp_path: Path, first: Device) -> None:
    """The hash differs, as after a change of a file in `kernels/`."""
    here = read_manifest(tmp_path / "stage-0").sources[0].kernels[0].sha256

    def change(data: Any) -> None:
        data["sources"][0]["kernels"][0]["sha256"] = "0" * 64

    change_manifest(tmp_path / "stage-0", change)
    message = refusal(first.info.id, tmp_path)
    assert f"the hash {here}, but the bundle has it with the hash {'0' * 64} (" in message


def test_a_bundle_of_another_device_is_refused(tmp_path: Path, first: Device) -> None:
    def change(data: Any) -> None:
        data["device"] = "opencl:other:3"

    change_manifest(tmp_path / "stage-0", change)
    message = refusal(first.info.id, tmp_path)
    start = f"{first.info.id} should load a bundle from {tmp_path}, but the folder has no bundle"
    assert message.startswith(start)
    assert "there is stage-0 for opencl:other:3" in message
    assert "there is none at all" in refusal(first.info.id, tmp_path / "nowhere")


@pytest.mark.parametrize("fact", ["driver", "platform version", "device"])
def test_a_binary_of_another_driver_or_version_is_refused(
    tmp_path: Path, first: Device, fact: str
) -> None:
    here = first.binary_facts()[fact]

    def change(data: Any) -> None:
        data["sources"][0]["binary"]["facts"][fact] = "of yesterday"

    change_manifest(tmp_path / "stage-0", change)
    message = refusal(first.info.id, tmp_path)
    assert f"was compiled for {fact} of yesterday, and {first.info.id} has {fact} {here}" in message
    assert f"hetpipe kernels build {tmp_path / 'stage-0'} --device {first.info.id}" in message


def test_a_damaged_or_missing_binary_is_refused(tmp_path: Path, first: Device) -> None:
    path = tmp_path / "stage-0" / "stage.bin"
    path.write_bytes(path.read_bytes()[:-1])
    binary = read_manifest(tmp_path / "stage-0").sources[0].binary
    assert binary is not None
    message = refusal(first.info.id, tmp_path)
    assert re.search(rf"its hash is \w{{64}}, but the manifest has {binary.sha256}", message)
    assert binary.sha256 not in message.partition("the manifest has")[0]
    path.unlink()
    assert "stage.bin: cannot be read" in refusal(first.info.id, tmp_path)


def test_a_binary_of_an_earlier_source_is_refused(tmp_path: Path, first: Device) -> None:
    def change(data: Any) -> None:
        data["sources"][0]["binary"]["source_sha256"] = "1" * 64

    change_manifest(tmp_path / "stage-0", change)
    message = refusal(first.info.id, tmp_path)
    assert (
        f"is stale: it was compiled from a source with the hash {'1' * 64}, but stage.cl" in message
    )


def test_a_bundle_without_a_binary_says_how_to_make_it(tmp_path: Path, first: Device) -> None:
    write(tmp_path / "new" / "stage-0", first, GRAPH)
    message = refusal(first.info.id, tmp_path / "new")
    assert "has no binary of stage.cl; compile it: hetpipe kernels build" in message


def test_a_rewritten_bundle_keeps_the_binary_of_the_same_source(
    tmp_path: Path, first: Device
) -> None:
    """A vendor's compiler may take hours."""
    folder = tmp_path / "stage-0"
    before = read_manifest(folder)
    assert write(folder, first, GRAPH) == before
    assert write(folder, first, graph_of(0.25)).sources[0].binary is None


def test_a_binary_the_driver_refuses_raises_a_backend_error(tmp_path: Path, first: Device) -> None:
    manifest = read_manifest(tmp_path / "stage-0")
    facts = first.binary_facts()
    add_binary(tmp_path / "stage-0", manifest, manifest.sources[0], b"no program", facts)
    loaded = open_loading(first.info.id, tmp_path)
    with pytest.raises(BackendError, match=r"failed while loading .*stage\.bin"):
        loaded.compile(GRAPH)
    loaded.close()


def test_the_variable_names_bundles_without_a_cluster_file(
    tmp_path: Path, first: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BUNDLES, str(tmp_path / "nowhere"))
    with pytest.raises(BundleError, match="nowhere, but the folder has no bundle for it"):
        open_device(first.info.id).compile(GRAPH)
    result(open_loading(first.info.id, tmp_path), GRAPH)


def test_other_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="an unknown key 'fast'; known: kernels, bundles"):
        OpenCLBackend().configure({"bundles": "x", "fast": True}, tmp_path)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4)
    )


BATCHES = [(torch.randn(8, 6), torch.randint(4, (8,))) for _ in range(3)]
OPTIMIZER = adamw(lr=1e-2)


def crew_of(device_id: str) -> hp.Cluster:
    """Return a cluster with two workers on one device, in this process."""
    return hp.Cluster((Member("a", device_id), Member("b", device_id)), transport="local")


def train_from(
    device_id: str, plan: Plan | None, schedule: str = "1f1b", evaluates: bool = False, **more: Any
) -> tuple[Plan, list[float]]:
    """Return the plan, and the losses of three steps and perhaps of an evaluation."""
    options: Any = {"plan": plan}
    if plan is None:
        options = {"cuts": [1], "microbatches": 2, "schedule": schedule}
    with hp.Pipeline(
        perceptron(), cross_entropy, BATCHES[0], cluster=crew_of(device_id), optimizer=OPTIMIZER,
        **options, **more,
    ) as pipe:  # fmt: skip
        losses = [pipe.step(*batch) for batch in BATCHES]
        return pipe.plan, [*losses, *([pipe.evaluate([BATCHES[0]]).loss] if evaluates else [])]


@pytest.mark.slow
@pytest.mark.parametrize("device_id", TRAINED)
def test_a_training_from_bundles_has_the_same_losses_bit_for_bit(
    device_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: list[str]
) -> None:
    plan, losses = train_from(device_id, None)
    captured = Captured(perceptron(), cross_entropy, BATCHES[0], samples=4)
    sources.clear()
    with Workers.start(crew_of(device_id)) as workers:
        written = export(Exportable(captured, plan, OPTIMIZER), workers, tmp_path, {}, AGAIN)
    assert sources == [], "an export compiles nothing"
    assert [each.folder for each in written] == [tmp_path / "stage-0", tmp_path / "stage-1"]
    monkeypatch.setenv(BUNDLES, str(tmp_path))
    with pytest.raises(WorkerError, match=r"has no binary of stage\.cl"):
        train_from(device_id, plan)
    device = open_device(device_id)
    for each in written:
        assert each.folder is not None
        assert each.manifest is not None
        assert len(each.manifest.sources) == 1, "a board has one binary at a time"
        build(each.folder, device, each.manifest)
    assert len(sources) == 2
    sources.clear()
    assert train_from(device_id, plan) == (plan, losses)
    assert sources == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "clip"), [("zb-h1", 0.1), ("pipedream", None)], ids=["halves", "versions"]
)
def test_every_program_of_a_training_is_in_its_bundles(
    schedule: str, clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled for split backwards, the norm of gradients, or evaluation."""
    device_id = IDS[0]
    more: Any = {"schedule": schedule, "evaluates": True, "clip_norm": clip}
    plan, losses = train_from(device_id, None, **more)
    captured = Captured(perceptron(), cross_entropy, BATCHES[0], samples=4)
    exportable = Exportable(
        captured, plan, OPTIMIZER, updates=UpdateOptions(clip_norm=clip), evaluates=True
    )
    with Workers.start(crew_of(device_id)) as workers:
        written = export(exportable, workers, tmp_path, {}, AGAIN)
    device = open_device(device_id)
    for each in written:
        assert each.folder is not None
        assert each.manifest is not None
        build(each.folder, device, each.manifest)
    sources = count_sources(monkeypatch)
    monkeypatch.setenv(BUNDLES, str(tmp_path))
    assert train_from(device_id, plan, **more) == (plan, losses)
    assert sources == []


@pytest.mark.slow
def test_each_replica_has_its_own_bundle(tmp_path: Path) -> None:
    """One replica computes 3 rows of each micro-batch, the other 1."""
    plan, _ = train_from(IDS[0], None)
    one, other = plan.stages
    plan = replace(plan, stages=(replace(one, devices=("a", "c"), shares=(3.0, 1.0)), other))
    cluster = hp.Cluster(tuple(Member(name, IDS[0]) for name in "abc"), transport="local")
    captured = Captured(perceptron(), cross_entropy, BATCHES[0], samples=4)
    with Workers.start(cluster) as workers:
        written = export(Exportable(captured, plan, OPTIMIZER), workers, tmp_path, {}, AGAIN)
    assert {each.folder and each.folder.name: _first_program(each) for each in written} == {
        "stage-0": "forward of 3 samples", "stage-0.1": "forward of 1 sample",
        "stage-1": "forward of 4 samples",
    }  # fmt: skip


def _first_program(written: Written) -> str:
    assert written.manifest is not None
    return written.manifest.programs[0].name


def test_a_backend_without_bundles_refuses_them_by_name(tmp_path: Path, first: Device) -> None:
    manifest = read_manifest(tmp_path / "stage-0")
    other = open_device("numpy:cpu:0")
    with pytest.raises(BackendError, match="numpy:cpu:0 exports no kernels: its backend lacks"):
        other.export({"forward": GRAPH})
    with pytest.raises(BackendError, match="numpy:cpu:0 compiles no bundles: its backend lacks"):
        other.build(manifest.sources[0], "", manifest.programs)
