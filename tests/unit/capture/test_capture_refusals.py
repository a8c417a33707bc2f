"""Models that capture refuses; each refusal names the place and the cure."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from capture_harness import Stages, check
from capture_models import captured
from torch import func, nn
from torch.autograd import grad

from hetpipe.capture import Captured
from hetpipe.capture.export import unsupported
from hetpipe.errors import CaptureError, HetpipeError

HERE = r"test_capture_refusals\.py:\d+"


class Model(nn.Module):
    """A linear layer, any function, and another linear layer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.function = function
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(x)))


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def _branch(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


def _hook(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda grad: grad * 2)
    return x


def _ctc(x: torch.Tensor) -> torch.Tensor:
    targets, lengths = torch.ones(1, 2).long(), (torch.tensor([4]), torch.tensor([2]))
    return x + F.ctc_loss(x[:, None].log_softmax(2), targets, *lengths)


def _nested(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor([x[:2], x[2:]]).to_padded_tensor(0.0)[0]


def _jagged(x: torch.Tensor) -> torch.Tensor:
    rows = torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged)
    return rows.to_padded_tensor(0.0)[0]


def _gradient(x: torch.Tensor) -> torch.Tensor:
    """Compute a gradient with `grad` inside the model."""
    (found,) = grad((x**2).sum(), x)
    return found


def _backward(x: torch.Tensor) -> torch.Tensor:
    z = x.detach().requires_grad_()
    (3 * z).sum().backward()
    assert z.grad is not None
    return x + z.grad


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3), torch.randint(0, 2, (4,))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_Double.apply, rf"_Double is a torch.autograd.Function.*custom_op.*{HERE}"),
        (_hook, rf"register_hook is lost.*{HERE}"),
        (_branch, rf"cannot be exported at .*{HERE}.*torch.where"),
        (lambda x: x @ torch.ones(3, 3), rf"model raised RuntimeError .* at .*{HERE}"),
        (lambda x: torch.tensor(x.tolist()), rf"{HERE}.*becomes a Python number"),
        (lambda x: x[x > 0].sum() + x, rf"{HERE} has a shape that depends on values"),
        (_ctc, rf"{HERE}.*the CTC loss reads the lengths .*custom_op"),
        (_nested, rf"{HERE}.*no nested tensors: pad"),
        (_jagged, rf"{HERE}.*no nested tensors: pad"),
        (_gradient, rf"gradient is computed inside the model.*formula.*{HERE}"),
        (_backward, rf"gradient is computed inside the model.*formula.*{HERE}"),
        (lambda x: func.grad(lambda z: (z**2).sum())(x), rf"gradient is computed.*{HERE}"),
        (lambda x: func.vmap(lambda z: z.sum())(x)[:, None] + x, None),
        (lambda x: x.detach(), None),
        (
            lambda x: x * torch.tensor([2.0, 3.0, 4.0, 5.0], dtype=torch.bfloat16).float(),
            r"uses a constant of torch.bfloat16, which numpy lacks: make it in float32",
        ),
    ],
)
def test_functions(function: Callable[[torch.Tensor], torch.Tensor], message: str | None) -> None:
    if message is None:
        Captured(Model(function), F.cross_entropy, _batch())  # the last layer still learns
        return
    with pytest.raises(CaptureError, match=message) as caught:
        Captured(Model(function), F.cross_entropy, _batch())
    assert "Traceback" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.BatchNorm1d(4, momentum=None), r"function \(BatchNorm1d\) has momentum=None.*0.1"),
        (
            nn.InstanceNorm1d(4, track_running_stats=True),
            r"function \(InstanceNorm1d\) has track_running_stats=True",
        ),
        (nn.Embedding(4, 4, sparse=True), r"function \(Embedding\) has sparse=True"),
    ],
)
def test_modules(module: nn.Module, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        Captured(Model(module), F.cross_entropy, _batch())


def test_sparse_embedding_function() -> None:
    def look_up(x: torch.Tensor) -> torch.Tensor:
        return F.embedding((x[:, 0] > 0).long(), table, sparse=True)

    table = torch.randn(2, 4)
    with pytest.raises(CaptureError, match=rf"sparse=True.*{HERE}.*sparse=False"):
        Captured(Model(look_up), F.cross_entropy, _batch())


def test_hooks_on_modules_and_parameters() -> None:
    model = Model(torch.relu)
    handle = model.first.register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match=r"first \(Linear\) has a backward hook"):
        Captured(model, F.cross_entropy, _batch())
    handle.remove()
    model.last.weight.register_hook(lambda grad: grad)
    with pytest.raises(CaptureError, match=r"parameter last.weight has a gradient hook"):
        Captured(model, F.cross_entropy, _batch())


def test_patches_are_undone() -> None:
    apply, hook = torch.autograd.Function.__dict__["apply"], torch.Tensor.register_hook
    with pytest.raises(CaptureError):
        Captured(Model(_branch), F.cross_entropy, _batch())
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert torch.Tensor.register_hook is hook
    x = torch.ones(2, requires_grad=True)
    _Double.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]


def test_a_batch_changed_in_place() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.add_(1))

    with pytest.raises(CaptureError, match=r"in place.*work on a copy"):
        Captured(Changes(), F.cross_entropy, _batch())


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda out, y: out.sum(1), r"the loss must be a 0-d tensor.*shape \(4,\)"),
        (lambda out, y: (out.sum(1), 4), r"sum must be a 0-d tensor"),
        (lambda out, y: 1.0, "the loss must be a 0-d tensor.*float"),
        (lambda out, y: F.cross_entropy(out.detach(), y), "no gradient of the loss reaches"),
        (lambda out, y: (out.argmax(1) == y).float().mean(), "no gradient of the loss reaches"),
    ],
)
def test_losses(loss_fn: Callable[..., Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        Captured(Model(torch.relu), loss_fn, _batch())


def test_a_model_without_trainable_parameters() -> None:
    model = Model(torch.relu).requires_grad_(False)
    with pytest.raises(CaptureError, match="no gradient of the loss reaches any trainable"):
        Captured(model, F.cross_entropy, _batch())


def test_an_example_without_batch_dimension() -> None:
    with pytest.raises(CaptureError, match=r"y of the example batch is 0-d"):
        Captured(Model(torch.relu), F.cross_entropy, (torch.randn(4, 3), torch.tensor(1)))
    with pytest.raises(HetpipeError, match="number of samples: x 4, y 3"):
        Captured(Model(torch.relu), F.cross_entropy, (torch.randn(4, 3), torch.zeros(3).long()))
    with pytest.raises(CaptureError, match="holds no tensor"):
        Captured(Model(torch.relu), F.cross_entropy, (3, None))


def test_half_precision_parameters() -> None:
    model, (x, y) = Model(torch.relu).to(torch.bfloat16), _batch()
    with pytest.raises(CaptureError, match=r"first.weight is .*bfloat16.*precision='bfloat16'"):
        Captured(model, F.cross_entropy, (x, y))
    with pytest.raises(CaptureError, match=r"x of the batch is .*bfloat16.*batch and model with"):
        Captured(model, F.cross_entropy, (x.bfloat16(), y))


@pytest.mark.parametrize("cuts", [[0], [3], [2, 1], [1, 1], [-1]])
def test_cuts(cuts: list[int]) -> None:
    with pytest.raises(CaptureError, match="strictly, and each must be above 0 and below 3"):
        captured("mlp").stage_graphs(cuts, [{}] * (len(cuts) + 1), [4], None)


def test_one_table_per_stage() -> None:
    with pytest.raises(CaptureError, match="1 decomposition tables for 2 stages"):
        captured("mlp").stage_graphs([1], [{}], [4], None)


def test_leaves_of_other_batches() -> None:
    model = captured("masked")
    values, mask = torch.randn(5, 6).double(), torch.ones(5, 6).long()
    good = {"values": values, "mask": mask}
    label = {"label": torch.zeros(5).long()}
    leaves = model.leaves(good, label)
    assert list(leaves) == ["x.values", "x.mask", "y.label"]
    assert all(isinstance(leaf, np.ndarray) for leaf in leaves.values())
    assert leaves["x.values"].flags.c_contiguous
    for x, y, message in (
        ({"values": values}, label, "holds x.values, y.label, but .*held x.values, x.mask"),
        ({"values": values[:, :5], "mask": mask}, label, r"shape \(5, 5\).*\(12, 6\).*buckets"),
        ({"values": values.float(), "mask": mask}, label, "x.values is float32, but float64"),
        ({"values": values[:4], "mask": mask}, label, "x.values 4, x.mask 5, y.label 5"),
        ({"values": [1.0], "mask": mask}, label, "holds"),
        (good, {"label": 3}, "y.label is a int, but a tensor in the example batch"),
        ({k: v[:0] for k, v in good.items()}, {"label": label["label"][:0]}, "no samples"),
    ):
        with pytest.raises(HetpipeError, match=message):
            model.leaves(x, y)


def test_a_custom_operator_keeps_its_derivative() -> None:
    """The operator that the refusal of autograd.Function recommends gives exact gradients."""

    @torch.library.custom_op("hetpipe_tests::triple", mutates_args=())
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    triple.register_fake(torch.empty_like)
    triple.register_autograd(lambda ctx, grad: grad * 5)
    batch = _batch()
    model = Model(triple)
    got = Captured(model, F.cross_entropy, batch)
    graphs = got.stage_graphs([1], [{}, {}], [4], None)
    check((model, F.cross_entropy, batch), got, graphs, [4])


def test_a_ctc_loss_in_custom_operators() -> None:
    """The operators that the refusal of the CTC loss recommends give exact gradients."""

    def lengths(rows: torch.Tensor) -> tuple[list[int], list[int]]:
        return [rows.shape[1]] * len(rows), [2] * len(rows)

    @torch.library.custom_op("hetpipe_tests::ctc", mutates_args=())
    def ctc(rows: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.aten._ctc_loss(rows.transpose(0, 1), targets, *lengths(rows))

    @torch.library.custom_op("hetpipe_tests::ctc_backward", mutates_args=())
    def gradient(
        scale: torch.Tensor,
        rows: torch.Tensor,
        targets: torch.Tensor,
        losses: torch.Tensor,
        alphas: torch.Tensor,
    ) -> torch.Tensor:
        own = rows.transpose(0, 1), targets, *lengths(rows)
        result = torch.ops.aten._ctc_loss_backward(scale, *own, losses, alphas, 0)
        return result.transpose(0, 1).contiguous()

    ctc.register_fake(lambda x, y: (x.new_empty(len(x)), x.new_empty(len(x), x.shape[1], 5)))
    gradient.register_fake(lambda scale, x, *rest: torch.empty_like(x))
    ctc.register_autograd(
        lambda ctx, scale, _: (gradient(scale, *ctx.saved_tensors), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
    )

    def plain(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        whole = (torch.full((len(rows),), length) for length in (rows.shape[1], 2))
        return F.ctc_loss(rows.transpose(0, 1), targets, *whole)

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.LogSoftmax(2))
    batch = torch.randn(4, 6, 3), torch.tensor([[1, 2], [3, 1], [2, 4], [4, 4]])
    got = Captured(model, lambda rows, targets: (ctc(rows, targets)[0] / 2).mean(), batch)
    check((model, plain, batch), got, got.stage_graphs([1], [{}, {}], [4], None), [4])


def test_modes_are_restored() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    model.eval()
    model[1].train()
    Captured(model, F.cross_entropy, _batch())
    assert [module.training for module in model.modules()] == [False, False, True, False]


def _assigned(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 0] = x[:, 1] * 2
    y[:, 1] += 1
    return y


@pytest.mark.parametrize(
    "function",
    [
        _assigned,
        lambda x: x.std(1, keepdim=True) * x,  # its derivative works in place
        lambda x: x.t().contiguous().as_strided((4, 4), (1, 4)),
        lambda x: x.unflatten(1, (2, 2)).transpose(1, 2).flatten(1),
        lambda x: x[:, torch.tensor([3, 0, 0, 1])],
        lambda x: torch.roll(x, 1, 1).cumsum(1).sort(1)[0],
    ],
)
def test_awkward_operators_are_exact(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 3).double(), torch.randint(0, 2, (4,))
    model = Model(function).double()
    got = Captured(model, F.cross_entropy, batch)
    for cuts in ([], [1]):
        graphs = got.stage_graphs(cuts, [{}] * (len(cuts) + 1), [4], None)
        check((model, F.cross_entropy, batch), got, graphs, [4])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (torch.tanh, "not an nn.Module: write a module whose forward calls it"),
        (nn.LazyLinear(2), "weight has no shape yet.*call the model once"),
        (nn.Linear(3, 2, device="meta"), "meta device; give its parameters values"),
        (nn.Linear(3, 2, dtype=torch.complex64), "parameter weight is torch.complex64"),
    ],
)
def test_models_without_usable_parameters(model: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        Captured(model, F.cross_entropy, _batch())


def test_a_refusal_prints_no_graph(capfd: pytest.CaptureFixture[str]) -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        print("the user's own words", file=sys.stderr)
        return _branch(x)

    with pytest.raises(CaptureError, match=r"torch\.where"):
        Captured(Model(branch), F.cross_entropy, _batch())
    printed = capfd.readouterr().err
    assert "the user's own words" in printed
    assert "torch.ops" not in printed


class Masked(nn.Module):
    """A model that writes to the places of a mask with the function `write`."""

    def __init__(self, write: Callable[[Any, torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.vector, self.write = nn.Parameter(torch.randn(4)), write
        self.row = nn.Parameter(torch.randn(1, 4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x)).clone()
        self.write(self, h, mask)
        return self.last(torch.tanh(h)).mean(1)


def _vector(model: Any, h: torch.Tensor, mask: torch.Tensor) -> None:
    h[mask] = model.vector


def _row(model: Any, h: torch.Tensor, mask: torch.Tensor) -> None:
    h[mask] = model.row


def _each(model: Any, h: torch.Tensor, mask: torch.Tensor) -> None:
    h[h > 0] = model.vector[0]


@pytest.mark.parametrize("write", [_vector, _row, _each])
def test_one_value_at_masked_places(write: Callable[..., None]) -> None:
    torch.manual_seed(0)
    model = Masked(write)
    x, y = (torch.randn(4, 5, 3), torch.rand(4, 5) < 0.4), torch.randint(0, 2, (4,))
    loss = F.cross_entropy(model(*x), y)
    loss.backward()
    found = Captured(model, F.cross_entropy, (x, y))
    stages = Stages(found, found.stage_graphs([1], [{}, {}], [4], None))
    gradients = {k: v for stage in stages.step((x, y), [4], [1.0]) for k, v in stage.items()}
    assert stages.loss == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad)


def _rising(model: Any, h: torch.Tensor, mask: torch.Tensor) -> None:
    h[mask] = torch.ones(4, 4).cumsum(0)


def _routed(model: Any, h: torch.Tensor, mask: torch.Tensor) -> None:
    h[mask] = torch.tanh(h[mask])  # the number of rows depends on values


@pytest.mark.parametrize("write", [_rising, _routed])
def test_another_value_at_each_masked_place_is_refused(write: Callable[..., None]) -> None:
    x, y = (torch.randn(4, 1, 3), torch.ones(4, 1).bool()), torch.randint(0, 2, (4,))
    with pytest.raises(CaptureError, match=rf"different value for each place.*torch.where|{HERE}"):
        Captured(Masked(write), F.cross_entropy, (x, y))


def test_a_complex_buffer_is_a_constant() -> None:
    class Rotated(nn.Module):
        def __init__(self, angle: float) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
            self.register_buffer("turn", torch.polar(torch.ones(2), angle * torch.arange(2.0)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex(self.first(x).reshape(-1, 2, 2))
            return self.last(torch.view_as_real(pairs * self.turn).flatten(1))

    x, y = _batch()
    for angle in (1.0, 2.0):  # a second model with other values gives another loss
        model = Rotated(angle)
        found = Captured(model, F.cross_entropy, (x, y))
        stages = Stages(found, found.stage_graphs([1], [{}, {}], [4], None))
        stages.step((x, y), [4], [1.0])
        assert stages.loss == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-6)


def test_a_folders_name_gives_no_advice() -> None:
    line = " at /home/nested/model.py:3 (y = scale(x))"
    assert unsupported._advice(ValueError("boom"), line) == ""
    assert "pad rows" in unsupported._advice(ValueError("boom"), f"{line[:-12]}torch.nested.x)")
