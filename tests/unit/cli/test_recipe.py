"""The options of `hetpipe train` for optimizer, learning rate, precision, clip and accumulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetpipe import optim
from hetpipe.capture.precision import COMPUTE_DTYPES
from hetpipe.cli.app import app
from hetpipe.cli.options import PRECISIONS
from hetpipe.cli.recipe import RecipeOptions
from hetpipe.optim.check import OPTIMIZERS
from hetpipe.optim.rule import Optimizer
from hetpipe.zoo.load import load_workload

DEVICES = ("--devices", "pytorch:cpu:0,pytorch:cpu:0", "--cuts", "3", "--microbatches", "2")


def test_all_optimizers_and_precisions_have_a_name() -> None:
    known = {name for name in dir(optim) if not name.startswith("_")}
    assert {*OPTIMIZERS} == known - {"Optimizer", "from_torch", "multi_step"}
    assert PRECISIONS == COMPUTE_DTYPES


def chosen(options: RecipeOptions) -> Optimizer:
    optimizer = options.change(load_workload("mlp")).optimizer
    assert optimizer is not None
    return optimizer


def test_an_optimizer_or_a_rate_replaces_the_models() -> None:
    assert chosen(RecipeOptions(optimizer="adam")).lr == optim.adam().lr
    assert chosen(RecipeOptions(optimizer="sgd", lr=0.5)).lr == 0.5
    usual = chosen(RecipeOptions(lr=0.5))
    assert (usual.name, usual.lr) == ("sgd", 0.5)
    assert dict(usual.hyperparameters)["momentum"] == 0.9, "other settings stay"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--optimizer", "adam", "--accumulate", "2"), "equal to unpartitioned torch"),
        (("--lr", "0.2", "--clip-norm", "0.1"), "equal to unpartitioned torch"),
        (("--precision", "bfloat16"), "not compared with torch: passes compute in bfloat16"),
        (("--optimizer", "lion"), "not compared with torch: torch has no optimizer lion"),
    ],
)
def test_options_change_the_training(
    options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    losses = []
    for number, more in enumerate(((), options)):
        path = tmp_path / f"{number}.json"
        command = ("train", "mlp", *DEVICES, "--schedule", "1f1b", "--steps", "6", *more)
        done = CliRunner().invoke(app, [*command, "--json", str(path)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        losses.append(json.loads(path.read_text())["losses"])
    assert message in done.output
    assert losses[0] != losses[1]
