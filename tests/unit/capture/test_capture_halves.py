"""A backward split in two halves: the previous stage waits only for the first half."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from capture_harness import TABLES, Stages, even_cuts
from capture_models import CASES, Dropout, captured, make
from torch import nn

from hetpipe.capture import Captured
from hetpipe.capture.passes.partition import INPUTS, MIN_CUT, NONE
from hetpipe.capture.program import GRAD, SAVED, TANGENT, Program, StageGraphs
from hetpipe.capture.slots import BACKWARD_ORDER
from hetpipe.sdk.graph import operator_name

SIZES = [8, 4]
PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
VIEWS = {"aten.view.default", "aten._unsafe_view.default", "aten.t.default", "aten.permute.default",
         "aten.transpose.int", "aten.unsqueeze.default", "aten.squeeze.dim"}  # fmt: skip


def _graphs(
    name: str, stages: int, table: str = "aten", mode: str = NONE
) -> tuple[Captured, list[StageGraphs]]:
    model = captured(name)
    cuts = even_cuts(model, stages)
    count = len(cuts) + 1
    modes = [mode] * count
    return model, model.stage_graphs(cuts, [TABLES[table]] * count, SIZES, None, modes, True)


def _check_equal(model: Captured, graphs: list[StageGraphs], batch: tuple[object, object]) -> None:
    whole, halved = Stages(model, graphs), Stages(model, graphs, halves=True)
    expected = whole.step(batch, SIZES, [0.5, 0.25])
    found = halved.step(batch, SIZES, [0.5, 0.25])
    for stage, other in zip(expected, found, strict=True):
        assert stage.keys() == other.keys()
        for name, value in stage.items():
            assert torch.equal(value, other[name]), name


@pytest.mark.wide
@pytest.mark.parametrize(
    ("stages", "table", "mode"),
    [(3, "core", NONE), (3, "aten", INPUTS), (2, "core", MIN_CUT)],
)
@pytest.mark.parametrize("name", CASES)
def test_halves_equal_the_backward_bit_for_bit(
    name: str, stages: int, table: str, mode: str
) -> None:
    model, graphs = _graphs(name, stages, table, mode)
    _check_equal(model, graphs, make(name)[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two_branch", "residual", "tied"])
def test_a_stage_per_layer(name: str) -> None:
    """Cut between all layers, so that tensors skip stages and their tangents arrive and leave under
    the same name."""
    model = captured(name)
    cuts = list(range(1, len(model.layer_graph(8))))
    graphs = model.stage_graphs(cuts, [{}] * (len(cuts) + 1), SIZES, None, (), True)
    _check_equal(model, graphs, make(name)[2])


def test_an_incoming_tangent_survives_an_outgoing_one_with_the_same_name() -> None:
    class Reused(nn.Module):
        """The second layer adds a parameter to tensors that both it and the third layer read."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.first(x))
            return self.third(x * torch.tanh(self.second(x)) + x) + x

    torch.manual_seed(0)
    batch = torch.randn(12, 4), torch.randn(12, 4)
    model = Captured(Reused(), F.mse_loss, batch)
    graphs = model.stage_graphs([1, 2], [{}] * 3, SIZES, None, (), True)
    middle = graphs[1].passes[8].halves
    assert middle is not None
    incoming, outgoing = ({s.name for s in slots if s.role == TANGENT} for slots in
                          (middle[0].inputs, middle[0].outputs))  # fmt: skip
    assert incoming & outgoing
    assert not outgoing & {s.name for s in middle[1].inputs if s.role == TANGENT}
    _check_equal(model, graphs, batch)


def test_dropout() -> None:
    torch.manual_seed(0)
    batch = torch.randn(12, 6).double(), torch.randint(0, 4, (12,))
    model = Captured(Dropout().double(), F.cross_entropy, batch)
    _check_equal(model, model.stage_graphs([1], [{}] * 2, SIZES, None, [INPUTS] * 2, True), batch)


def _operators(program: Program | None) -> Counter[str]:
    assert program is not None
    names = (operator_name(n) for n in program.graph.graph.nodes if n.op == "call_function")
    return Counter(names)


def _products(program: Program | None) -> int:
    return sum(_operators(program)[name] for name in PRODUCTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "attention", "gpt2"])
def test_products_of_weight_gradients_are_in_the_weight_half(name: str) -> None:
    for graph in _graphs(name, 2)[1]:
        passes = graph.passes[8]
        assert passes.halves is not None
        before, after = passes.halves
        matrices = sum(len(slot.shape) == 2 for slot in after.outputs)
        lookups = _operators(after)["aten.embedding_dense_backward.default"]
        if graph.stage == 0:
            assert _products(after) == _products(passes.backward)
        else:
            assert _products(after) == matrices - lookups
            assert _products(before) == _products(passes.backward) - _products(after) > 0


def test_halves_repeat_only_views() -> None:
    for name in ("mlp", "attention", "gpt2"):
        passes = _graphs(name, 2)[1][1].passes[8]
        assert passes.halves is not None
        extra = _operators(passes.halves[0]) + _operators(passes.halves[1])
        extra -= _operators(passes.backward)
        assert set(extra) <= VIEWS


def test_convolutions_are_divided() -> None:
    passes = _graphs("residual", 2)[1][1].passes[8]
    assert passes.halves is not None
    operator = "aten.convolution_backward.default"
    masks = [
        [node.args[10] for node in program.graph.graph.nodes if operator_name(node) == operator]
        for program in passes.halves
    ]
    assert len(masks[0]) == len(masks[1]) == _operators(passes.backward)[operator] > 0
    assert all(mask == [True, False, False] for mask in masks[0])
    assert all(mask[0] is False and mask[1] is True for mask in masks[1])


@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
def test_slots(name: str) -> None:
    for graph in _graphs(name, 3)[1]:
        passes = graph.passes[8]
        assert passes.backward is not None
        assert passes.halves is not None
        before, after = passes.halves
        of_backward = {slot.key for slot in passes.backward.inputs}
        made = {slot.key for slot in before.outputs}
        assert {s.key for s in before.inputs} <= {k for k in of_backward if k[0] != GRAD}
        assert {s.key for s in after.inputs} <= of_backward | made
        assert {k for k in made if k[0] == SAVED} <= {s.key for s in after.inputs}
        assert not {k for k in made if k[0] == SAVED} & of_backward
        outgoing = [s for s in passes.backward.outputs if s.role == TANGENT]
        assert [s for s in before.outputs if s.role == TANGENT] == outgoing
        assert after.outputs == tuple(s for s in passes.backward.outputs if s.role == GRAD)
        for program in (before, after):
            places = [BACKWARD_ORDER.index(slot.role) for slot in program.inputs]
            assert places == sorted(places)
        assert passes.deferred_nbytes > 0


def test_the_first_stage_can_defer_its_whole_backward() -> None:
    passes = _graphs("mlp", 2)[1][0].passes[8]
    assert passes.halves is not None
    before, after = passes.halves
    assert before.inputs == before.outputs == ()
    assert _operators(after) == _operators(passes.backward)
    assert TANGENT in {slot.role for slot in after.inputs}


def test_a_frozen_stage_defers_nothing() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    net[1].requires_grad_(False)
    batch = torch.randn(12, 3), torch.randn(12, 2)
    model = Captured(net, F.mse_loss, batch)
    graphs = model.stage_graphs([1, 2], [{}] * 3, SIZES, None, halves=True)
    passes = graphs[1].passes[8]
    assert passes.halves is not None
    before, after = passes.halves
    assert after.inputs == after.outputs == ()
    assert _operators(before) == _operators(passes.backward)
    _check_equal(model, graphs, batch)


def test_halves_exist_only_on_request_and_with_a_backward() -> None:
    assert captured("mlp").stage_graphs([], [{}], [8], None)[0].passes[8].halves is None
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    net[0].requires_grad_(False)
    model = Captured(net, F.mse_loss, (torch.randn(4, 3), torch.randn(4, 4)))
    graphs = model.stage_graphs([1], [{}] * 2, [2], None, halves=True)
    assert graphs[0].passes[2].halves is None
    assert graphs[1].passes[2].halves is not None


def test_pickle_round_trip() -> None:
    model, graphs = _graphs("residual", 2)
    _check_equal(model, pickle.loads(pickle.dumps(graphs)), make("residual")[2])
