"""Masks of rectifiers: the tensors that a forward saves, and gradients equal to torch's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_harness import check
from torch import nn

from hetpipe.capture import Captured
from hetpipe.capture.program import SAVED, PassPrograms
from hetpipe.sdk.graph import core_decompositions

SAMPLES, CHANNELS, CLASSES, SIDE = 2, 3, 4, 8
POOL = "aten.max_pool2d_with_indices"
TABLES: dict[str, Mapping[Any, Any]] = {
    "aten": {},
    "decomposed": core_decompositions(keep=(POOL, f"{POOL}_backward")),
}
IMAGE = (SAMPLES, CHANNELS, SIDE, SIDE)


class Pooled(nn.Module):
    """A model from images to class scores that pools the maxima of an activation."""

    def __init__(self, activation: nn.Module, skip: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.activation, self.skip = activation, skip
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.activation(self.first(x))
        y = F.max_pool2d(image, 3, 2, 1).square().mean((2, 3))
        return self.head(y + image.mean((2, 3)) if self.skip else y)


def passes(model: nn.Module, table: Mapping[Any, Any], x: torch.Tensor) -> PassPrograms:
    """Check one stage against eager torch; return its passes."""
    case = model.double(), F.cross_entropy, (x.double(), torch.randint(0, CLASSES, (SAMPLES,)))
    captured = Captured(*case)
    graphs = captured.stage_graphs([], [table], [SAMPLES], None)
    check(case, captured, graphs, [SAMPLES])
    return graphs[0].passes[SAMPLES]


def saved(programs: PassPrograms) -> list[tuple[tuple[int, ...], str]]:
    """Return the shapes and dtypes of the saved tensors, except single numbers."""
    slots = [slot for slot in programs.forward.outputs if slot.role == SAVED]
    return [(slot.shape, slot.dtype) for slot in slots if slot.shape]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_pooled_rectifier_saves_no_image(table: str, inplace: bool) -> None:
    torch.manual_seed(0)
    programs = passes(Pooled(nn.ReLU(inplace)), TABLES[table], torch.randn(IMAGE))
    assert IMAGE not in [shape for shape, _ in saved(programs)]


@pytest.mark.parametrize("table", TABLES)
def test_maxima_of_zero_have_no_gradient(table: str) -> None:
    x = torch.zeros(IMAGE)
    x[0, 0, 0, 0], x[0, 1] = 2.0, -1.0
    model = Pooled(nn.ReLU())
    nn.init.dirac_(model.first.weight)
    nn.init.zeros_(model.first.bias)
    passes(model, TABLES[table], x)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    "model",
    [
        lambda: Pooled(nn.ReLU(), skip=True),
        lambda: Pooled(nn.Threshold(0.1, 0.0)),
        lambda: Pooled(nn.Threshold(0.0, -0.5)),
        lambda: Pooled(nn.ReLU6()),
        lambda: Pooled(nn.LeakyReLU()),
    ],
    ids=["skip", "threshold", "value", "relu6", "leaky"],
)
def test_other_masks_of_an_image_stay_saved(table: str, model: Any) -> None:
    torch.manual_seed(1)
    programs = passes(model(), TABLES[table], torch.randn(IMAGE))
    assert any(shape == IMAGE for shape, _ in saved(programs))


def test_a_mask_is_not_saved_beside_its_rectifier() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, CLASSES)
    )
    programs = passes(model, TABLES["decomposed"], torch.randn(SAMPLES, 8))
    rectified = [((SAMPLES, 6), "float64"), ((SAMPLES, 5), "float64")]
    assert [each for each in saved(programs) if each[0][-1] in (5, 6)] == rectified


def test_a_mask_whose_rectifier_is_not_saved_is_saved() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, CLASSES), nn.ReLU())
    programs = passes(model, TABLES["decomposed"], torch.randn(SAMPLES, 8))
    assert ((SAMPLES, CLASSES), "bool") in saved(programs)


@pytest.mark.parametrize(
    "activation", [nn.Hardswish(), nn.ReLU6(), nn.Hardtanh(-0.5, 0.5)], ids=str
)
def test_a_stage_that_begins_with_an_activation_reads_its_input_again(
    activation: nn.Module,
) -> None:
    """The backward has the stage's input, so the forward does not save its comparison."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(8, 6), activation, nn.Linear(6, CLASSES)).double()
    x = torch.randn(SAMPLES, 8, dtype=torch.float64)
    case = model, F.cross_entropy, (x, torch.randint(0, CLASSES, (SAMPLES,)))
    starting = "aten.hardswish.default", "aten.hardtanh.default"
    captured = Captured(*case, starting=starting)
    cuts = range(1, len(captured.layer_names))
    tables = [TABLES["decomposed"]] * len(captured.layer_names)
    check(case, captured, captured.stage_graphs(cuts, tables, [SAMPLES], None), [SAMPLES])
