"""Forward programs in eval mode, compared with eager evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_harness import TABLES, Stages, call, even_cuts, rows_of
from capture_models import captured, make
from torch import nn

from hetpipe.capture import Captured
from hetpipe.capture.program import COUNT, LOSS, OUTPUT
from hetpipe.errors import CaptureError

SIZES = [8, 4]
SHARES = [8 / 12, 4 / 12]


class Regular(nn.Module):
    """A model with dropout and batch norm, which behave differently in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(64, 8)
        self.drop = nn.Dropout(0.5)
        self.norm1 = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x))).flatten(1)
        x = self.norm1(self.drop(torch.tanh(self.first(x))))
        return self.second(F.dropout(x, 0.4, self.training))


def _trained() -> nn.Module:
    """Return a model whose running statistics match no batch."""
    torch.manual_seed(0)
    model = Regular().double()
    with torch.no_grad():
        for norm in (model.norm, model.norm1):
            norm.running_mean.uniform_(-1, 1)
            norm.running_var.uniform_(0.5, 2)
    return model


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(12, 3, 6, 6).double(), torch.arange(12) % 4


def _eager(model: nn.Module, loss_fn: Callable[..., Any], batch: tuple[Any, Any]) -> float:
    """Return the loss in eval mode, with the weights that the programs use."""
    model.eval()
    loss, lo = 0.0, 0
    with torch.no_grad():
        for size, share in zip(SIZES, SHARES, strict=True):
            x, y = (rows_of(value, lo, lo + size) for value in batch)
            result = loss_fn(call(model, x), y)
            loss += share * float(result[0] if isinstance(result, tuple) else result)
            lo += size
    return loss


@pytest.mark.wide
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("cuts", [[], [1], [2], [1, 2]])
def test_losses_equal_eager(cuts: list[int], table: str) -> None:
    model = _trained()
    got = Captured(model, F.cross_entropy, _batch())
    graphs = got.evaluation_graphs(cuts, [TABLES[table]] * (len(cuts) + 1), SIZES)
    state = Stages(got, graphs)
    before = {name: value.clone() for name, value in state.buffers.items()}
    assert state.step(_batch(), SIZES, SHARES) == [{}] * len(graphs)
    assert state.loss == pytest.approx(_eager(model, F.cross_entropy, _batch()), rel=1e-6)
    for name, value in state.buffers.items():
        assert torch.equal(value, before[name]), "evaluation changes no statistics"


@pytest.mark.wide
@pytest.mark.parametrize(
    "name", ["residual", "masked", "embedder", "repeated", "recurrent", "bert"]
)
def test_other_models(name: str) -> None:
    """Evaluate models with all kinds of inputs and frozen parameters; layers merged in training are
    merged here too.
    """
    model, loss_fn, batch = make(name)
    got = captured(name)
    cuts = even_cuts(got, 3)
    graphs = got.evaluation_graphs(cuts, [{}] * (len(cuts) + 1), SIZES)
    state = Stages(got, graphs)
    state.step(batch, SIZES, SHARES)
    assert state.loss == pytest.approx(_eager(model, loss_fn, batch), rel=1e-6)
    assert state.count == (float((batch[1] != 0).sum()) if name == "embedder" else 0)


@pytest.mark.slow
def test_evaluation_stages_match_training_stages_without_gradients() -> None:
    got = captured("repeated")
    cuts = even_cuts(got, 3)
    tables = [TABLES["core"]] * (len(cuts) + 1)
    training = got.stage_graphs(cuts, tables, SIZES, None)
    for graph, other in zip(got.evaluation_graphs(cuts, tables, SIZES), training, strict=True):
        passes = graph.passes[8]
        assert passes.backward is None
        assert passes.halves is None
        assert graph.update is None
        assert passes.saved_nbytes == 0
        assert {slot.role for slot in passes.forward.outputs} <= {"cut", LOSS, COUNT, OUTPUT}
        assert set(graph.parameters) <= set(other.parameters)
        assert set(graph.buffers) <= set(other.buffers)
        assert graph.parameters


def test_inference_computes_only_the_output() -> None:
    got = captured("repeated")
    cuts = even_cuts(got, 3)
    tables = [TABLES["core"]] * (len(cuts) + 1)
    forwards = [
        graph.passes[8].forward for graph in got.evaluation_graphs(cuts, tables, SIZES, False)
    ]
    assert {slot.role for forward in forwards for slot in forward.outputs} == {"cut", OUTPUT}
    assert not any(slot.name.startswith("y") for forward in forwards for slot in forward.inputs)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_stays_in_its_mode(training: bool) -> None:
    model = _trained().train(training)
    model.norm.train(not training)
    modes = [module.training for module in model.modules()]
    got = Captured(model, F.cross_entropy, _batch())
    got.evaluation_graphs([1], [{}, {}], [4])
    assert [module.training for module in model.modules()] == modes


def test_training_is_captured_before_evaluation() -> None:
    got = Captured(_trained(), F.cross_entropy, _batch())
    evaluation = got.evaluation_graphs([1], [{}, {}], [4])
    training = got.stage_graphs([1], [{}, {}], [4], None)
    assert evaluation[0].passes[4].backward is None
    assert training[0].passes[4].backward is not None


@pytest.mark.slow
def test_a_frozen_encoder_layer_keeps_its_layers() -> None:
    """Evaluate an encoder layer that torch would run as one operator, which no backend knows."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), nn.Flatten(), nn.Linear(40, 4)
    )
    model[0].requires_grad_(False)
    batch = torch.randn(12, 5, 8), torch.arange(12) % 4
    got = Captured(model, F.cross_entropy, batch)
    state = Stages(got, got.evaluation_graphs([2], [{}, {}], SIZES))
    state.step(batch, SIZES, SHARES)
    assert state.loss == pytest.approx(_eager(model, F.cross_entropy, batch), rel=1e-5)
    assert torch.backends.mha.get_fastpath_enabled()


def test_other_layers_in_eval_mode_are_refused() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.extra, self.last = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.last(self.extra(x) if self.training else x)

    got = Captured(Auxiliary(), F.mse_loss, (torch.randn(4, 4), torch.randn(4, 4)))
    with pytest.raises(CaptureError, match=r"2 layers.*eval mode.* 3 .*layer 1 is last, not extra"):
        got.evaluation_graphs([1], [{}, {}], [4])


def test_cuts_are_checked() -> None:
    with pytest.raises(CaptureError, match="cuts"):
        captured("mlp").evaluation_graphs([9], [{}, {}], [4])
