"""Backward programs that repeat their forward, in part or as a whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_harness import TABLES, Stages, check, compare, eager, even_cuts, total
from capture_models import CASES, Dropout, captured, make
from torch import fx, nn

from hetpipe.capture import Captured
from hetpipe.capture.passes.partition import COSTLY, INPUTS, MIN_CUT, MODES, NONE, minimum_cut
from hetpipe.capture.program import BUFFER, CUT, INPUT, SAVED, PassPrograms
from hetpipe.errors import CaptureError

SIZES = [8, 4]
PLANS = [(1, "core", INPUTS), (3, "aten", INPUTS), (2, "aten", MIN_CUT), (3, "core", MIN_CUT)]
AGAIN = (INPUTS, MIN_CUT)


def _passes(
    name: str, mode: str, stages: int = 1, table: str = "aten", samples: int = 8
) -> list[PassPrograms]:
    model = captured(name)
    cuts = even_cuts(model, stages)
    count = len(cuts) + 1
    graphs = model.stage_graphs(cuts, [TABLES[table]] * count, [samples], None, [mode] * count)
    return [graph.passes[samples] for graph in graphs]


def _roles(passes: PassPrograms, role: str) -> set[str]:
    assert passes.backward is not None
    return {slot.name for slot in passes.backward.inputs if slot.role == role}


@pytest.mark.wide
@pytest.mark.parametrize(("stages", "table", "mode"), PLANS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_eager(name: str, stages: int, table: str, mode: str) -> None:
    """Losses, counts and running statistics agree too, and the statistics change once."""
    model = captured(name)
    cuts = even_cuts(model, stages)
    count = len(cuts) + 1
    graphs = model.stage_graphs(cuts, [TABLES[table]] * count, SIZES, None, [mode] * count)
    check(make(name), model, graphs, SIZES)


@pytest.mark.wide
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", CASES)
def test_only_stage_inputs_are_kept(name: str, table: str) -> None:
    for passes in _passes(name, INPUTS, 2, table):
        assert _roles(passes, SAVED) == set()
        assert all(slot.role != SAVED for slot in passes.forward.outputs)
        for role in (INPUT, CUT):
            entering = {slot.name for slot in passes.forward.inputs if slot.role == role}
            assert _roles(passes, role) <= entering


@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
def test_a_minimum_cut_repeats_nothing_costly(name: str) -> None:
    for none, cut in zip(_passes(name, NONE, 2), _passes(name, MIN_CUT, 2), strict=True):
        assert none.backward is not None
        assert cut.backward is not None
        assert _costly(cut.backward.graph) == _costly(none.backward.graph)
        assert cut.saved_nbytes <= none.saved_nbytes


def _costly(graph: fx.GraphModule) -> int:
    return sum(node.target in COSTLY for node in graph.graph.nodes)


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", ["gpt2", "attention"])
def test_each_mode_of_recomputing_saves_less_than_the_one_before(name: str, table: str) -> None:
    sizes = {mode: sum(p.saved_nbytes for p in _passes(name, mode, 2, table)) for mode in MODES}
    assert sizes[INPUTS] < sizes[MIN_CUT] < sizes[NONE]


@pytest.mark.parametrize("mode", AGAIN)
def test_recomputed_masks_are_the_same(mode: str) -> None:
    torch.manual_seed(0)
    batch = torch.randn(12, 6).double(), torch.randint(0, 4, (12,))
    model = Captured(Dropout().double(), F.cross_entropy, batch)
    found = []
    for modes in ([NONE, NONE], [mode, NONE], [NONE, mode], [mode, mode]):
        graphs = model.stage_graphs([1], [TABLES["core"]] * 2, SIZES, None, modes)
        state = Stages(model, graphs)
        found.append((total(state.step(batch, SIZES, [1.0, 1.0], step=3)), state.loss))
    for gradients, loss in found[1:]:
        assert loss == found[0][1]
        for name, value in gradients.items():
            compare(value, found[0][0][name], name)


class _Norms(nn.Module):
    """torch's batch norm, and a norm whose gradient reads its running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 4)
        self.register_buffer("centre", torch.linspace(-1, 1, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        old = self.centre.clone()
        self.centre.copy_(0.9 * old + 0.1 * x.detach().mean(0))
        return self.second(x.square() * old)


@pytest.mark.wide
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("mode", MODES)
def test_a_backward_reads_the_statistics_of_its_own_forward(mode: str, table: str) -> None:
    torch.manual_seed(0)
    case = _Norms().double(), F.cross_entropy, (torch.randn(12, 6).double(), torch.arange(12) % 4)
    model = Captured(*case)
    graphs = model.stage_graphs([1], [TABLES[table]] * 2, SIZES, None, [mode, mode])
    check(case, model, graphs, SIZES)
    for graph in graphs:
        assert graph.passes[8].backward is not None
        read = _roles(graph.passes[8], BUFFER)
        assert read == set(), "a backward would read statistics of a later forward"


@pytest.mark.parametrize("name", ["mlp", "residual", "attention"])
def test_recomputation_uses_the_parameters_given_to_the_backward(name: str) -> None:
    """The result is as if both passes had used the newer parameters."""
    model, loss_fn, batch = make(name)
    got = captured(name)
    state = Stages(got, got.stage_graphs([], [{}], [12], None, [INPUTS]))
    newer = {key: value * 1.25 for key, value in state.params.items()}
    leaves = {key: torch.from_numpy(value) for key, value in got.leaves(*batch).items()}
    rows: Any = {(INPUT, key): value for key, value in leaves.items()}
    kept = state._forward(rows, 12, 1.0)
    state.params = newer
    gradients: list[dict[str, torch.Tensor]] = [{}]
    state._backward(kept, rows, 12, 1.0, gradients)
    model.load_state_dict(newer, strict=False)
    _, _, expected = eager(model, loss_fn, batch, [12], [1.0])
    assert gradients[0].keys() == expected.keys()
    for key, value in expected.items():
        compare(gradients[0][key], value, key)


@pytest.mark.slow
def test_modes_are_per_stage() -> None:
    model = captured("gpt2")
    cuts = even_cuts(model, 3)
    graphs = model.stage_graphs(cuts, [{}] * 3, SIZES, None, MODES)
    plain = model.stage_graphs(cuts, [{}] * 3, SIZES, None)
    check(make("gpt2"), model, graphs, SIZES)
    assert graphs[0].passes[8].saved_nbytes == plain[0].passes[8].saved_nbytes
    assert graphs[1].passes[8].saved_nbytes < plain[1].passes[8].saved_nbytes
    assert graphs[2].passes[8].saved_nbytes < plain[2].passes[8].saved_nbytes


@pytest.mark.parametrize(
    ("modes", "message"),
    [([NONE], "1 recompute modes for 2 stages"), ([NONE, "all"], "'all' is not known.*min-cut")],
)
def test_wrong_modes_are_refused(modes: list[str], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        captured("mlp").stage_graphs([1], [{}, {}], [4], None, modes)


def test_the_cut_is_minimal() -> None:
    """Compare with every set of nodes, on random graphs of unary and binary operators."""
    generator = torch.Generator().manual_seed(0)

    def pick(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    for _ in range(40):
        graph = fx.Graph()
        nodes: list[fx.Node] = []
        for index in range(9):
            if index < 2:
                node = graph.placeholder(f"x{index}")
            else:
                costly = pick(4) == 0
                target = torch.ops.aten.mm.default if costly else torch.ops.aten.add.Tensor
                node = graph.call_function(target, (nodes[pick(index)], nodes[pick(index)]))
            node.meta["val"] = torch.empty(1 + pick(9), dtype=torch.int8, device="meta")
            nodes.append(node)
        graph.output(())
        inputs, wanted = set(nodes[:2]), set(nodes[5:]) & {nodes[5 + pick(4)], nodes[5 + pick(4)]}
        cut = minimum_cut(inputs, wanted, set(nodes))
        best = min(
            _nbytes(kept)
            for size in range(len(nodes) + 1)
            for kept in itertools.combinations(nodes, size)
            if _suffices(set(kept), wanted)
        )
        assert _suffices(set(cut), wanted)
        assert _nbytes(cut) == best


def _nbytes(nodes: Any) -> int:
    return sum(node.meta["val"].numel() for node in nodes)


def _suffices(kept: set[fx.Node], wanted: set[fx.Node]) -> bool:
    def known(node: fx.Node) -> bool:
        if node in kept:
            return True
        cheap = node.op == "call_function" and node.target not in COSTLY
        return cheap and all(known(source) for source in node.all_input_nodes)

    return all(known(node) for node in wanted)
