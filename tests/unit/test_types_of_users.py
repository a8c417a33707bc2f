"""Type checkers see hetpipe's types in a user's file, without the options of this checkout."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from hetpipe._lazy import index_of

ROOT = Path(__file__).parents[2]

START = """
from pathlib import Path

import torch

import hetpipe as hp
from hetpipe import sdk
from hetpipe.plan import read_plan
from hetpipe.sdk.conformance import BackendSuite


def use(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, device: sdk.Device) -> None:
    cluster = hp.Cluster.local()
    sgd = hp.optim.sgd(lr=0.1)
    loss_fn = torch.nn.functional.mse_loss
    pipe = hp.Pipeline(model, loss_fn, (x, y), cluster=cluster, optimizer=sgd, cuts=[1])
"""
"""The start of a user's module."""

TYPES = {
    "cluster": "Cluster",
    "cluster.members": "tuple[Member, ...]",
    "sgd": "Optimizer",
    "pipe": "Pipeline",
    "pipe.__enter__()": "Pipeline",
    "pipe.plan": "Plan",
    "pipe.plan.stages": "tuple[StagePlan, ...]",
    "pipe.step(x, y)": "float",
    "next(pipe.run([(x, y)]))": "Result",
    "next(pipe.run([(x, y)])).loss": "float",
    "pipe.evaluate([(x, y)]).loss": "float",
    "pipe.evaluate([(x, y)]).metrics": "dict[str, float]",
    "pipe.gradients(x, y)": "tuple[float, dict[str, Tensor]]",
    "pipe.diagnose(x, y)": "Diagnosis",
    "pipe.state_dict()": "dict[str, Tensor]",
    "pipe.timeline": "Timeline",
    "pipe.predicted": "Timeline",
    "pipe.costs": "CostTable | None",
    "pipe.rebalance()": "Rebalanced",
    "pipe.fit([(x, y)], epochs=1)": "History",
    "pipe.fit([(x, y)], 1, folder='run', resume='auto').epochs": "list[Epoch]",
    'hp.Pipeline.load("at", model, loss_fn, (x, y))': "Pipeline",
    "hp.capture(model, loss_fn, (x, y))": "Captured",
    "hp.discover_devices()": "tuple[list[DeviceInfo], dict[str, str]]",
    "hp.optim.adamw(lr=1e-3)": "Optimizer",
    "hp.optim.from_torch(torch.optim.SGD(model.parameters()))": "Optimizer",
    "hp.Pipeline(model, loss_fn, (x, y), cluster=cluster, "
    "optimizer=torch.optim.SGD(model.parameters()))": "Pipeline",
    'read_plan(Path("plan.json"))': "tuple[Plan, CostTable | None]",
    "sdk.DONE": "DoneEvent",
    "sdk.KINDS.index('cpu')": "int",
    "device.info": "DeviceInfo",
    "device.info.capabilities": "Capabilities",
    "device.compile(torch.fx.symbolic_trace(model))": "Executable",
    "BackendSuite()": "BackendSuite",
}
"""Expressions of a user, with their types."""

WRONG = {
    "pipe.steps_done": "attribute",
    "hp.Pipline": "attribute",
    'hp.Pipeline(model, loss_fn, (x, y), cluster=cluster, optimizer=sgd, cuts="1")': "arg",
    "hp.optim.sgd()": "arg",
    "pipe.fit([(x, y)], epochs=1, patience='two')": "arg",
}
"""A user's mistakes, with a word of both checkers' complaints."""

ANY = {
    "x": "a batch: tensors, or tuples and dicts of them, as the model takes them",
    "y": "as x",
    "*y": "as x",
    "predict": "whatever the model returns",
    "output": "as predict's result",
    "**options": "`Pipeline.load` passes them to `Pipeline`, which checks them",
    "**chosen": "fields of `PlannerOptions`, which checks them",
    "program": "a device runs what its own `_compile` returned",
    "_compile": "any object that the device's `_run` understands",
}
"""Parameters, and functions by their results, that may be `Any`, and why."""


def test_types_are_shipped() -> None:
    assert (ROOT / "hetpipe" / "py.typed").exists()
    assert '"hetpipe" = ["py.typed"]' in (ROOT / "pyproject.toml").read_text()


def indexes() -> dict[str, dict[str, str]]:
    """Return every package with an index, and the module of each of its names."""
    found = {}
    for path in (ROOT / "hetpipe").rglob("__init__.py"):
        package = ".".join(path.parent.relative_to(ROOT).parts)
        if index := index_of(ast.parse(path.read_text()), package):
            found[package] = index
    return found


INDEXES = indexes()


@pytest.mark.parametrize("package", INDEXES)
def test_an_index_gives_all_names_it_lists(package: str) -> None:
    exported = import_module(package)
    assert sorted(INDEXES[package]) == dir(exported) == exported.__all__
    for name, module in INDEXES[package].items():
        value = getattr(exported, name)
        submodule = sys.modules.get(f"{package}.{name}")  # it hides a function of its name
        assert value is (submodule or getattr(import_module(module), name))


@pytest.mark.parametrize("package", INDEXES)
def test_no_public_function_hides_a_type(package: str) -> None:
    untold = {
        f"{name}: {what}"
        for name, module in INDEXES[package].items()
        for what in hidden_types(module, name)
    }
    assert not untold


def hidden_types(module: str, name: str) -> Iterator[str]:
    """Yield the parameters and results of a public function or class that have no type."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            yield from untyped_names(node)
        if isinstance(node, ast.ClassDef) and node.name == name:
            for member in node.body:
                if isinstance(member, ast.AnnAssign) and ast.unparse(member.annotation) == "Any":
                    yield ast.unparse(member)
                if isinstance(member, ast.FunctionDef) and is_public(member.name):
                    yield from untyped_names(member)


def is_public(name: str) -> bool:
    return not name.startswith("_") or name.startswith("__")


def untyped_names(function: ast.FunctionDef) -> Iterator[str]:
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    types = {arg.arg: arg.annotation for arg in plain if arg.arg not in ("self", "cls")}
    if arguments.vararg is not None:
        types[f"*{arguments.vararg.arg}"] = arguments.vararg.annotation
    if arguments.kwarg is not None:
        types[f"**{arguments.kwarg.arg}"] = arguments.kwarg.annotation
    types[function.name] = function.returns
    for name, annotation in types.items():
        if name not in ANY and (annotation is None or ast.unparse(annotation) == "Any"):
            yield f"{function.name}: {name}"


def user_file(folder: Path) -> tuple[Path, dict[int, str]]:
    """Write a user's module; return it, and the expression of each line that asks for a type."""
    public = [
        f"{package}.{name}" for package in ("hetpipe", "hetpipe.sdk") for name in INDEXES[package]
    ]
    names = [name.replace("hetpipe.sdk", "sdk").replace("hetpipe", "hp") for name in public]
    lines = START.splitlines()
    asked = {}
    for expression in [*TYPES, *names]:
        lines.append(f"    reveal_type({expression})")
        asked[len(lines)] = expression
    for expression in WRONG:
        lines.append(f"    {expression}")
        asked[len(lines)] = expression
    path = folder / "user.py"
    path.write_text("\n".join(lines) + "\n")
    return path, asked


Answers = dict[int, str]
"""By line: the type of its expression, or the complaint."""


def mypy(path: Path, cache: Path) -> Answers:
    arguments = ["--strict", "--config-file", "", "--cache-dir", str(cache), "--no-error-summary"]
    done = run([sys.executable, "-m", "mypy", *arguments, path.name], path.parent)
    answers = {}
    for line in done.splitlines():
        if (match := re.match(r"user\.py:(\d+): \w+: (.*)", line)) is None:
            raise AssertionError(done)
        number, text = int(match[1]), match[2]
        revealed = re.fullmatch('Revealed type is "(.*)"', text)
        answers[number] = short(revealed[1]) if revealed else text
    return answers


def pyright(path: Path, cache: Path) -> Answers:
    (path.parent / "pyrightconfig.json").write_text(
        json.dumps({"extraPaths": [str(ROOT)], "typeCheckingMode": "strict"})
    )
    command = ["-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, path.name]
    done = json.loads(run([sys.executable, *command], path.parent))
    answers = {}
    for entry in done["generalDiagnostics"]:
        text = entry["message"]
        revealed = re.fullmatch('Type of ".*" is "(.*)"', text, re.DOTALL)
        if revealed or entry["severity"] == "error":
            line = entry["range"]["start"]["line"] + 1
            answers[line] = revealed[1] if revealed else f"{text} [{entry.get('rule')}]"
    return answers


def run(command: list[str], folder: Path) -> str:
    environment = {"MYPYPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    ).stdout


def short(revealed: str) -> str:
    """Return a type of mypy as pyright writes it, without modules."""
    return re.sub(r"\b[a-z_]\w*(?:\.\w+)*\.(?=\w)", "", revealed)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_users_file_has_all_types(
    checker: Callable[[Path, Path], Answers], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    path, asked = user_file(tmp_path)
    answers = checker(path, pytestconfig.cache.mkdir("types-of-users"))
    assert answers.keys() == asked.keys(), [answers[n] for n in answers.keys() - asked.keys()]
    by_expression = {asked[number]: answer for number, answer in answers.items()}
    assert {expression: by_expression[expression] for expression in TYPES} == TYPES
    for expression, answer in by_expression.items():
        if expression in WRONG:
            assert WRONG[expression] in answer.lower()
        else:
            assert answer not in ("Any", "Unknown"), expression
