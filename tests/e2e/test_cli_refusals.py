"""Wrong options are refused at once: without importing torch and before any measurement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cache_folders import new_cache

from hetpipe.cost.table import CostTable, DeviceCost, LayerBytes, LayerCost

WHATIF = ("whatif", "gpt", "--cluster", "pipedream-b")
REFUSED = [
    (("train", "mlp", "--schedule", "dapple"), "no schedule 'dapple'; known: 1f1b"),
    (("plan", "mlp", "--weights", "twice"), "no weight policy 'twice'; known: flush"),
    (("plan", "mlp", "--weights", "stash"), "goes with an asynchronous schedule"),
    (("plan", "mlp", "--schedule", "pipedream", "--weights", "flush"), "choose 'stash' or 'vert"),
    (("plan", "mlp", "--schedule", "asp", "--weights", "2bw"), "nothing to choose from"),
    (("plan", "mlp", "--schedule", "asp", "--cuts", "2"), "asp has 1 stage"),
    (("train", "mlp", "--cuts", "4,2"), "cuts [4, 2]: give indices of layers in ascending"),
    (("train", "mlp", "--cuts", "0"), "cuts=0: give a whole number of 1 or more"),
    (
        ("train", "mlp", "--replicas", "2,0", "--cuts", "2"),
        "replicas=0: give a whole number",
    ),
    (("train", "mlp", "--replicas", "1,1,1", "--cuts", "2"), "of 3 stages, and cuts [2] make 2"),
    (("plan", "mlp", "--mini-batch", "4", "--microbatches", "8"), "a mini-batch of 4 cannot be 8"),
    (("train", "mlp", "--cluster", "bad.toml"), "bad.toml:1: "),
    (("train", "mlp", "--cluster", "one.toml", "--cuts", "2"), "2 stages need 2 devices, the clu"),
    (("train", "mlp", "--plan", "absent.json"), "absent.json: cannot be read"),
    (("train", "mlp", "--plan", "list.json"), "list.json: the plan is [1], it should be an object"),
    (("train", "mlp", "--plan", "old.json", "--cuts", "1"), "old.json already contains --cuts"),
    (("train", "mlp", "--plan", "old.json"), "no schedule 'dapple'"),
    (("plan", "mlp", "--costs", "absent.json"), "absent.json: cannot be read"),
    (("plan", "mlp", "--costs", "x", "--backends", "numpy"), "leave out --backends"),
    (("train", "mlp", "--picture", "step.gif"), "a picture's name must end with one of .png"),
    (("train", "nope"), "no model 'nope'"),
    (("train", "mlp", "--changed", "seed"), "--changed seed names a difference from a checkpoint"),
    (("bench", "--schedule", "pipedream"), "schedule pipedream is asynchronous"),
    (("bench", "--workload", "mlp", "--workload", "nope"), "no model 'nope'"),
    (("bench", "--link", "1 ms"), "write bandwidth and latency"),
    (("bench", "--cluster", "board.toml"), "t4.0 are boards, whose times are modelled"),
    (("train", "mlp", "--microbatches", "0"), "'--microbatches': "),
    (("train", "mlp", "--optimizer", "adm"), "no optimizer 'adm'; did you mean adam"),
    (("train", "mlp", "--optimizer", "sgd"), "add --lr, for instance --lr 0.05"),
    (("train", "mlp", "--precision", "float32"), "no precision 'float32'; did you mean float16 or"),
    (("train", "mlp", "--clip-norm", "0"), "clip_norm=0.0: give a finite number above 0"),
    ((*WHATIF, "--change", "+a100"), "no board 'a100'; did you mean a10, a100-40 or a100-80?"),
    ((*WHATIF, "--change", "v100-sxm-16.0=t5"), "no board 't5'"),
    ((*WHATIF, "--change", "+t4@b.7"), "t4.0: no server 'b.7'; did you mean b.1 or b.0?"),
    ((*WHATIF, "--change", "-t4.0"), "no device 't4.0'"),
    (
        ("whatif", "gpt", "--cluster", "many.toml"),
        "has 257 devices, and hetpipe removes each of at",
    ),
    ((*WHATIF, "--planner", "dappl"), "no planner 'dappl'; did you mean dapple?"),
    ((*WHATIF, "--schedules", "1f1b,1f"), "no schedule '1f'"),
    (("whatif", "gtp", "--cluster", "pipedream-b"), "no model 'gtp'; did you mean gpt?"),
    (("compare", "gpt", "--cluster", "pipedream"), "no published cluster 'pipedream'"),
    (("compare", "gpt", "--planners", "even,odd"), "no planner 'odd'"),
    (("capacity", "gtp", "--cluster", "pipedream-b"), "no model 'gtp'"),
    (("capacity", "gpt", "--cluster", "pipedream-b", "--repeat", "5:2"), "--repeat '5:2'"),
    (("plan", "gpt", "--planner", "fast"), "no planner 'fast'"),
    (("plan", "gpt", "--profile", "graph.txt"), "give either MODEL or --profile FILE"),
    (("coverage", "gtp", "numpy:cpu:0"), "no model 'gtp'"),
    (("simulate", "absent.json"), "absent.json: cannot be read"),
    (("reproduce", "bapip"), "no paper 'bapip'; did you mean bapipe?"),
    (("reproduce", "bapipe", "5"), "no table '5' of bapipe"),
    (("reproduce", "bapipe"), "no folder profiles/ of published data: set HETPIPE_DATA"),
]

PROGRAM = """
import json, sys
from typer.testing import CliRunner
from hetpipe.cli.app import app

answers = []
for arguments in json.load(sys.stdin):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0, arguments
    text = result.output if isinstance(result.exception, SystemExit) else str(result.exception)
    answers.append([arguments, text, "torch" in sys.modules])
print(json.dumps(answers))
"""

PLAN = {
    "version": 2, "model": "Sequential", "layers": ["0"], "schedule": "dapple", "mini_batch": 8,
    "microbatches": 2, "step_s": 1.0, "cut_nbytes": [], "label": "measured", "origin": "user",
    "notes": [], "weights": "flush",
    "stages": [
        {
            "lo": 0, "hi": 1, "devices": ["a"], "in_flight": 1, "forward_s": 1.0,
            "backward_s": 1.0, "update_s": 0.0, "memory_nbytes": 1, "capacity_nbytes": 2,
            "shares": [1.0], "all_reduce_s": 0.0,
        }
    ],
}  # fmt: skip


def command(
    home: Path, *arguments: object, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    settings = {"HETPIPE_CACHE": new_cache(home / "cache"), "COLUMNS": "160", **(environment or {})}
    return subprocess.run(
        [sys.executable, "-m", "hetpipe", *map(str, arguments)], cwd=home, text=True,
        env={**os.environ, **settings}, capture_output=True, timeout=240,
    )  # fmt: skip


@pytest.mark.slow
def test_wrong_options_are_refused_without_torch(tmp_path: Path) -> None:
    """A schedule of an unknown name must not wait for profiling, which takes a minute."""
    (tmp_path / "bad.toml").write_text("colour = 1\n")
    (tmp_path / "one.toml").write_text('[[device]]\ndevice = "numpy:cpu:0"\n')
    board = '[[device]]\nboard = "t4"\nnumerics = "numpy:cpu:0"\n'
    (tmp_path / "board.toml").write_text(board)
    many = '[[device]]\nboard = "t4"\ncount = 257\n[network]\nbandwidth = "1 Gb/s"\n'
    (tmp_path / "many.toml").write_text(many)
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "old.json").write_text(json.dumps(PLAN))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps([each for each, _ in REFUSED]),
        cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "COLUMNS": "160", "HETPIPE_DATA": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for (arguments, message, torch), (_, expected) in zip(
        json.loads(done.stdout), REFUSED, strict=True
    ):
        assert expected in message, arguments
        assert not torch, arguments


@pytest.mark.slow
def test_cuts_beyond_the_model_are_refused_with_its_layers(tmp_path: Path) -> None:
    """The refusal comes before profiling and lists the layers."""
    two = "numpy:cpu:0,numpy:cpu:0"
    done = command(tmp_path, "plan", "mlp", "--devices", two, "--cuts", 20)
    assert done.returncode == 1
    assert "cuts [20]: a cut is the number of the first layer" in done.stderr
    assert "    3  6\n" in done.stderr, "layer 3 is the model's 6"
    assert "profiling" not in done.stderr


@pytest.mark.slow
def test_more_micro_batches_than_samples_are_refused_before_profiling(tmp_path: Path) -> None:
    done = command(tmp_path, "plan", "mlp", "--devices", "numpy:cpu:0", "--microbatches", 200)
    assert done.returncode == 1
    assert "a mini-batch of 128 cannot be 200 micro-batches: choose 1 to 128" in done.stderr
    assert "profiling" not in done.stderr


@pytest.mark.slow
def test_costs_of_another_model_are_refused(tmp_path: Path) -> None:
    layer, cost = LayerBytes("only", 1, 1, 1, 1), LayerCost(1.0, 1.0, 0.0)
    device = DeviceCost((cost,), 0.0, 1 << 30, "host")
    (tmp_path / "costs.json").write_text(
        json.dumps(CostTable("Other", 16, (layer,), {"a": device}).to_json())
    )
    done = command(tmp_path, "plan", "mlp", "--costs", "costs.json")
    assert done.returncode == 1
    assert "the costs are of Other with 1 layers, mlp has 6 layers, and layer 0" in done.stderr


def test_missing_figures_of_papers_are_reported_before_any_work(tmp_path: Path) -> None:
    for paper, reason in (("dapple", "HETPIPE_DATA is unset"), ("daple", "did you mean dapple?")):
        done = command(tmp_path, "reproduce", paper, environment={"HETPIPE_DATA": ""})
        assert done.returncode == 1
        assert reason in done.stderr
        assert "planning" not in done.stderr


def test_a_rank_of_torchrun_is_refused(tmp_path: Path) -> None:
    """Otherwise each rank would train the whole model."""
    ranks = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    done = command(tmp_path, "train", "mlp", environment=ranks)
    assert done.returncode == 1
    assert done.stderr.startswith("this is process 1 of 2")
    assert "run it once, without torchrun" in done.stderr


def test_a_single_rank_is_accepted(tmp_path: Path) -> None:
    one = {"WORLD_SIZE": "1", "RANK": "0"}
    done = command(tmp_path, "train", "nope", environment=one)
    assert "no model 'nope'" in done.stderr


def test_the_version_and_all_commands_are_reachable(tmp_path: Path) -> None:
    assert command(tmp_path, "--version").stdout == "hetpipe 0.1.0\n"
    assert "matmul" in command(tmp_path, "--help").stdout
    shown = command(tmp_path, "papers", "--help").stdout
    for name in ("clockwork", "learning", "memory", "overhead"):
        assert name in shown


@pytest.mark.slow
def test_a_wrong_shape_in_a_model_is_reported_with_its_line(tmp_path: Path) -> None:
    """torch must not log its traceback before the message."""
    (tmp_path / "own.py").write_text(
        "import torch, hetpipe as hp\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x): return super().forward(x[:, :1])\n"
        "def batches(n, seed):\n"
        "    while True: yield torch.zeros(n, 2), torch.zeros(n, 1)\n"
        "def make(): return hp.Workload(Net(2, 1), torch.nn.functional.mse_loss, batches)\n"
    )
    done = command(tmp_path, "plan", "own:make", "--devices", "numpy:cpu:0")
    assert done.returncode == 1
    assert "own.py:3 (" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_in_the_working_directory_hides_no_library(tmp_path: Path) -> None:
    (tmp_path / "textwrap.py").write_text("raise RuntimeError('not this one')\n")
    done = command(tmp_path, "--version")
    assert done.returncode == 0, done.stderr
