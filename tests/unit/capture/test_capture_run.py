"""Stage programs compared with eager autograd, over stages, micro-batches and decompositions."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_harness import TABLES, Stages, check, even_cuts, total
from capture_models import CASES, Dropout, captured, make
from torch import fx, nn

from hetpipe.capture import Captured
from hetpipe.capture.program import (
    BUFFER,
    CONSTANT,
    COUNT,
    CUT,
    GRAD,
    LOSS,
    PARAM,
    RNG,
    SAVED,
    TANGENT,
    Program,
)
from hetpipe.optim import adam, sgd
from hetpipe.sdk.graph import operator_name

SIZES = [8, 4]
PLANS = [(1, "aten"), (2, "core"), (3, "aten"), (3, "core")]
ONE_PLAN = ("gpt2_eager", "bert_eager", "recurrent")  # twins of other models, or slow ones


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "stages", "table"),
    [(n, *plan) for n in CASES for plan in (PLANS[1:2] if n in ONE_PLAN else PLANS)],
)
def test_programs_equal_eager(name: str, stages: int, table: str) -> None:
    model = captured(name)
    cuts = even_cuts(model, stages)
    graphs = model.stage_graphs(cuts, [TABLES[table]] * (len(cuts) + 1), SIZES, None)
    check(make(name), model, graphs, SIZES)


def test_a_pool_of_another_layout_reads_no_strides() -> None:
    """Only the trace of a whole stage would show strides, after the profile of its layers."""
    (stage,) = captured("channels_last").stage_graphs([], [TABLES["core"]], [8], None)
    programs = stage.passes[8].programs
    operators = {str(node.target) for program in programs for node in program.graph.graph.nodes}
    assert "aten.mean.dim" in operators
    assert not any("strided" in operator for operator in operators)


class Windowed(nn.Module):
    """The layer norm makes the convolution channels-last, so the windows over it have gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        scale = torch.arange(1.0, 4.0)  # each place of a window has another weight
        windows = (y.unfold(2, 2, 1) * scale[:2]).unfold(3, 3, 2)
        logits: torch.Tensor = self.head((windows * scale).mean((2, 3, 4, 5)))
        return logits


def test_strides_of_another_layout_become_row_major() -> None:
    """torch's decomposition of `unfold` uses the strides of a channels-last tensor."""
    from torch._decomp import get_decompositions

    torch.manual_seed(0)
    model, batch = Windowed(), (torch.randn(8, 3, 7, 7), torch.randint(0, 5, (8,)))
    capture = Captured(model, F.cross_entropy, batch)
    table = {**TABLES["core"], **get_decompositions([torch.ops.aten.unfold])}
    graphs = capture.stage_graphs([], [table], [8], None)
    nodes = graphs[0].passes[8].forward.graph.graph.nodes
    assert "aten.as_strided.default" in {str(node.target) for node in nodes}
    check((model, F.cross_entropy, batch), capture, graphs, [8])


class MaskedHeads(nn.Module):
    """A masked attention, after which torch's CPU kernel leaves the heads of a row adjacent."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(16, 48), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.entry(x).chunk(3, -1))
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
        heads = F.scaled_dot_product_attention(*parts, attn_mask=mask).transpose(1, 2)
        logits: torch.Tensor = self.head(heads.view(-1, 6, 16).mean(1))
        return logits


class Quiet(nn.Module):
    """`nn.MultiheadAttention` without its weights, as in a transformer of `torch.nn`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(16, 2), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.transpose(0, 1)
        logits: torch.Tensor = self.head(self.attention(y, y, y, need_weights=False)[0].mean(0))
        return logits


@pytest.mark.parametrize("make_model", [MaskedHeads, Quiet])
def test_a_view_may_copy_the_result_of_a_decomposed_operator(make_model: Any) -> None:
    """The view suits the strides of torch's own result; for `Quiet`, in torch 2.11."""
    torch.manual_seed(0)
    model, batch = make_model(), (torch.randn(8, 6, 16), torch.randint(0, 5, (8,)))
    capture = Captured(model, F.cross_entropy, batch)
    graphs = capture.stage_graphs([], [TABLES["core"]], [8], None)
    check((model, F.cross_entropy, batch), capture, graphs, [8])


@pytest.mark.parametrize("name", ["residual", "two_branch", "masked", "tied", "repeated"])
def test_a_stage_per_layer(name: str) -> None:
    model = captured(name)
    cuts = list(range(1, len(model.layer_graph(8))))
    graphs = model.stage_graphs(cuts, [{}] * (len(cuts) + 1), SIZES, None)
    check(make(name), model, graphs, SIZES)
    for graph, layer_cut in zip(graphs, model.layer_graph(8).cut_nbytes, strict=False):
        outputs = graph.passes[8].forward.outputs
        assert sum(slot.nbytes for slot in outputs if slot.role == CUT) == layer_cut


def _depends_on(program: Program, roles: tuple[str, ...]) -> set[str]:
    """Return the names of the outputs that depend on an input with one of these roles."""
    nodes = list(program.graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    updated = {slot.key for slot in program.outputs if slot.role == BUFFER}
    found = {
        node
        for node, slot in zip(placeholders, program.inputs, strict=True)
        if slot.role in roles or slot.key in updated
    }
    for node in nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    results = program.graph.graph.output_node().args[0]
    return {slot.name for slot, node in zip(program.outputs, results, strict=True) if node in found}


@pytest.mark.wide
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", [*CASES, "dropout"])
def test_nothing_saved_depends_on_parameters_alone(name: str, table: str) -> None:
    """Otherwise the backward would silently mix weight versions."""
    model = _dropout() if name == "dropout" else captured(name)
    cuts = even_cuts(model, 3)
    for graph in model.stage_graphs(cuts, [TABLES[table]] * (len(cuts) + 1), [8], None):
        passes = graph.passes[8]
        saved = {slot.name for slot in passes.forward.outputs if slot.role == SAVED}
        assert saved <= _depends_on(passes.forward, ("input", CUT))
        read = set() if passes.backward is None else {s.key for s in passes.backward.inputs}
        assert {(SAVED, key) for key in saved} <= read, "saved but never read"


@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
def test_slots_are_in_the_documented_order(name: str) -> None:
    model = captured(name)
    cuts = even_cuts(model, 2)
    for graph in model.stage_graphs(cuts, [{}] * (len(cuts) + 1), [8], None):
        passes = graph.passes[8]
        assert passes.backward is not None
        for slots, order in (
            (passes.forward.inputs, (PARAM, BUFFER, CONSTANT, "input", CUT, RNG)),
            (passes.forward.outputs, (CUT, LOSS, COUNT, BUFFER, SAVED)),
            (
                passes.backward.inputs,
                (PARAM, BUFFER, CONSTANT, RNG, "input", CUT, SAVED, TANGENT, GRAD),
            ),
            (passes.backward.outputs, (TANGENT, GRAD)),
        ):
            places = [order.index(slot.role) for slot in slots]
            assert places == sorted(places)
        assert set(graph.constants) == {
            s.name
            for p in (passes.forward, passes.backward)
            for s in p.inputs
            if s.role == CONSTANT
        }


@pytest.mark.parametrize("name", [*CASES, "dropout"])
def test_nodes_name_their_layer(name: str) -> None:
    model = _dropout() if name == "dropout" else captured(name)
    cuts = even_cuts(model, 2)
    layers = [layer.name for layer in model.layer_graph(8).layers]
    bounds = [0, *cuts, len(layers)]
    graphs = model.stage_graphs(cuts, [TABLES["core"]] * (len(cuts) + 1), [8], None)
    for graph, lo, hi in zip(graphs, bounds, bounds[1:], strict=False):
        programs = (graph.passes[8].forward, graph.passes[8].backward)
        calls = [n for p in programs if p for n in p.graph.graph.nodes if n.op == "call_function"]
        assert {node.meta.get("layer") for node in calls} - {None} == set(layers[lo:hi])
        labelled = sum("layer" in node.meta for node in calls)
        assert labelled >= 0.95 * len(calls), f"{labelled} of {len(calls)}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recurrent", "attention", "gpt2", "residual"])
def test_graphs_hold_no_operator_of_one_device(name: str) -> None:
    """Check that a trace on the CPU puts neither oneDNN's LSTM nor the CPU's flash attention
    into graphs."""
    torch.manual_seed(0)
    case = CASES[name]
    x, y = case.batch()
    x, y = (t.float() if t.is_floating_point() else t for t in (x, y))
    (graph,) = Captured(case.model(), case.loss_fn, (x, y)).stage_graphs([], [{}], [12], adam())
    programs = (graph.passes[12].forward, graph.passes[12].backward, graph.update)
    names = {operator_name(n) for p in programs if p for n in p.graph.graph.nodes}
    for word in ("mkldnn", "cudnn", "flash", "efficient", "_cpu", "thnn", "prims"):
        assert not [n for n in names if word in n]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["residual", "gpt2", "masked"])
def test_pickle_round_trip(name: str) -> None:
    model = captured(name)
    cuts = even_cuts(model, 2)
    graphs = model.stage_graphs(cuts, [{}, {}], SIZES, adam())
    restored = pickle.loads(pickle.dumps(graphs))
    for before, after in zip(graphs, restored, strict=True):
        assert after.tied == before.tied
        assert after.update is not None
        assert after.update.inputs == before.update.inputs
        for node, other in zip(
            before.passes[8].forward.graph.graph.nodes,
            after.passes[8].forward.graph.graph.nodes,
            strict=True,
        ):
            assert node.meta.get("layer") == other.meta.get("layer")
    check(make(name), model, restored, SIZES)


def _dropout() -> Captured:
    torch.manual_seed(0)
    x = torch.randn(12, 6).double(), torch.randint(0, 4, (12,))
    return Captured(Dropout().double(), lambda out, y: F.cross_entropy(out, y, reduction="sum"), x)


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [[], [1], [1, 2]])
def test_dropout_is_the_same_on_every_plan(cuts: list[int]) -> None:
    model = _dropout()
    torch.manual_seed(1)
    batch = torch.randn(12, 6).double(), torch.randint(0, 4, (12,))
    found: list[tuple[float, dict[str, torch.Tensor]]] = []
    for sizes in ([12], [3, 3, 3, 3], [5, 4, 3]):
        graphs = model.stage_graphs(cuts, [TABLES["core"]] * (len(cuts) + 1), sizes, None)
        state = Stages(model, graphs)
        gradients = total(state.step(batch, sizes, [1.0] * len(sizes), step=5))
        found.append((state.loss, gradients))
    for loss, gradients in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        for name, value in gradients.items():
            torch.testing.assert_close(value, found[0][1][name], atol=1e-10, rtol=1e-10)
    whole = model.stage_graphs([], [{}], [12], None)
    reference, other = Stages(model, whole), Stages(model, whole)
    reference.step(batch, [12], [1.0], step=5)
    other.step(batch, [12], [1.0], step=6)
    assert reference.loss == pytest.approx(found[0][0], rel=1e-6)
    assert other.loss != pytest.approx(found[0][0], rel=1e-3), "every step draws anew"


def test_constants_that_depend_on_the_samples_stay_apart() -> None:
    """One size's constant must not serve all sizes, which would give wrong losses silently."""

    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (out - y).square().sum() / torch.tensor(float(len(out)))

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    batch = torch.randn(12, 4).double(), torch.randn(12, 4).double()
    model = Captured(net, loss_fn, batch)
    graphs = model.stage_graphs([1], [{}, {}], SIZES, None)
    check((net, loss_fn, batch), model, graphs, SIZES)


def test_dropout_drops_and_scales() -> None:
    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(100, 100))
            self.drop = nn.Dropout(0.25)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(x[:, None, None] * self.scale)

    model = Captured(Only(), lambda out, y: (out.sum(), 1), (torch.ones(2), torch.ones(2)))
    graphs = model.stage_graphs([], [{}], [2], None)
    (gradients,) = Stages(model, graphs).step((torch.ones(2), torch.ones(2)), [2], [1.0])
    values, counts = gradients["scale"].unique(return_counts=True)
    torch.testing.assert_close(values, torch.tensor([0.0, 1 / 0.75, 2 / 0.75]))
    expected = 10000 * torch.tensor([1 / 16, 6 / 16, 9 / 16])
    assert (counts - expected).abs().max() < 250  # 5 sigma
    assert model.has_count


def test_tied_weights_have_one_owner() -> None:
    model = captured("tied")
    assert model.aliases == {"output.weight": "encode.weight"}
    assert "output.weight" not in model.parameters
    first, last = model.stage_graphs([1], [{}, {}], [8], adam())
    assert first.tied == last.tied == (("encode.weight", 0, (1,)),)
    assert first.update is not None
    assert last.update is not None
    assert (PARAM, "encode.weight") in {s.key for s in first.update.outputs}
    assert {s.key for s in last.update.outputs if s.name == "encode.weight"} == {
        (GRAD, "encode.weight")
    }


def test_frozen_and_unused_parameters_are_state_only() -> None:
    model = captured("masked")
    (graph,) = model.stage_graphs([], [{}], [8], adam())
    assert {"frozen.weight", "unused.weight"} < set(model.parameters)
    assert "frozen.weight" not in model.trainable
    assert graph.update is not None
    updated = {slot.name for slot in graph.update.outputs if slot.role == PARAM}
    assert updated == {f"{n}.{p}" for n in ("first", "second", "third") for p in ("weight", "bias")}
    assert graph.parameters == tuple(dict.fromkeys(graph.parameters))
    assert "frozen.weight" in graph.parameters
    assert "unused.weight" not in graph.parameters
    assert set(model.buffers) == {"scale"}


def test_a_frozen_front_has_no_backward() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    batch = torch.randn(4, 3), torch.randint(0, 2, (4,))
    model = Captured(net, F.cross_entropy, batch)
    graphs = model.stage_graphs([1, 2], [{}] * 3, [2], adam())
    assert graphs[0].passes[2].backward is None
    assert graphs[0].update is None
    assert graphs[1].passes[2].backward is not None
    assert all(s.role != TANGENT for s in graphs[1].passes[2].backward.outputs)
    assert graphs[0].passes[2].saved_nbytes == 0
    check((net, F.cross_entropy, batch), model, graphs, [2, 2])


def test_stages_without_an_optimizer_have_no_update() -> None:
    assert captured("mlp").stage_graphs([], [{}], [8], None)[0].update is None


def test_views_are_not_saved_beside_their_base() -> None:
    """Attention reads queries, keys and values in several shapes; one saved copy of each is
    enough."""
    (graph,) = captured("attention").stage_graphs([], [{}], [8], None)
    backward: Any = graph.passes[8].backward
    forward = graph.passes[8].forward
    results = forward.graph.graph.output_node().args[0]
    saved = [n for s, n in zip(forward.outputs, results, strict=True) if s.role == SAVED]
    bases = set()
    for node in saved:
        while operator_name(node) in (
            "aten.view.default",
            "aten.t.default",
            "aten.permute.default",
        ):
            node = node.args[0]
        assert node not in bases
        bases.add(node)
    assert len(saved) == sum(slot.role == SAVED for slot in backward.inputs)


@pytest.mark.slow
def test_unreferenced_stages_are_freed() -> None:
    """Garbage collection cannot follow autograd's nodes, so they must not keep a trace alive."""

    def trace() -> None:
        captured("mlp").stage_graphs([2], [{}] * 2, [4], sgd(0.1))
        gc.collect()

    def count() -> int:
        return sum(issubclass(type(each), fx.GraphModule) for each in gc.get_objects())

    trace()  # its exports for this size stay in memory
    before = count()
    trace()
    assert count() == before
