"""The page on bundles: its commands run in order, and its statements are true."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.cli.kernels import build, export
from hetpipe.errors import BackendError, BundleError, ClusterError, HetpipeError, WorkerError
from hetpipe.sdk.formats.bundle import read_manifest
from hetpipe.sdk.host import registry

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "bundles.md").read_text(encoding="utf-8")
LINES = re.findall(r"^    hetpipe (.*)$", PAGE, re.MULTILINE)
EMULATOR = "opencl:intel-fpga-emulator:0"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run the page's first commands in a folder, keep their output, and yield the folder."""
    if EMULATOR not in {info.id for info in registry.discover_devices(["opencl"])[0]}:
        pytest.skip("no FPGA emulator: install the extra `emulators`")
    folder = tmp_path_factory.mktemp("lab")
    block = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    (folder / "lab.toml").write_text(block[1], encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        # A backend keeps its options, but later tests in this process must compile.
        others = {name: each for name, each in registry._instances.items() if name != "opencl"}
        patch.setattr(registry, "_instances", others)
        patch.setattr(registry, "_options", {})
        patch.chdir(folder)
        printed = [run(line) for line in LINES[:4]]
        (folder / "printed.json").write_text(json.dumps(printed))
        yield folder


def run(line: str, *more: str) -> str:
    done = CliRunner().invoke(app, [*shlex.split(line), *more])
    if isinstance(done.exception, HetpipeError):
        raise done.exception
    assert done.exit_code == 0, f"{line}: {done.output}"
    return done.output


def printed(lab: Path, number: int) -> str:
    return str(json.loads((lab / "printed.json").read_text())[number])


def test_the_commands_write_a_bundle_and_train_from_it(lab: Path) -> None:
    assert len(LINES) == 5
    shown = re.findall(r"^    (stage .*|  aoc .*)$", PAGE, re.MULTILINE)
    there = [re.sub(r"hash \w+", "hash", line) for line in printed(lab, 1).splitlines()]
    assert [re.sub(r"hash \w+", "hash", line) for line in shown] == [
        line for line in there if line.startswith(("stage", "  aoc"))
    ]
    assert "equal to unpartitioned torch" in printed(lab, 3)
    manifest = read_manifest(lab / "bundles" / "stage-1")
    assert [program.name for program in manifest.programs] == [
        "forward of 32 samples", "backward of 32 samples", "update", "norm", "product of the probe",
        "elementwise pass of the probe",
    ]  # fmt: skip
    assert not (lab / "bundles" / "stage-0").exists()


def test_losses_are_the_same_without_bundles(lab: Path) -> None:
    options = ["--plan", "plan.json", "--steps", "5", "--no-check", "--json"]
    devices = ["--devices", f"pytorch:cpu:0,{EMULATOR}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HETPIPE_OPENCL_BUNDLES", raising=False)
        run("train mlp", *options, "without.json", *devices)
    run("train mlp", *options, "with.json", "--cluster", "lab.toml")
    without, loaded = (
        json.loads((lab / f"{name}.json").read_text())["losses"] for name in ("without", "with")
    )
    assert without == loaded


def test_a_vendors_binary_is_added(lab: Path) -> None:
    shutil.copy(lab / "bundles" / "stage-1" / "stage.bin", lab / "stage.aocx")
    before = read_manifest(lab / "bundles" / "stage-1")
    run(LINES[4])
    assert read_manifest(lab / "bundles" / "stage-1") == before
    with pytest.raises(BundleError, match=r"no\.aocx: cannot be read"):
        run(LINES[4].replace("stage.aocx", "no.aocx"))


def test_a_stale_bundle_is_refused_as_on_the_page(lab: Path) -> None:
    shown = re.search(
        r"^    (bundles/stage-1 is stale for .*?)\n\n", PAGE, re.MULTILINE | re.DOTALL
    )
    assert shown is not None
    words = re.escape(" ".join(shown[1].split())).replace(re.escape("..."), r"\w+")
    plan = json.loads((lab / "plan.json").read_text())
    plan.pop("costs")
    plan["stages"][0]["hi"] = plan["stages"][1]["lo"] = 2
    (lab / "earlier.json").write_text(json.dumps(plan))
    with pytest.raises(WorkerError, match=words):
        run("train mlp --cluster lab.toml --plan earlier.json --steps 1")


def test_a_source_changed_by_hand_is_not_compiled(lab: Path, tmp_path: Path) -> None:
    shutil.copytree(lab / "bundles" / "stage-1", tmp_path / "changed")
    with (tmp_path / "changed" / "stage.cl").open("a") as file:
        file.write("// by hand\n")
    with pytest.raises(BundleError, match=r"stage\.cl has changed: its hash is \w{64}, but the"):
        run(f"kernels build {tmp_path / 'changed'}")


def test_a_plan_without_a_device_that_exports_is_refused(lab: Path) -> None:
    with pytest.raises(BackendError, match="nothing to export: backend 'pytorch' of pytorch:cpu:0"):
        run("kernels export plan.json --device pytorch:cpu:0 --out no")
    assert not (lab / "no").exists()


def test_a_board_without_a_compiler_has_none_in_its_manifest(lab: Path) -> None:
    """All stages can be exported for one device."""
    done = run(f"kernels export plan.json --device {EMULATOR} --board agilex-agf027 --out agilex")
    assert done.count("the vendor's compiler: none is known for this board") == 2
    for stage in (0, 1):
        manifest = read_manifest(lab / "agilex" / f"stage-{stage}")
        assert (manifest.board, manifest.device) == ("agilex-agf027", EMULATOR)
        assert manifest.sources[0].commands == ()


def test_a_plan_of_boards_is_exported_with_each_boards_commands(lab: Path) -> None:
    rows = [f'[[device]]\nid = "{id}"\nboard = "{id}"\n' for id in ("pac-d5005", "u250")]
    (lab / "boards.toml").write_text("".join(rows))
    text = (lab / "plan.json").read_text().replace("pytorch:cpu:0", "pac-d5005")
    plan = json.loads(text.replace(EMULATOR, "u250"))
    plan.pop("costs")
    (lab / "boards.json").write_text(json.dumps(plan))
    with pytest.raises(ClusterError, match=r"no device 'pac-d5005'.*name the plan's cluster"):
        run("kernels export boards.json")
    with pytest.raises(ClusterError, match="open no worker: pac-d5005, u250; name an attached"):
        run("kernels export boards.json --cluster boards.toml")
    run(f"kernels export boards.json --cluster boards.toml --device {EMULATOR} --out hardware")
    first, second = (read_manifest(lab / "hardware" / f"stage-{n}").sources[0] for n in (0, 1))
    assert first.commands == ("aoc -board=pac_s10_dc stage.cl -o stage.aocx",)
    *each, link = second.commands
    platform = "xilinx_u250_gen3x16_xdma_4_1_202210_1"
    assert each == [
        f"v++ -c -t hw --platform {platform} -k {k.name} stage.cl -o {k.name}.xo"
        for k in second.kernels
    ]
    objects = " ".join(f"{kernel.name}.xo" for kernel in second.kernels)
    assert link == f"v++ -l -t hw --platform {platform} {objects} -o stage.xclbin"


@pytest.mark.parametrize("command", [export.command, build.command])
def test_every_option_is_on_the_page(command: object) -> None:
    declared = set(re.findall(r'"(--[a-z]+)"', Path(str(command.__code__.co_filename)).read_text()))  # type: ignore[attr-defined]
    assert declared <= set(re.findall(r"--[a-z]+", PAGE)) | {"--json"}
