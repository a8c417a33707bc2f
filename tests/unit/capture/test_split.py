"""Layers split by output channels: records, graphs compared with autograd, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from capture_harness import TABLES, Stages, compare, eager, total
from models import CASES
from torch import nn

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.capture.passes.split_layers import SplitParameters
from hetpipe.capture.passes.update_programs import check_elementwise
from hetpipe.capture.precision import Precision
from hetpipe.checkpoint.tensors import Outline, Tensors
from hetpipe.errors import HetpipeError, PlanError
from hetpipe.pipeline.present import split
from hetpipe.plan.plan import Plan, Split, StagePlan, splits_of

PLAN = Plan(
    model="toy",
    layers=("a", "b[:3]", "b[3:]"),
    stages=(
        StagePlan(0, 2, ("m0",), 2, 0.1, 0.2, 0.0, 1, 2),
        StagePlan(2, 3, ("m1",), 1, 0.1, 0.2, 0.0, 1, 2),
    ),
    schedule="1f1b",
    mini_batch=8,
    microbatches=4,
    step_s=1.0,
    cut_nbytes=(64,),
    label="measured",
    origin="user",
    splits=(Split("b", 3),),
)


class Net(nn.Module):
    """Modules in sequence, then the mean over all dimensions except samples and channels."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*modules)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        while x.ndim > 2:
            x = x.mean(-1) if x.shape[1] == 5 else x.mean(1)
        return self.head(x)


def task(model: nn.Module, *shape: int) -> tuple[nn.Module, Any, Any]:
    """Return the model, a loss function and a batch of 4 samples with this shape."""
    return model, F.cross_entropy, (torch.randn(4, *shape), torch.randint(0, 3, (4,)))


def case(name: str) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 5, 3, stride=2, padding=1, dilation=2)
    bodies = {
        "linear": (Net(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5), nn.ReLU()), (6,)),
        "no bias": (Net(nn.Linear(6, 4), nn.Linear(4, 5, bias=False)), (6,)),
        "sequences": (Net(nn.Linear(6, 4), nn.Linear(4, 5), nn.GELU()), (7, 6)),
        "conv1d": (Net(nn.Conv1d(2, 4, 3), nn.Conv1d(4, 5, 3, padding="same")), (2, 9)),
        "conv2d": (Net(nn.Conv2d(2, 4, 3), conv, nn.ReLU(), nn.MaxPool2d(2)), (2, 12, 12)),
        "batch norm": (Net(nn.Conv2d(2, 4, 1), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5)), (2, 6, 6)),
    }
    model, shape = bodies[name]
    return task(model, *shape)


NAMES = ["linear", "no bias", "sequences", "conv1d", "conv2d", "batch norm"]


def last(model: nn.Module) -> str:
    """Return the name of the last layer before the head."""
    return [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d))
            and n != "head"][-1]  # fmt: skip


def arrays(values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: value.numpy() for name, value in values.items()}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_autograd_with_a_cut_inside_the_layer(name: str, table: str) -> None:
    model, loss_fn, batch = case(name)
    layer = last(model)
    captured = Captured(model, loss_fn, batch, split={layer: 2})
    cut = captured.layer_names.index(f"{layer}[2:]")
    graphs = captured.stage_graphs([cut], [TABLES[table]] * 2, [2], None)
    state = Stages(captured, graphs)
    parts = captured.parts.split(captured.parameters)
    state.params = {name: torch.from_numpy(value.copy()) for name, value in parts.items()}
    gradients = captured.parts.join(arrays(total(state.step(batch, [2, 2], [0.5, 0.5]))))
    loss, _, expected = eager(model, loss_fn, batch, [2, 2], [0.5, 0.5])
    assert state.loss == pytest.approx(loss, rel=2e-6)
    assert gradients.keys() == expected.keys()
    for each, value in expected.items():
        compare(torch.from_numpy(gradients[each]), value, each)
    assert [f"{layer}.weight[:2]" in graph.parameters for graph in graphs] == [True, False]
    assert [f"{layer}.weight[2:]" in graph.parameters for graph in graphs] == [False, True]


@pytest.mark.parametrize("name", NAMES)
def test_the_layer_is_two_layers(name: str) -> None:
    model, loss_fn, batch = case(name)
    layer = last(model)
    whole = Captured(model, loss_fn, batch).layer_graph(4)
    split = Captured(model, loss_fn, batch, split={layer: 2}).layer_graph(4)
    index = [each.name for each in whole.layers].index(layer)
    assert len(split) == len(whole) + 1
    first, rest = split.layers[index : index + 2]
    assert (first.name, rest.name) == (f"{layer}[:2]", f"{layer}[2:]")
    assert first.params_nbytes == 2 * row_nbytes(model, layer)
    assert first.params_nbytes + rest.params_nbytes == whole.layers[index].params_nbytes
    assert split.layers[index + 2 :] == tuple(
        replace(each, index=each.index + 1) for each in whole.layers[index + 1 :]
    )
    assert split.cut_nbytes[:index] + split.cut_nbytes[index + 1 :] == whole.cut_nbytes


def row_nbytes(model: nn.Module, layer: str) -> int:
    module = model.get_submodule(layer)
    return sum(4 * p[0].numel() for p in module.parameters())


def test_a_cut_inside_carries_the_input_and_the_partial_output() -> None:
    model, loss_fn, batch = case("sequences")
    graph = Captured(model, loss_fn, batch, split={"body.1": 2}).layer_graph(4)
    assert graph.cut_nbytes[1] == 4 * 7 * (4 + 2) * 4  # samples, positions, widths, bytes


def test_several_layers_under_autocast() -> None:
    model, loss_fn, batch = case("conv2d")
    split = {"body.0": 1, "head": 2}
    captured = Captured(model, loss_fn, batch, Precision("bfloat16"), split=split)
    names = ("body.0[:1]", "body.0[1:]", "body.1", "head[:2]", "head[2:]")
    assert captured.layer_names == names
    assert captured.parts.rows == {
        "body.0.weight": 1, "body.0.bias": 1, "head.weight": 2, "head.bias": 2,
    }  # fmt: skip
    graphs = captured.stage_graphs([1, 2, 3, 4], [{}] * 5, [4], None)
    assert [list(graph.parameters) for graph in graphs[:2]] == [
        ["body.0.weight[:1]", "body.0.bias[:1]"], ["body.0.weight[1:]", "body.0.bias[1:]"],
    ]  # fmt: skip


def test_a_frozen_weight_stays_frozen() -> None:
    model, loss_fn, batch = case("linear")
    model.get_parameter("body.2.weight").requires_grad_(False)
    graphs = Captured(model, loss_fn, batch, split={"body.2": 2}).stage_graphs(
        [2], [{}] * 2, [4], hp.optim.sgd(lr=0.1)
    )
    updated = {s.name for g in graphs if g.update for s in g.update.outputs if s.role == "param"}
    assert updated == {
        "body.0.weight", "body.0.bias", "body.2.bias[:2]", "body.2.bias[2:]", "head.weight",
        "head.bias",
    }  # fmt: skip


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 5)
        self.rnn = nn.LSTM(5, 5, batch_first=True)
        self.grouped = nn.Conv1d(4, 8, 1, groups=4)
        self.deep = nn.Conv3d(1, 2, 1)
        self.up = nn.ConvTranspose1d(8, 4, 1)
        self.table = nn.Embedding(9, 5)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.rnn(self.lin(self.table(x)))
        x = self.up(self.grouped(x))
        x = self.deep(x[:, None, None]).mean((1, 2))
        return self.normed(self.lin(x)).mean(1)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"rn": 2}, r"no layer 'rn'; did you mean rnn"),
        ({"lin": 2}, r"lin cannot be split: its parameter lin.weight is read 2 times, not once"),
        ({"lin#2": 2}, r"lin#2 cannot be split: its parameter lin.weight is read 2 times"),
        ({"rnn": 2}, r"rnn computes .*lstm.* with rnn.weight_ih_l0, rnn.weight_hh_l0; only a"),
        ({"grouped": 4}, r"grouped is a convolution of 4 groups; name layers of 1 group only"),
        ({"deep": 1}, r"deep computes aten.conv3d.default with deep.weight; only a layer"),
        ({"up": 2}, r"up computes aten.conv_transpose1d.default with up.weight; only a layer"),
        ({"table": 2}, r"table computes aten.embedding.default with table.weight; only a layer"),
        ({"normed": 2}, r"normed computes aten._weight_norm.default with normed\.param"),
        ({"deep": 1, "none of these": 1}, r"'none of these'; known: table, lin, rnn, gr"),
    ],
)
def test_layers_that_cannot_be_split_are_refused(split: dict[str, int], message: str) -> None:
    torch.manual_seed(0)
    example = torch.randint(0, 9, (6, 4)), torch.randint(0, 5, (6,))
    with pytest.raises(PlanError, match=message):
        Captured(Twice(), F.cross_entropy, example, split=split)


def test_channels_outside_the_layer_are_refused() -> None:
    model, loss_fn, batch = case("linear")
    with pytest.raises(PlanError, match=r"body.2 has 5 output channels.* 1 to 4, not 5"):
        Captured(model, loss_fn, batch, split={"body.2": 5})


def test_a_weight_of_several_names_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    tied = CASES["tied_autoencoder"]
    with pytest.raises(PlanError, match=r"its parameter encode.weight has several names"):
        Captured(tied.model(), tied.loss_fn, tied.batch(generator), split={"encode": 4})


RULES = {
    "sgd": hp.optim.sgd(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": hp.optim.adam(weight_decay=0.1),
    "adamw": hp.optim.adamw(),
    "amsgrad": hp.optim.adam(amsgrad=True, maximize=True),
    "nadam": hp.optim.nadam(weight_decay=0.1),
    "adamax": hp.optim.adamax(),
    "rmsprop": hp.optim.rmsprop(momentum=0.9, centered=True),
    "adagrad": hp.optim.adagrad(weight_decay=0.1),
    "adadelta": hp.optim.adadelta(),
    "lion": hp.optim.lion(weight_decay=0.1),
    "multi-step": hp.optim.multi_step(hp.optim.adamw()),
}


@pytest.mark.parametrize("name", RULES)
def test_elementwise_optimizers_are_accepted(name: str) -> None:
    check_elementwise(RULES[name], {"w": 3}, {"w": np.zeros((7, 4))})


def relative_to(size: Any) -> Any:
    def update(param: Any, grad: Any, state: Any, step: Any, lr: Any) -> Any:
        return param - lr * grad / size(param), state

    return replace(hp.optim.sgd(lr=0.1), name="own", update=update)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (hp.optim.lamb(), r"lamb has aten.sum.default, but .* the first 3 of 7 rows of w"),
        (relative_to(lambda p: p.numel()), r"update of own depends on its shape"),
        (relative_to(lambda p: p.flatten()[0]), r"update of own has aten.view.default"),
    ],
)
def test_optimizers_that_see_whole_tensors_are_refused(rule: Any, message: str) -> None:
    with pytest.raises(HetpipeError, match=message):
        check_elementwise(rule, {"w": 3}, {"w": np.zeros((7, 4))})


def test_a_part_decays_if_its_whole_parameter_decays() -> None:
    parts = SplitParameters({"a.weight": 2, "a.bias": 2})
    rules = parts.rules(hp.optim.adamw(decay_exclude=lambda name: name.endswith("bias")))
    names = ("a.weight[:2]", "a.weight[2:]", "a.bias[:2]", "a.bias[2:]", "b.bias", "b.weight")
    assert [rules.rule_for(name) is rules for name in names] == [
        True, True, False, False, False, True,
    ]  # fmt: skip


def test_values_are_split_and_joined_by_name() -> None:
    parts = SplitParameters({"a.weight": 2})
    values = {
        "a.weight": np.arange(15.0).reshape(5, 3),
        "mean/a.weight": np.arange(15.0).reshape(5, 3) + 1,
        "a.bias": np.arange(5.0),
        "mean/b/c": np.zeros(1),
    }
    split = parts.split(values)
    assert list(split) == [
        "a.weight[:2]", "a.weight[2:]", "mean/a.weight[:2]", "mean/a.weight[2:]", "a.bias",
        "mean/b/c",
    ]  # fmt: skip
    assert np.array_equal(split["mean/a.weight[2:]"], values["mean/a.weight"][2:])
    joined = parts.join(dict(reversed(split.items())))
    assert joined.keys() == values.keys()
    for name, value in values.items():
        assert np.array_equal(joined[name], value)


def test_a_plan_keeps_its_splits() -> None:
    document = json.loads(json.dumps(PLAN.to_json()))
    assert Plan.from_json(document) == PLAN
    before = {key: value for key, value in document.items() if key != "splits"}
    assert Plan.from_json({**before, "version": 4}) == replace(PLAN, splits=())


def test_a_plan_whose_splits_differ_from_its_layers_is_refused() -> None:
    document = json.loads(json.dumps(PLAN.to_json()))
    with pytest.raises(PlanError, match=r"plan's 3 layers have no neighbours b\[:2\] and b\[2:\]"):
        Plan.from_json({**document, "splits": [{"layer": "b", "channels": 2}]})
    with pytest.raises(PlanError, match=r"splits\.0\.channels is 0"):
        Plan.from_json({**document, "splits": [{"layer": "b", "channels": 0}]})


@pytest.mark.parametrize("value", [{"b": 0}, {"b": True}, {"b": 2.0}, {3: 2}, ["b"], "b"])
def test_a_split_option_of_a_wrong_type_is_refused(value: Any) -> None:
    with pytest.raises(PlanError, match=r"split=.*: give "):
        splits_of(value)


def test_a_tensor_is_read_once_for_both_parts() -> None:
    read: list[str] = []

    def each(names: Sequence[str]) -> Iterator[Any]:
        for name in names:
            read.append(name)
            yield np.arange(6.0).reshape(3, 2)

    outline = Outline((3, 2), np.dtype(float))
    whole = Tensors({"a.weight": outline, "m/a.weight": outline, "b": outline}, each)
    parts = split(whole, SplitParameters({"a.weight": 2}))
    names = ["a.weight[:2]", "b", "m/a.weight[:2]", "a.weight[2:]", "m/a.weight[2:]"]
    values = [parts[name] for name in names]
    assert read == ["a.weight", "b", "m/a.weight"]
    assert [len(value) for value in values] == [2, 3, 2, 1, 1]
    assert np.array_equal(values[3], [[4.0, 5.0]])
