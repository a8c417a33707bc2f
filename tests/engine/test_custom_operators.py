"""User-defined operators: worker processes import the script or module that defines them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hetpipe as hp
from hetpipe.cli.app import app
from hetpipe.crew.crew import Crew
from hetpipe.errors import BackendError, UnsupportedOperatorError
from hetpipe.sdk.host.references import operator_origins

SCRIPT = """
import json, torch
from torch import nn
import hetpipe as hp

@torch.library.custom_op("ours::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x

@square.register_fake
def _(x):
    return torch.empty_like(x)

square.register_autograd(
    lambda ctx, g: 2 * g * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.ops.ours.square(self.a(x)))

if __name__ == "__main__":
    torch.manual_seed(0)
    model, loss_fn = Model(), nn.functional.cross_entropy
    x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))
    cluster = hp.Cluster.local(devices=["pytorch:cpu:0"] * 2)
    plan = dict(cuts=[1], microbatches=1, schedule="1f1b", optimizer=hp.optim.sgd(lr=0.1))
    with hp.Pipeline(model, loss_fn, (x, y), cluster=cluster, **plan) as pipe:
        found = [pipe.step(x, y) for _ in range(2)]
    optimizer, wanted = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    print(json.dumps([found, wanted]))
"""


@pytest.mark.slow
def test_a_script_trains_with_an_operator_it_defines(tmp_path: Path) -> None:
    script = tmp_path / "trains.py"
    script.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found, wanted = json.loads(ran.stdout.splitlines()[-1])
    assert found == pytest.approx(wanted, rel=1e-5)


FACTORY = """
from hetpipe.zoo.workload import Workload

def batches(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(rows, 6, generator=generator), torch.zeros(rows, dtype=torch.long)

def workload():
    return Workload(Model(), nn.functional.cross_entropy, batches, mini_batch=4)
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the name of a module with a model whose first layer calls a custom operator."""
    folder = tmp_path_factory.mktemp("module")
    text = SCRIPT.partition("if __name__")[0].replace("ours", "theirs") + FACTORY
    (folder / "theirs_of_a_user.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield "theirs_of_a_user"


@pytest.mark.slow
def test_a_profile_times_a_custom_operator(module: str) -> None:
    command = ["profile", f"{module}:workload", "--microbatches", "1", "--json", "-"]
    done = CliRunner().invoke(app, [*command, "--devices", "pytorch:cpu:0"])
    assert done.exit_code == 0, done.output
    first, second = json.loads(done.stdout)["devices"]["pytorch:cpu:0"]["layers"]
    assert first["forward_s"] > 0
    assert second["forward_s"] > 0


def test_a_device_without_the_operator_is_refused_by_name(module: str, crew: Crew) -> None:
    """The given cuts put its layer on numpy."""
    workload = importlib.import_module(module).workload()
    task = workload.model, workload.loss_fn, next(workload.batches(4, 0))
    options: dict[str, Any] = {"cuts": [1], "microbatches": 1, "schedule": "1f1b"}
    lacks = (
        r"m0: .*cannot run theirs\.square\.default of layer a.*give that layer to another device"
    )
    with pytest.raises(UnsupportedOperatorError, match=lacks):
        hp.Pipeline(
            *task, cluster=crew.cluster, crew=crew, optimizer=hp.optim.sgd(lr=0.1), **options
        )


def test_an_operator_without_an_origin_is_refused_by_name() -> None:
    library = torch.library.Library("nobodys", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    with pytest.raises(BackendError, match=r"nobodys::twice is not known to worker.*custom_op"):
        operator_origins(["aten.mm.default", "nobodys.twice.default"])
