"""A wrong device is named with the layer and the operator; a right device is not blamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from crews import MIXED, Crews
from models import CASES, MLP, batches
from pipelines import pipeline
from torch import nn
from typer.testing import CliRunner
from wrong_backends import WrongBackend

import hetpipe as hp
from hetpipe.capture import captured
from hetpipe.capture.export import decompositions, torch_export
from hetpipe.capture.precision import Precision
from hetpipe.cli.app import app
from hetpipe.errors import NotFiniteError
from hetpipe.sdk.host import registry

X, Y = batches(1)[0]


@pytest.fixture(autouse=True, scope="module")
def wrong() -> None:
    registry.register_backend(WrongBackend)


def open_pipeline(
    crews: Crews, kind: str, members: str = "01", transport: str = "local", **options: Any
) -> hp.Pipeline:
    """Open a pipeline of an MLP on numpy, m0, and a faulty device, m1."""
    torch.manual_seed(0)
    crew = crews(("numpy:cpu:0", f"wrong:{kind}:0"), transport)
    options = {"optimizer": hp.optim.adamw(lr=1e-2), "cuts": [1], **options}
    loss_fn = nn.functional.cross_entropy
    return pipeline(crew, MLP(), loss_fn, (X, Y), members, microbatches=3, **options)


FAULTS = {
    "tanh": ("operator", "forward", "layers.0", "aten.tanh.default"),
    "le": ("operator", "backward", "layers.2", "aten.le.Scalar"),
    "mm": ("operator", "backward", "layers.6", "aten.mm.default"),
    "sqrt": ("operator", "update", "layers.2.weight", "aten.sqrt.default"),
    "nan": ("operator", "forward", "layers.4", "aten.sigmoid.default"),
    "raises": ("failed", "forward", "layers.4", "aten.sigmoid.default"),
    "unsteady": ("unsteady", "forward", "layers.4", "aten.sigmoid.default"),
    "random": ("unsteady", "forward", "layers.4", "aten.sigmoid.default"),
    "stale": ("unsteady", "forward", "layers.4", "aten.sigmoid.default"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_the_operator_is_named(crews: Crews, kind: str) -> None:
    verdict, program, layer, name = FAULTS[kind]
    stage = 0 if kind == "tanh" else 1
    with open_pipeline(crews, kind, "01" if stage else "10") as pipe:
        found = pipe.diagnose(X, Y)
    culprit = found.culprit
    assert culprit is not None, str(found)
    assert found.blames_device
    assert (found.verdict, culprit.program, culprit.operators) == (verdict, program, (name,))
    assert culprit.layer == layer
    assert (culprit.stage, culprit.member, culprit.device) == (stage, "m1", f"wrong:{kind}:0")
    assert f"stage {stage} on m1 (wrong:{kind}:0), {program}" in str(found)
    assert json.loads(json.dumps(found.to_json()))["culprit"]["operators"] == [name]


def test_a_stale_learning_rate_is_found(crews: Crews) -> None:
    with open_pipeline(crews, "lr") as pipe:
        found = pipe.diagnose(X, Y)
    assert found.verdict == "unsteady"
    assert found.culprit is not None
    assert found.culprit.program == "update at a later step"
    assert (found.culprit.stage, found.culprit.member) == (1, "m1")


def test_nan_results_are_shown(crews: Crews) -> None:
    with open_pipeline(crews, "nan") as pipe:
        with pytest.raises(NotFiniteError, match=r"pipe\.diagnose\(x, y\)"):
            pipe.step(X, Y)
        text = str(pipe.diagnose(X, Y))
    assert "nan at [0, 3], where torch has 0." in text
    assert "the operator's inputs were finite, from" in text
    assert "learning rate" not in text


def test_the_reason_quotes_the_devices_error(crews: Crews) -> None:
    with open_pipeline(crews, "raises") as pipe:
        found = pipe.diagnose(X, Y)
    assert found.culprit is not None
    assert found.culprit.reason == "ValueError: boom 42"


def test_a_lost_device_is_reported(crews: Crews) -> None:
    with open_pipeline(crews, "dies") as pipe:
        found = pipe.diagnose(X, Y)
    assert found.verdict == "failed"
    assert "the device now raises in other operators, too, so it may be lost" in str(found)


def test_operators_wrong_only_in_combination(crews: Crews) -> None:
    with open_pipeline(crews, "together") as pipe:
        found = pipe.diagnose(X, Y)
    assert found.verdict == "combination"
    assert found.culprit is not None
    assert found.culprit.operators == ("aten.addmm.default", "aten.sigmoid.default")
    assert "right one by one, but wrong in one graph" in str(found)


def test_passes_wrong_only_in_the_pipeline(crews: Crews) -> None:
    """Each program is right when it runs alone and wrong in a pass of the pipeline."""
    with open_pipeline(crews, "between") as pipe:
        found = pipe.diagnose(X, Y)
    assert found.verdict == "between"
    assert "but the pipeline's own pass does not: its gradient of layers." in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["local", "shared-memory"])
def test_diagnose_does_not_change_training(crews: Crews, transport: str) -> None:
    data = batches(4)

    def losses(asks: bool) -> list[float]:
        with open_pipeline(crews, "right", transport=transport) as pipe:
            taken = [pipe.step(*data[0]), pipe.step(*data[1])]
            if asks:
                found = pipe.diagnose(*data[2])
                assert (found.verdict, found.culprit, found.runs) == ("healthy", None, 16)
                assert str(found).startswith("every stage agrees with torch: 16 runs")
                assert len(pipe.timeline.spans) > 0
            return [*taken, *(pipe.step(*each) for each in data[2:])]

    assert losses(asks=True) == losses(asks=False)


def test_worker_processes_name_the_operator(crews: Crews) -> None:
    with open_pipeline(crews, "unsteady", transport="shared-memory") as pipe:
        found = pipe.diagnose(X, Y)
    assert found.culprit is not None
    assert found.culprit.operators == ("aten.sigmoid.default",)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_overflow_is_not_blamed_on_a_device(crews: Crews, schedule: str) -> None:
    """With this learning rate the second update overflows on every device."""
    optimizer = hp.optim.sgd(lr=1e38)
    with open_pipeline(crews, "right", schedule=schedule, optimizer=optimizer) as pipe:
        with pytest.raises(NotFiniteError):
            list(pipe.run([(X, Y)] * 4))
        found = pipe.diagnose(X, Y)
    assert found.verdict == "numbers", str(found)
    assert not found.blames_device
    assert found.culprit is not None
    assert found.culprit.layer.startswith("layers.")
    assert "lower the learning rate" in str(found)


class Root(nn.Module):
    """A model with the square root of values that may be negative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).sqrt())


def diagnosis_of(crews: Crews, model: nn.Module, x: torch.Tensor) -> hp.Diagnosis:
    crew, loss_fn = crews(("numpy:cpu:0", "wrong:right:0")), nn.functional.cross_entropy
    optimizer = hp.optim.sgd(lr=0.1)
    with pipeline(crew, model, loss_fn, (x, Y), "01", microbatches=3, optimizer=optimizer) as pipe:
        return pipe.diagnose(x, Y)


@pytest.mark.slow
def test_the_models_own_operator_is_named(crews: Crews) -> None:
    torch.manual_seed(0)
    found = diagnosis_of(crews, Root(), X)
    assert found.verdict == "numbers"
    assert found.culprit is not None
    assert (found.culprit.stage, found.culprit.operators) == (0, ("aten.sqrt.default",))
    assert found.culprit.not_finite.startswith("nan at [0, ")
    assert "the operator's inputs were finite, from -" in found.culprit.not_finite


@pytest.mark.slow
def test_data_with_infinities_are_named(crews: Crews) -> None:
    x = X.clone()
    x[5, 2] = float("inf")  # the second row of the second micro-batch
    found = diagnosis_of(crews, MLP(), x)
    assert found.verdict == "numbers"
    assert found.culprit is not None
    assert found.culprit.operators == ("the part of the batch x",)
    assert found.culprit.microbatch == 1
    assert found.culprit.not_finite.startswith("inf at [1, 2], already before")


TORCH = ("pytorch:cpu:0",)
KINDS: dict[str, dict[str, Any]] = {
    "tied": {"model": "tied_autoencoder"},
    "batch norm, uneven": {"model": "residual_cnn", "microbatches": 5},
    "halves, clipped": {"schedule": "zb-h1", "clip_norm": 0.1},
    "chunks": {"schedule": "interleaved", "members": "0101", "microbatches": 4},
    "predicted": {"schedule": "pipedream", "weights": "pipeoptim"},
    "accumulated": {"accumulate": 2},
    "replicas": {"members": [("m0", "m1"), ("m2",)]},
    "replicas that meet": {
        "model": "residual_cnn", "members": [("m0", "m1"), ("m2",)], "sync_batch_norm": True,
    },
    "bfloat16": {"devices": TORCH * 2, "precision": Precision("bfloat16"), "recompute": "inputs"},
    "float16": {"devices": TORCH * 2, "precision": Precision("float16", "float16")},
}  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
def test_right_devices_are_not_blamed(crews: Crews, kind: str) -> None:
    options = {"members": "01", "microbatches": 3, "model": "mlp", **KINDS[kind]}
    case = CASES[options.pop("model")]
    torch.manual_seed(0)
    crew = crews(options.pop("devices", MIXED))
    batch = case.batch(torch.Generator().manual_seed(2))
    optimizer = hp.optim.adamw(lr=1e-2)
    with pipeline(crew, case.model(), case.loss_fn, batch, optimizer=optimizer, **options) as pipe:
        before = pipe.step(*batch)
        found = pipe.diagnose(*batch)
        assert found.verdict == "healthy", str(found)
        assert found.loss <= before
        again = pipe.diagnose(*batch)
        assert (again.loss, again.runs) == (found.loss, found.runs)


@pytest.mark.slow
def test_saved_workspaces_of_a_library_are_not_compared(crews: Crews) -> None:
    """torch runs LSTM layers with oneDNN, whose saved tensors no other code can read."""
    torch.manual_seed(0)
    batch = (torch.randn(6, 5, 4), torch.randint(0, 3, (6,)))
    loss_fn = nn.functional.cross_entropy
    with pipeline(
        crews(TORCH * 2),
        Recurrent(),
        loss_fn,
        batch,
        "01",
        microbatches=2,
        optimizer=hp.optim.sgd(lr=0.1),
    ) as pipe:
        found = pipe.diagnose(*batch)
    assert found.verdict == "healthy", str(found)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(4, 8, batch_first=True)
        self.second = nn.LSTM(8, 8, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x)[0])[0][:, -1])


COMMAND = [
    "train", "digits", "--steps", "3", "--cuts", "3", "--microbatches", "2", "--mini-batch", "32",
    "--schedule", "1f1b",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "line", "end"),
    [
        ("mm", "stage 1 on m1 (wrong:mm:0), backward", "differs from unpartitioned torch"),
        ("nan", "nan at [0, 0, 0, 3], where torch has", "the loss of mini-batch 0 is nan"),
    ],
)
def test_the_command_diagnoses_a_failure(kind: str, line: str, end: str, tmp_path: Path) -> None:
    devices = [
        f'[[device]]\nid = "m{n}"\ndevice = "{device}"\n'
        for n, device in enumerate(("numpy:cpu:0", f"wrong:{kind}:0"))
    ]
    (tmp_path / "c.toml").write_text('transport = "local"\n' + "".join(devices))
    more = ["--cluster", str(tmp_path / "c.toml"), "--json", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, [*COMMAND, *more])
    assert result.exit_code == 1
    assert line in result.output
    assert end in str(result.exception)
    assert "learning rate" not in result.output
    written = json.loads((tmp_path / "out.json").read_text())["diagnosis"]
    assert written["verdict"] == "operator"
    assert written["culprit"]["device"] == f"wrong:{kind}:0"


@pytest.mark.slow
def test_wrong_gradients_are_not_equal_to_torch(tmp_path: Path) -> None:
    """Wrong gradients do not change the loss of the first step."""
    devices = ("numpy:cpu:0", "wrong:halves:0")
    tables = "".join(f'[[device]]\nid = "m{n}"\ndevice = "{d}"\n' for n, d in enumerate(devices))
    (tmp_path / "c.toml").write_text(f'transport = "local"\n{tables}')
    out = tmp_path / "out.json"
    more = ["--cluster", str(tmp_path / "c.toml"), "--json", str(out), "--steps", "1"]
    command = ["train", "mlp", *COMMAND[4:], *more]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "gradient of 6.bias, first mini-batch), where rounding makes" in str(result.exception)
    assert "backward of micro-batch 0, layer 10: aten.mm.default" in result.output
    written = json.loads(out.read_text())
    assert written["max_loss_rel_diff"] < 1e-6
    assert written["gradient"]["error"] > 0.4
    assert written["diagnosis"]["verdict"] == "operator"


class Attention(nn.Module):
    """Attention with two heads over five positions, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attend = nn.Linear(4, 24), Attend()
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.attend(self.first(x.view(len(x), 5, 4))).mean(1))


class Attend(nn.Module):
    """Attention with a mask under which the first position attends to nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.view(len(x), 5, 6, 4).transpose(1, 2).split(2, 1)
        seen = torch.ones(5, 5, dtype=torch.bool).tril(-1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return y.transpose(1, 2).flatten(2) + x[..., :8]


def _without_empty_rows(query: Any, key: Any, value: Any, attn_mask: Any, **_: Any) -> Any:
    """Return attention that is wrong in a row without keys: not a number."""
    scores = (query @ key.transpose(-2, -1) / 2).masked_fill(~attn_mask, float("-inf"))
    return scores.softmax(-1) @ value


def _with_another_gradient(query: Any, key: Any, value: Any, attn_mask: Any, **_: Any) -> Any:
    """Return the right values, but give the keys no gradient."""
    return decompositions.attention(query, key.detach(), value, attn_mask)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (_without_empty_rows, "the output of layer attend is the first that differs"),
        (_with_another_gradient, "its gradient of first.weight is off by"),
    ],
)
def test_a_fault_of_the_capture_is_named(
    crews: Crews, fault: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stages share the faulty capture, so their programs agree with torch."""
    table = decompositions.before_cut()
    table[torch.ops.aten.scaled_dot_product_attention.default] = fault
    monkeypatch.setattr(torch_export, "before_cut", lambda _: table)
    monkeypatch.setattr(captured, "_load_or_make", lambda _, make: make())
    torch.manual_seed(0)

    class Local(Attention):  # a separate capture, not the shared one
        pass

    found = diagnosis_of(crews, Local(), X)
    assert found.verdict == "capture", str(found)
    assert text in found.detail
    assert not found.blames_device
    assert "learning rate" not in str(found)
    assert "the captured program differs from the module itself in eager torch" in str(found)


@pytest.mark.slow
def test_a_module_with_dropout_is_not_compared(crews: Crews) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 8), nn.Dropout(0.5), nn.Linear(8, 5))
    found = diagnosis_of(crews, model, X)
    assert found.verdict == "healthy"
    assert "not compared: the module itself by eager torch, because dropout draws" in str(found)
