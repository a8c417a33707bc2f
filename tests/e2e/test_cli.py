"""The commands as a user starts them: in a new process, by their exit codes and files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cache_folders import new_cache

TWO = "pytorch:cpu:0,pytorch:cpu:0"
SLOW = "pytorch:cpu:0#1=0.5"
LIMIT_S = 240


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which to start commands, with a separate cost cache."""
    return tmp_path_factory.mktemp("cli")


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "hetpipe", *map(str, arguments)]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "HETPIPE_CACHE": new_cache(home / "cache"), "COLUMNS": "160"}


def run(
    home: Path, *arguments: object, code: int = 0, cache: Path | None = None
) -> subprocess.CompletedProcess[str]:
    settings = environment(home) | ({} if cache is None else {"HETPIPE_CACHE": str(cache)})
    done = subprocess.run(
        command(*arguments), cwd=home, env=settings, capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def result(home: Path, *arguments: object) -> Any:
    """Return the output of a command with `--json -`, which must be nothing but JSON."""
    return json.loads(run(home, *arguments, "--json", "-").stdout)


def test_help_needs_neither_torch_nor_a_driver() -> None:
    code = (
        "import sys; from hetpipe.cli.app import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(len({'torch', 'pyopencl', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("doctor", "devices", "profile", "plan", "train", "bench"):
        assert name in done.stdout


@pytest.mark.slow
def test_devices_lists_the_devices(home: Path) -> None:
    devices = {entry["id"]: entry for entry in result(home, "devices")["devices"]}
    assert devices["pytorch:cpu:0"]["joins"]
    assert not devices["numpy:cpu:0"]["joins"], "the reference joins only when named"


@pytest.mark.slow
def test_doctor_tests_each_device(home: Path) -> None:
    found = result(home, "doctor", "--backends", "numpy,pytorch")
    assert found["version"] == 1
    assert {entry["backend"] for entry in found["findings"]} == {"numpy", "pytorch"}
    for device in found["devices"]:
        assert device["selftest"]["ok"], device
        assert device["selftest"]["gflops_matmul"] > 0
        assert device["selftest"]["bursts"] == 3


@pytest.mark.slow
def test_doctor_reports_a_broken_backend_and_continues(home: Path) -> None:
    done = run(home, "doctor", "--backends", "nope,numpy", "--no-selftest", code=1)
    assert "broken  no backend 'nope'" in done.stdout
    assert "ok  numpy:cpu:0" in done.stdout


@pytest.mark.slow
def test_profile_prices_every_layer_and_link(home: Path) -> None:
    costs = result(
        home, "profile", "mlp", "--devices", TWO, "--emulate-speed", SLOW, "--microbatches", 4
    )
    assert costs["samples"] == 32
    labels = {member: device["label"] for member, device in costs["devices"].items()}
    assert labels == {"pytorch:cpu:0#0": "measured", "pytorch:cpu:0#1": "emulated"}
    assert len(costs["links"]) == 2


@pytest.mark.slow
def test_a_plan_from_costs_has_their_micro_batches(home: Path) -> None:
    done = run(
        home, "profile", "mlp", "--devices", TWO, "--microbatches", 4, "--json", "costs.json"
    )
    assert "Forward + backward per layer" in done.stdout
    plan = result(home, "plan", "mlp", "--costs", "costs.json", "--cuts", "3")
    assert plan["microbatches"] == 4
    assert [stage["devices"] for stage in plan["stages"]] == [
        ["pytorch:cpu:0#0"], ["pytorch:cpu:0#1"]
    ]  # fmt: skip
    done = run(home, "plan", "mlp", "--costs", "costs.json", "--microbatches", 8, code=1)
    reason = " ".join(done.stderr.split())
    assert "for micro-batches of 32 samples" in reason
    assert "batch of 128 has 16: profile with --microbatches 8" in reason


@pytest.mark.slow
def test_a_plan_is_saved_and_trained(home: Path) -> None:
    options = ("--devices", TWO, "--microbatches", 4, "--schedule", "gpipe")
    plan = result(home, "plan", "mlp", *options, "--out", "plan.json")
    kept = json.loads((home / "plan.json").read_text())
    assert kept.pop("costs")["samples"] == 32
    assert kept.pop("workload") == "mlp"  # for `hetpipe kernels export`
    assert [stage.pop("layers")[0] for stage in plan["stages"]] == [
        stage["lo"] for stage in plan["stages"]
    ]
    assert plan | kept == plan
    assert plan["predicted_step_s"] == kept["step_s"]
    done = run(
        home, "train", "mlp", "--devices", TWO, "--plan", "plan.json", "--steps", 60,
        "--check-steps", 20, "--picture", "step.svg", "--trace", "step.json", "--json", "-",
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert "compiling" in done.stderr
    assert "profil" not in done.stderr, "the file has the costs"
    assert "\nmemory of stage 0 on pytorch:cpu:0#" in done.stderr
    assert len(report["peak_nbytes"]) == len(plan["stages"])
    assert min(report["peak_nbytes"]) > 0
    assert json.loads((home / "step.json").read_text())["traceEvents"]
    assert report["version"] == 1
    assert report["plan"] == kept
    assert len(report["losses"]) == 60
    assert report["losses"][:20] == pytest.approx(report["torch_losses"], rel=1e-4)
    assert report["max_loss_rel_diff"] < 1e-4
    assert report["validation"]["accuracy"] > 0.2
    assert "measured" in (home / "step.svg").read_text()


BOARDS = """
[[device]]
id = "gpu"
board = "v100-sxm-16"
numerics = "numpy:cpu:0"

[[device]]
id = "fpga"
board = "vcu118"
numerics = "pytorch:cpu:0"

[[link]]
between = ["gpu", "fpga"]
bandwidth = "10 Gb/s"
latency = "10 us"
"""


@pytest.mark.slow
def test_boards_train_in_modelled_time(home: Path) -> None:
    """A plan of boards is saved, simulated and trained; only wall times are not modelled."""
    (home / "boards.toml").write_text(BOARDS)
    options = ("--cluster", "boards.toml", "--cuts", 3, "--microbatches", 4, "--schedule", "1f1b")
    plan = result(home, "plan", "mlp", *options, "--out", "boards.json")
    assert plan["label"] == "modelled"
    simulated = result(home, "simulate", "boards.json", "--cluster", "boards.toml")
    assert simulated["step_s"] == pytest.approx(plan["step_s"], rel=1e-9)
    done = run(
        home, "train", "mlp", "--cluster", "boards.toml", "--plan", "boards.json", "--steps", 6,
        "--picture", "boards.svg", "--json", "-",
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert report["max_loss_rel_diff"] < 1e-4
    assert (report["label"], report["wall_label"]) == ("modelled", "measured on numerics")
    assert report["step_s"] == pytest.approx(plan["step_s"], rel=1e-9)
    assert report["wall_step_s"] != report["step_s"]
    assert report["boards"] == {"gpu": "v100-sxm-16", "fpga": "vcu118"}
    assert report["numerics"] == {"gpu": "numpy:cpu:0", "fpga": "pytorch:cpu:0"}
    assert "samples/s (modelled; a step takes " in done.stderr
    assert "measured on numerics: median step " in done.stderr
    picture = (home / "boards.svg").read_text()
    assert "modelled: " in picture
    assert "measured on numerics: " in picture


@pytest.mark.slow
def test_stages_with_replicas_are_planned_as_asked(home: Path) -> None:
    options = ("--devices", TWO, "--cuts", "2", "--replicas", "1,1", "--microbatches", 2)
    plan = result(home, "plan", "mlp", *options)
    assert [(stage["lo"], len(stage["devices"])) for stage in plan["stages"]] == [(0, 1), (2, 1)]


@pytest.mark.slow
def test_train_reports_equality_with_torch(home: Path) -> None:
    done = run(home, "train", "mlp", "--devices", "pytorch:cpu:0", "--steps", 5, "--mini-batch", 32,
               "--microbatches", 2)  # fmt: skip
    assert re.search(r"equal to unpartitioned torch: \S+ \(loss, 3 steps\); ", done.stdout)
    assert "validation accuracy 0." in done.stdout


@pytest.mark.slow
@pytest.mark.slow
def test_report_writes_a_page(home: Path) -> None:
    fixed = ("--schedule", "1f1b", "--cuts", "4", "--microbatches", "4")
    done = run(home, "report", "digits", "--steps", "3", "--devices", TWO, *fixed)
    assert "bottleneck: pytorch:cpu:0" in done.stdout
    assert "a page with the timeline is in report.html" in done.stdout
    assert 'id="timeline"' in (home / "report.html").read_text(encoding="utf-8")


def test_a_workload_of_the_user(home: Path) -> None:
    """The model is in the working directory and has 64 training samples and no validation."""
    (home / "mine.py").write_text(
        "import torch, hetpipe as hp\n"
        "def batches(n, seed):\n"
        "    g = torch.Generator().manual_seed(seed)\n"
        "    while True:\n"
        "        x = torch.randn(n, 6, generator=g)\n"
        "        yield x, x.sum(1, keepdim=True)\n"
        "def make():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 1))\n"
        "    return hp.Workload(model, torch.nn.functional.mse_loss, batches, 'mine', 16,\n"
        "                       train_samples=64)\n"
    )
    report = result(
        home, "train", "mine:make", "--epochs", 2, "--devices", "pytorch:cpu:0", "--microbatches", 2
    )
    assert len(report["losses"]) == 8
    assert report["validation"] == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "nope"), "no model 'nope'; write one of digits, mlp"),
        (("train", "mine_not:make"), "no module 'mine_not'"),
        (("plan", "mlp", "--emulate-speed", "0.5"), "write ID=SPEED"),
        (("plan", "mlp", "--devices", "nope:0"), "no device 'nope:0'"),
        (("train", "mlp", "--plan", "absent.json"), "absent.json: cannot be read"),
        (("plan", "mlp", "--cuts", "two"), "--cuts 'two': separate the numbers by commas"),
        (("devices", "--backends", "numpy", "--json", "/proc/none/x"), "cannot write /proc/none/x"),
    ],
)
def test_errors_are_one_line(home: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run(home, *arguments, code=1)
    last = done.stderr.strip().splitlines()[-1]
    assert message in last


@pytest.mark.slow
def test_warnings_are_one_line(tmp_path: Path) -> None:
    """The warning is about a cache folder that is a file."""
    bad = tmp_path / "bad"
    bad.write_text("a file, where the folder would be")
    plan = ("plan", "mlp", "--devices", "numpy:cpu:0", "--microbatches", 2)
    done = run(tmp_path, *plan, cache=bad)
    phases = ("capturing", "compiling", "profiling", "profiled")
    lines = [line for line in done.stderr.splitlines() if not line.startswith(phases)]
    assert lines
    assert all(line.startswith("warning: ") for line in lines)
    assert "no cache can be kept in" in lines[0]


@pytest.mark.slow
def test_bench_figures_agree_with_each_other(home: Path) -> None:
    done = run(
        home, "bench", "--full", "--workload", "mlp", "--no-matmul", "--devices", TWO,
        "--emulate-speed", SLOW, "--microbatches", 4, "--rounds", 1, "--steps", 1,
        "--json", "out/bench.json", "--picture", "out/bench.png", "--twice", "pytorch:cpu:0#1",
    )  # fmt: skip
    assert "no row of torch.distributed.pipelining: mlp does not name blocks" in done.stdout
    report = json.loads((home / "out" / "bench.json").read_text())
    assert report.pop("version") == 1
    assert {"machine", "versions", "seed", "matmul", "workloads"} == report.keys()
    (found,) = report["workloads"]
    assert [device["label"] for device in found["devices"]] == ["measured", "emulated"]
    ideal = sum(device["samples_per_s"] for device in found["devices"])
    assert found["ideal_samples_per_s"] == pytest.approx(ideal)
    assert found["efficiency"] == pytest.approx(found["balanced_samples_per_s"] / ideal)
    assert found["fill_limit"] == pytest.approx(4 / 5)
    assert found["measured_step_s"] * found["balanced_samples_per_s"] == pytest.approx(128)
    assert found["max_loss_rel_diff"] < 1e-4
    assert found["over_peer"] is None
    assert set(found["over_plain"]) == {"pytorch:cpu:0#0"}, "an emulated speed is no match"
    names = " = ".join(row["name"] for row in found["rows"])
    for name in ("even split", "best split ignoring speeds", "balanced pipeline"):
        assert name in names, "rows with one plan are one row"
    linked = [row for row in found["rows"] if "slow link" in row["name"]]
    assert {row["label"] for row in linked} == {"emulated"}
    assert found["linked"]["aware_samples_per_s"] > 0
    twice, *replicas = [row for row in found["rows"] if "two workers" in row["name"]]
    assert [row["plan"]["stages"][0]["devices"] for row in replicas] == [
        ["pytorch:cpu:0#0", "pytorch:cpu:0#1"]
    ]
    assert replicas[0]["max_loss_rel_diff"] < 1e-4
    assert "no data-parallel row: no data-parallel plan for pytorch:cpu:0#0" in done.stdout
    assert twice["label"] == "emulated", "like the member at half speed"
    slow = found["devices"][1]["samples_per_s"]
    assert found["twice"]["efficiency"] == pytest.approx(twice["samples_per_s"] / (2 * slow))
    assert "A pipeline pays where" in done.stdout
    assert (home / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_bench_of_one_device_has_no_link(home: Path) -> None:
    done = run(
        home, "bench", "--full", "--workload", "mlp", "--no-matmul", "--devices", "pytorch:cpu:0",
        "--microbatches", 2, "--rounds", 1, "--steps", 1, "--json", "out/one.json",
    )  # fmt: skip
    (found,) = json.loads((home / "out" / "one.json").read_text())["workloads"]
    assert found["linked"] is None
    assert "slow link" not in done.stdout
    assert len(found["rows"]) == len(found["plain_samples_per_s"]) + 1, "all plans are one"


@pytest.mark.slow
def test_bench_refuses_to_double_an_unknown_device_at_once(home: Path) -> None:
    done = run(
        home, "bench", "--workload", "mlp", "--no-matmul", "--devices", TWO, "--twice", "nope",
        code=1,
    )  # fmt: skip
    assert "no device 'nope'; known: pytorch:cpu:0#0" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("presses", [1, 2])
def test_an_interrupt_leaves_no_traceback_and_no_process(home: Path, presses: int) -> None:
    """Ctrl-C reaches the whole foreground group, both the command and its workers."""
    process = subprocess.Popen(
        command("train", "mlp", "--devices", TWO, "--microbatches", 4, "--steps", 1_000_000),
        cwd=home, env=environment(home), start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    while "fill limit" not in process.stdout.readline():  # until the plan is printed
        assert process.poll() is None
    time.sleep(1.0)
    for _ in range(presses):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.05)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert errors.count("closing the workers; Ctrl-C once more exits at once") < presses
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


SLOW_TO_CLOSE = """
import time
from hetpipe.cli import end_on_interrupt
end_on_interrupt()
try:
    print("open", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("closing", flush=True)
    time.sleep(60 if {presses} == 3 else 1)
"""


@pytest.mark.parametrize("presses", [1, 2, 3])
def test_a_second_interrupt_is_answered_and_a_third_ends_at_once(presses: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_TO_CLOSE.format(presses=presses)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "open\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "closing\n"
        if presses > 1:
            process.send_signal(signal.SIGINT)
            assert (
                process.stderr.readline() == "closing the workers; Ctrl-C once more exits at once\n"
            )
        if presses > 2:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_an_interrupt_within_exec_ends_with_the_exit_status(tmp_path: Path) -> None:
    """Python may end by the signal after an interrupt has passed through `exec`."""
    (tmp_path / "interrupted.py").write_text("""
import sys
from hetpipe.cli import end_on_interrupt
end_on_interrupt()
try:
    exec("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
except KeyboardInterrupt:
    print("closed")
    sys.exit(130)
""")
    ended = subprocess.run(
        [sys.executable, "-m", "interrupted"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "closed\n", "")


def test_an_interrupt_at_interpreter_exit_does_not_kill_it() -> None:
    script = """
import atexit, os, signal
from hetpipe.cli import end_on_interrupt
end_on_interrupt()
class Last:  # is deleted when the handlers of signals have been
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):
        kill(pid, number)
atexit.last = Last()
raise SystemExit(130)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "")
