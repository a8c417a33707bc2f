"""A second capture of the same model comes from the disk; a changed model is captured again."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hetpipe as hp
from hetpipe.caches import CacheWarning
from hetpipe.capture import Captured, disk_cache
from hetpipe.capture.export import identity
from hetpipe.capture.export.example import Example
from hetpipe.capture.export.signature import Rehearsal
from hetpipe.capture.export.torch_export import WithLoss
from hetpipe.capture.precision import Precision
from hetpipe.capture.program import Slot
from hetpipe.sdk.graph import dump_graph

MODEL = """
import torch
from torch import nn
from torch.nn import functional
from helper import activate

SCALE = 2.0

class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.inner, self.norm = nn.Linear(4, width), nn.BatchNorm1d(width)
        self.outer = nn.Linear(width, 3)
        self.table = torch.arange(width) * 0.5

    def forward(self, x):
        y = self.norm(self.inner(x)) * self.table
        return self.outer(activate(functional.dropout(y, 0.1)) * SCALE)
"""
HELPER = "import torch\ndef activate(x):\n    return torch.relu(x)\n"
BATCH = (torch.linspace(-1, 1, 16).reshape(4, 4), torch.tensor([0, 1, 2, 0]))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "captures"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Return a function that imports the model's module from its current source."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(model: str = MODEL, helper: str = HELPER) -> ModuleType:
        (tmp_path / "written.py").write_text(model)
        (tmp_path / "helper.py").write_text(helper)
        for name in ("written", "helper"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module("written")

    yield load
    for name in ("written", "helper"):
        sys.modules.pop(name, None)


def count_exports(model: nn.Module, loss_fn: Any = F.cross_entropy, **options: Any) -> int:
    """Capture a model and its stages; return the number of exports."""
    captured = Captured(model, loss_fn, BATCH, **options)
    cuts = [1] if len(captured.layer_names) > 1 else []
    captured.stage_graphs(cuts, [{}] * (len(cuts) + 1), [2], hp.optim.adam())
    return captured.exports


def rows(captured: Captured, cuts: list[int], evaluation: bool = False) -> Any:
    tables: list[Any] = [{}] * (len(cuts) + 1)
    if evaluation:
        stages = captured.evaluation_graphs(cuts, tables, [2])
    else:
        stages = captured.stage_graphs(cuts, tables, [2, 3], hp.optim.adam(), halves=True)
    programs = [
        program
        for stage in stages
        for passes in stage.passes.values()
        for program in (*passes.programs, stage.update, stage.predict, stage.norm)
    ]
    graphs = [None if p is None else (dump_graph(p.graph), p.inputs, p.outputs) for p in programs]
    return graphs, [(stage.tied, sorted(stage.constants)) for stage in stages]


@pytest.mark.slow
@pytest.mark.parametrize("evaluation", [False, True])
def test_the_same_model_is_not_exported_again(
    module: Callable[..., ModuleType], evaluation: bool
) -> None:
    first = Captured(module().Model(), F.cross_entropy, BATCH)
    expected = rows(first, [1], evaluation)
    second = Captured(module().Model(), F.cross_entropy, BATCH)
    assert rows(second, [1], evaluation) == expected
    assert first.exports > 0
    assert second.exports == 0
    for name in ("layer_names", "fingerprint", "updated_buffers", "has_count", "trainable"):
        assert getattr(second, name) == getattr(first, name)
    assert second.layer_graph(4) == first.layer_graph(4)
    assert sorted(second.buffers) == sorted(first.buffers)


CHANGES = {
    "a global": (MODEL.replace("SCALE = 2.0", "SCALE = 3.0"), HELPER),
    "a constant tensor": (MODEL.replace("* 0.5", "* 0.25"), HELPER),
    "a width": (MODEL.replace("width=6", "width=7"), HELPER),
    "a function of another file": (MODEL, HELPER.replace("relu", "tanh")),
    "code for real tensors alone": (
        MODEL,
        HELPER.replace("return", "x = x * 2 if x.device.type == 'cpu' else x\n    return"),
    ),
    "a name": (MODEL.replace("self.inner", "self.first"), HELPER),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_changed_code_is_captured_again(module: Callable[..., ModuleType], change: str) -> None:
    assert count_exports(module().Model()) > 0
    assert count_exports(module().Model()) == 0
    model, helper = CHANGES[change]
    assert count_exports(module(model, helper).Model()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("package", ["numpy", "sympy"])
def test_another_version_of_a_package_is_captured_again(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    digest, version = identity.library_digest(), identity.version
    changed = {package: "another"}
    monkeypatch.setattr(identity, "version", lambda name: changed.get(name) or version(name))
    assert identity.library_digest.__wrapped__() != digest


@pytest.mark.slow
def test_a_value_set_at_run_time_counts(module: Callable[..., ModuleType]) -> None:
    loaded = module()
    count_exports(loaded.Model())
    loaded.SCALE = 5.0
    assert count_exports(loaded.Model()) > 0
    loaded.SCALE = 2.0
    assert count_exports(loaded.Model()) == 0
    model = loaded.Model()
    model.table = model.table + 1
    assert count_exports(model) > 0


def frozen(model: nn.Module) -> nn.Module:
    model.inner.requires_grad_(False)
    return model


def partly_evaluated(model: nn.Module) -> nn.Module:
    model.norm.eval()
    return model


def smooth_loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y, label_smoothing=0.1)


OTHERS: dict[str, Callable[[nn.Module], int]] = {
    "frozen": lambda model: count_exports(frozen(model)),
    "eval mode of a part": lambda model: count_exports(partly_evaluated(model)),
    "loss": lambda model: count_exports(model, smooth_loss),
    "precision": lambda model: count_exports(model, precision=Precision("bfloat16")),
}


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS)
def test_other_captures_of_one_model_are_stored_separately(
    module: Callable[..., ModuleType], other: str
) -> None:
    loaded = module()
    count_exports(loaded.Model())
    assert OTHERS[other](loaded.Model()) > 0
    assert count_exports(loaded.Model()) == 0


@pytest.mark.slow
def test_a_damaged_entry_is_made_again(module: Callable[..., ModuleType], cache: Path) -> None:
    count_exports(module().Model())
    for path in cache.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(CacheWarning, match="will be made again: its checksum"):
        assert count_exports(module().Model()) > 0
    assert count_exports(module().Model()) == 0


@pytest.mark.slow
def test_an_entry_of_another_user_is_not_read(
    module: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    count_exports(module().Model())
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.warns(CacheWarning, match="belongs to user"):
        assert count_exports(module().Model()) > 0


class Attack:
    """An object whose pickle calls a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


class Outside:
    """An object whose pickle is a reference for the reader to resolve."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


class _Planter(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.parts if isinstance(value, Outside) else None


def pointer(array: Any) -> Any:
    """Return an attack: an array of objects with false bytes, so that a reader dereferences
    0x41414141."""
    dtype = Attack(np.dtype, "V8", False, True)
    state = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 5)
    dtype.call = (*dtype.call, state)  # type: ignore[assignment]
    planted = Attack(array.__reduce_ex__(2)[0], np.ndarray, (0,), b"b")
    planted.call = (*planted.call, (1, (1,), dtype, False, b"A" * 8))  # type: ignore[assignment]
    return planted


NAMES = r"it names .*, which is no plain data"
ROWS: list[Any] = []
ROWS.append(("list", ROWS))
ATTACKS: dict[str, tuple[Any, str]] = {
    "a call": (Attack(os.mkdir, "attacked"), r"it names \w+\.mkdir, which is no plain data"),
    "a call in a graph": (
        Outside("Program", ([Attack(os.mkdir, "attacked")], (), ())), r"it names \w+\.mkdir"
    ),
    "a class of ours": (Attack(Slot, "input", "x", (), "float32"), NAMES),
    "a large array": (Attack(np.ndarray, (1 << 40,), "f8"), NAMES),
    "an array of pointers": (Attack(np.ndarray, (1,), "O", b"A" * 8), NAMES),
    "a dtype that lies": (pointer(np.zeros(2)), NAMES),
    "objects as an array": (Outside("array", ("O", (1,), b"A" * 8, False)), "are not numbers"),
    "fields as an array": (Outside("array", ("i4,O", (1,), b"A" * 16, False)), "not numbers"),
    "more elements than bytes": (
        Outside("array", ("f4", (1 << 40,), b"A" * 8, False)), "cannot reshape"
    ),
    "an unknown record": (Outside("Captured", ()), "Captured"),
    "an unknown operator": (
        Outside("Program", ([("call_function", "x", "os.system", ("list", []), {}, None, None,
                              False, None)], (), ())),
        "torch has no operator of that name",
    ),
    "an attribute of torch": (
        Outside("Program", ([("placeholder", "x", "x", ("list", []), {}, ((1,), "load"), None,
                              False, None)], (), ())),
        "dtype",
    ),
    "an argument within itself": (
        Outside("Program", ([("call_function", "x", "aten.relu.default", ("list", ROWS), {}, None,
                              None, False, None)], (), ())),
        "recursion",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_an_entry_with_more_than_data_is_refused(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse an entry with harmful content even if its name, owner and checksum are right."""
    monkeypatch.chdir(cache.parent.parent)
    content, reason = ATTACKS[name]
    file = io.BytesIO()
    _Planter(file, protocol=5).dump(content)
    disk_cache.ENTRIES.store("0" * 64, file.getvalue())
    with pytest.warns(CacheWarning, match=reason):
        assert disk_cache.load("0" * 64) is None
    assert not Path("attacked").exists()


RAW = {
    "nothing": b"",
    "a long text that is not there": b"\x80\x05\x8d" + (1 << 40).to_bytes(8, "little") + b"a.",
    "another's extension": b"\x80\x05\x82\x01.",
    "a buffer outside": b"\x80\x05\x97.",
    "a state of a text": b"\x80\x05\x8c\x01a}\x8c\x01b\x8c\x01csb.",
}


@pytest.mark.parametrize("name", RAW)
def test_damaged_opcodes_are_refused(name: str) -> None:
    disk_cache.ENTRIES.store("0" * 64, RAW[name])
    with pytest.warns(CacheWarning, match="will be made again"):
        assert disk_cache.load("0" * 64) is None


def test_deeply_nested_data_is_accepted() -> None:
    disk_cache.ENTRIES.store("0" * 64, b"\x80\x05" + b"]" * 200_000 + b"a" * 199_999 + b".")
    assert disk_cache.load("0" * 64) is not None


@pytest.mark.slow
def test_a_refused_entry_is_made_again(module: Callable[..., ModuleType], cache: Path) -> None:
    count_exports(module().Model())
    file = io.BytesIO()
    _Planter(file, protocol=5).dump(Attack(os.mkdir, str(cache / "attacked")))
    for path in cache.iterdir():
        disk_cache.ENTRIES.store(path.stem, file.getvalue())
    with pytest.warns(CacheWarning, match=r"it names \w+\.mkdir"):
        assert count_exports(module().Model()) > 0
    assert not (cache / "attacked").exists()


@pytest.mark.slow
def test_code_without_a_file_is_captured_again() -> None:
    space: dict[str, Any] = {"__name__": "unwritten"}
    sys.modules["unwritten"] = ModuleType("unwritten")
    exec(MODEL.replace("from helper import activate", "activate = torch.relu"), space)
    vars(sys.modules["unwritten"]).update(space)
    assert count_exports(space["Model"]()) == count_exports(space["Model"]()) > 0
    del sys.modules["unwritten"]


def test_a_signature_changes_nothing(module: Callable[..., ModuleType]) -> None:
    model = module().Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    example = Example(*BATCH)
    run = WithLoss(model, F.cross_entropy, example)
    signatures = {Rehearsal(run, example.tensors(2)).call().signature for _ in range(3)}
    assert len(signatures) == 1
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(p.is_meta for p in model.parameters())


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls, self.last = nn.Linear(4, 3), 0, None
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = self.inner(x)
        self.sizes.append(len(x))
        return self.last


def test_capture_leaves_a_models_memory_of_its_calls_unchanged() -> None:
    model = Remembers()
    assert count_exports(model) > 0
    assert (model.calls, model.last, model.sizes) == (0, None, [])
    assert count_exports(model) == 0


class ReadsValues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if float(x.sum()) > 0 else x


def test_code_that_reads_values_has_no_signature() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        Rehearsal(ReadsValues(), [torch.ones(2)]).call()


class ReadsValuesUnlessExported(nn.Module):
    """transformers' masks are computed in this way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and float(x.sum()) > 0:
            return x
        return x * 2 if torch.compiler.is_exporting() else x


def test_code_runs_as_in_an_export() -> None:
    call = Rehearsal(ReadsValuesUnlessExported(), [torch.ones(2)]).call()
    assert any("mul" in event for event in call.events)
    assert not torch.compiler.is_compiling()
