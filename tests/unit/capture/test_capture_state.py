"""State and randomness in a forward, which an export would freeze: refused by name, or kept
right."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import time
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from capture_harness import Stages
from torch import nn

from hetpipe.capture import Captured
from hetpipe.errors import CaptureError

HERE = r"test_capture_state\.py:\d+"
NUMBERS = np.random.default_rng(0)
COUNT = itertools.count(1)
GENERATOR = torch.Generator()
OUTSIDE = nn.Parameter(torch.ones(4))
STORED: dict[str, Any] = {}
GRID: torch.Tensor | None = None


class Tables:
    """Places where code may store computed tensors."""

    known: ClassVar[dict[int, torch.Tensor]] = {}

    def __init__(self) -> None:
        self.grid: torch.Tensor | None = None


OBJECT = Tables()


class Model(nn.Module):
    """A linear layer, a function of the model, and another linear layer."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("empty", None, persistent=False)
        self.function = function
        self.h = torch.zeros(4)
        self.items: list[Any] = [torch.zeros(4)]
        self.state: dict[str, Any] = {"step": 0}
        self.seen: set[int] = set()
        self.calls, self.far, self.mask, self.chance = 0, 1.0, None, random.Random(0)
        self.weight = torch.ones(4, requires_grad=True)
        self.tables = Tables()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self, self.first(x)))


def attribute(model: Any, h: torch.Tensor) -> torch.Tensor:
    model.h = 0.5 * model.h + h.detach().mean(0)
    return h - model.h


def item(model: Any, h: torch.Tensor) -> torch.Tensor:
    model.items[0] = 0.5 * model.items[0] + h.detach().mean(0)
    return h - model.items[0]


def in_place(model: Any, h: torch.Tensor) -> torch.Tensor:
    model.h.add_(1)
    return h - model.h


def constant(model: Any, h: torch.Tensor) -> torch.Tensor:
    model.h = model.h + 1  # independent of the input, yet a new tensor in each call
    return h - model.h


def counter(model: Any, h: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return h * min(1.0, model.calls / 4)


def late_counter(model: Any, h: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return h * 2 if model.calls > 1000 else h


def counter_in_a_dict(model: Any, h: torch.Tensor) -> torch.Tensor:
    model.state["step"] += 1
    return h * model.state["step"]


def first_batch(model: Any, h: torch.Tensor) -> torch.Tensor:
    if model.mask is None:
        model.mask = h.detach().mean(0)
    return h - model.mask


def kept_draw(draw: Callable[[], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """Return a function that draws a mask in its first call, and keeps it."""

    def function(model: Any, h: torch.Tensor) -> torch.Tensor:
        if model.mask is None:
            model.mask = draw()
        return h * model.mask

    return function


def global_counter(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h * next(COUNT)


def global_tensor(model: Any, h: torch.Tensor) -> torch.Tensor:
    last, STORED["h"] = STORED.get("h", h), h.detach()
    return h - last.mean(0)


def python_chance(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h * 0 if random.random() < 1e-9 else h


def numpy_chance(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h * torch.tensor((np.random.rand(4) < 1e-9) * 2.0, dtype=h.dtype)


def numpy_tensor(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h * torch.from_numpy(NUMBERS.random(4, dtype=np.float32))


def own_chance(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h * 2 if model.chance.random() < 1e-9 else h


def clock(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h * time.perf_counter()


def computed_on_values(model: Any, h: torch.Tensor) -> torch.Tensor:
    model.calls += int(torch.tensor(1))  # needs values, so a rehearsal without values fails
    return h * model.calls


def own_generator(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h * torch.rand(h.shape, generator=GENERATOR)


def outside(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h * OUTSIDE


def unregistered(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h * model.weight


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3), torch.randint(0, 2, (4,))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (attribute, rf"reads the attribute h \(Model\) at .*{HERE}.*register_buffer"),
        (item, rf"reads the attribute items\[0\] \(Model\) at .*{HERE}"),
        (in_place, rf"attribute h \(Model\) is changed in place at .*{HERE}.*register_buffer"),
        (constant, rf"reads the attribute h \(Model\) at .*{HERE}"),
        (counter, rf"differ at .*{HERE}; calls change calls \(Model\)"),
        (late_counter, r"depends on the attribute calls \(Model\), which every call changes"),
        (counter_in_a_dict, rf"differ at .*{HERE}; calls change state\['step'\] \(Model\)"),
        (first_batch, rf"reads the attribute mask \(Model\) at .*{HERE}"),
        (global_counter, rf"differ at .*{HERE}"),
        (global_tensor, rf"reads a tensor at .*{HERE}, which an earlier call set"),
        (python_chance, rf"draws numbers from random at .*{HERE}.*torch.rand"),
        (numpy_chance, rf"draws numbers from numpy.random at .*{HERE}"),
        (numpy_tensor, rf"draws numbers from NUMBERS at .*{HERE}"),
        (own_chance, rf"draws numbers from chance at .*{HERE}"),
        (clock, rf"differ at .*{HERE}"),
        (computed_on_values, rf"differ at .*{HERE}; calls change calls"),
        (outside, rf"a tensor of shape \(4,\) requires a gradient at .*{HERE}.*nn.Parameter"),
        (unregistered, r"a tensor weight \(Model\) of shape \(4,\) requires a gradient"),
    ],
)
def test_state_is_refused(
    function: Callable[[Any, torch.Tensor], torch.Tensor], message: str
) -> None:
    """Check the first start, and a second one that could find a stored capture."""
    states = random.getstate(), np.random.get_state()[1].tolist(), NUMBERS.bit_generator.state
    for _ in range(2):
        with pytest.raises(CaptureError, match=message):
            Captured(Model(function), F.cross_entropy, _batch())
    assert states[0] == random.getstate()
    assert states[1] == np.random.get_state()[1].tolist()
    assert states[2] == NUMBERS.bit_generator.state
    assert STORED == {}


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(4),
    "uniform": lambda: torch.empty(4).uniform_(),
    "normal": lambda: torch.zeros(4).normal_(),
    "bernoulli": lambda: torch.zeros(4).bernoulli_(0.5),
    "exponential": lambda: torch.zeros(4).exponential_(),
    "multinomial": lambda: torch.ones(8).multinomial(4).float(),
    "dropout": lambda: F.dropout(torch.ones(4)),
    "binomial": lambda: torch.binomial(torch.full((4,), 9.0), torch.full((4,), 0.5)),
    "gamma": lambda: torch.distributions.Gamma(torch.ones(4), torch.ones(4)).sample(),
    "feature_dropout": lambda: torch.feature_dropout(torch.ones(1, 4), 0.5, True)[0],
    "fractional": lambda: F.fractional_max_pool2d(torch.arange(64.0).view(1, 8, 8), 2, 2).view(4),
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(4, 4))[0],
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.zeros(1, 4))[0],
    "init": lambda: nn.init.xavier_uniform_(torch.empty(1, 4))[0],
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_that_later_calls_read_is_refused(name: str) -> None:
    """A graph would draw the numbers again in every mini-batch, and eager torch keeps them."""
    with pytest.raises(CaptureError, match=rf"reads the attribute mask \(Model\) at .*{HERE}"):
        Captured(Model(kept_draw(DRAWS[name])), F.cross_entropy, _batch())


@pytest.mark.parametrize("name", ["__setitem__", "view"])
def test_a_draw_in_part_of_a_kept_tensor_is_refused(name: str) -> None:
    """Every call draws, but reads the tensor of the first call."""

    def kept_part(model: Any, h: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(4)
        if name == "view":
            mask[:2].copy_(torch.rand(2))
        else:
            mask[:2] = torch.rand(2)
        if model.mask is None:
            model.mask = mask
        return h * model.mask

    with pytest.raises(CaptureError, match=rf"reads the attribute mask \(Model\) at .*{HERE}"):
        Captured(Model(kept_part), F.cross_entropy, _batch())


def kept_mask(model: Any, h: torch.Tensor) -> torch.Tensor:
    if model.mask is None:
        model.mask = torch.arange(4.0) / torch.arange(4.0).sum()
    return h * model.mask


def kept_result(model: Any, h: torch.Tensor) -> torch.Tensor:
    model.h = torch.tanh(h)  # for inspection
    model.calls += 1  # for inspection too
    return model.h


def kept_in_containers(model: Any, h: torch.Tensor) -> torch.Tensor:
    model.items.append(torch.tanh(h))
    model.state["features"] = {"h": [model.items[-1], h.detach()]}
    model.state["step"] += 1
    model.seen.add(h.shape[0])
    model.last_features = h * 2  # a new attribute
    return model.items[-1]


def checked_distribution(model: Any, h: torch.Tensor) -> torch.Tensor:
    normal = torch.distributions.Normal(h, F.softplus(h) + 0.1)  # checks its arguments' values
    return h - 0.1 * normal.log_prob(torch.ones(4))


@functools.lru_cache
def table(size: int) -> torch.Tensor:
    return torch.linspace(0, 1, size)


def kept_by_lru_cache(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h * table(4)


def kept_in_a_global(model: Any, h: torch.Tensor) -> torch.Tensor:
    global GRID
    if GRID is None:
        GRID = torch.linspace(0, 1, 4)
    return h * GRID


def kept_in_a_dictionary(model: Any, h: torch.Tensor) -> torch.Tensor:
    if "grid" not in STORED:
        STORED["grid"] = torch.linspace(0, 1, 4)
    return h * STORED["grid"]


def kept_in_a_class(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h * Tables.known.setdefault(4, torch.linspace(0, 1, 4))


def kept_in_an_object(model: Any, h: torch.Tensor) -> torch.Tensor:
    if OBJECT.grid is None:
        OBJECT.grid = torch.linspace(0, 1, 4)
    return h * OBJECT.grid


def kept_in_an_own_object(model: Any, h: torch.Tensor) -> torch.Tensor:
    if model.tables.grid is None:
        model.tables.grid = torch.linspace(0, 1, 4)
    return h * model.tables.grid


def kept_in_a_new_buffer(model: Any, h: torch.Tensor) -> torch.Tensor:
    if not hasattr(model, "grid"):
        model.register_buffer("grid", torch.linspace(0, 1, 4), persistent=False)
    return h * model.grid


def kept_in_an_empty_buffer(model: Any, h: torch.Tensor) -> torch.Tensor:
    if model.empty is None:
        model.empty = torch.linspace(0, 1, 4)
    return h * model.empty


def own_parameter(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h + 0.1 * OUTSIDE.detach() * model.items[0]


def frozen(model: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        shift = OUTSIDE * 2
    return h + shift


def reassigned(model: Any, h: torch.Tensor) -> torch.Tensor:
    model.mean = 0.5 * model.mean + h.detach().mean(0)
    return h - model.mean


@pytest.mark.parametrize(
    "function",
    [
        kept_mask, kept_result, kept_in_containers, kept_by_lru_cache, kept_in_a_new_buffer,
        kept_in_an_empty_buffer, kept_in_a_global, kept_in_a_dictionary, kept_in_a_class,
        kept_in_an_object, kept_in_an_own_object, checked_distribution, own_parameter, frozen,
        reassigned,
    ],
)  # fmt: skip
def test_harmless_attributes_train_as_in_torch(
    function: Callable[[Any, torch.Tensor], torch.Tensor],
) -> None:
    global GRID
    GRID, OBJECT.grid = None, None
    STORED.clear()
    Tables.known.clear()
    torch.manual_seed(0)
    model, (x, y) = Model(function), _batch()
    eager = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Captured(model, F.cross_entropy, (x, y))
    assert STORED == Tables.known == {}, "capture stores nothing"
    assert GRID is OBJECT.grid is model.tables.grid is None
    stages = Stages(found, found.stage_graphs([1], [{}, {}], [4], None))
    for step in range(3):
        eager.zero_grad()
        loss = F.cross_entropy(eager(x), y)
        loss.backward()
        (gradients,) = [{**a, **b} for a, b in [stages.step((x, y), [4], [1.0], step)]]
        assert stages.loss == pytest.approx(loss.item(), rel=1e-6)
        for name, parameter in eager.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)
    if function is reassigned:
        torch.testing.assert_close(stages.buffers["mean"], eager.mean)


@pytest.mark.parametrize("is_called", [False, True], ids=["new", "called"])
def test_capture_leaves_stored_attributes_unchanged(is_called: bool) -> None:
    """Capture keeps all attributes unchanged, and copes with values that an earlier call stored
    in them."""

    class Loss(nn.Module):
        def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(out, y, reduction="none")
            self.last, self.detached = loss, loss.detach()
            return loss.sum()

    torch.manual_seed(0)
    model, loss_fn, (x, y) = Model(kept_in_containers), Loss(), _batch()
    if is_called:
        loss_fn(model(x), y)
    before = [*vars(model).items(), *vars(loss_fn).items()]
    items, state = list(model.items), dict(model.state)
    found = Captured(model, loss_fn, (x, y))
    found.stage_graphs([1], [{}, {}], [2, 4], None)
    assert "no mean over samples" in found.loss_fault(2)
    after = [*vars(model).items(), *vars(loss_fn).items()]
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(a is b for (_, a), (_, b) in zip(after, before, strict=True))
    assert [id(item) for item in model.items] == [id(item) for item in items]
    assert model.state == state


def test_a_loss_that_reads_a_parameter_of_the_model() -> None:
    model = Model(kept_mask)
    found = Captured(
        model,
        lambda out, y: F.cross_entropy(out, y) + model.first.weight.square().sum(),
        _batch(),
    )
    assert "first.weight" in found.parameters


@pytest.mark.parametrize("is_called", [False, True], ids=["new", "called"])
def test_a_loss_reads_an_attribute_that_forward_sets(is_called: bool) -> None:
    def auxiliary(model: Any, h: torch.Tensor) -> torch.Tensor:
        model.auxiliary = torch.tanh(h).square().mean()
        return h

    torch.manual_seed(0)
    model, (x, y) = Model(auxiliary), _batch()
    if is_called:
        model(x)

    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y) + model.auxiliary

    found = Captured(model, loss_fn, (x, y))
    stages = Stages(found, found.stage_graphs([1], [{}, {}], [4], None))
    gradients = {k: v for stage in stages.step((x, y), [4], [1.0]) for k, v in stage.items()}
    out = model(x)
    loss_fn(out, y).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad)


def test_a_generator_of_torch_is_refused() -> None:
    own = "forward uses a Generator"  # torch 2.11 refuses it in its own words
    message = "torch._C.Generator" if torch.__version__.startswith("2.11.") else own
    with pytest.raises(CaptureError, match=message):
        Captured(Model(own_generator), F.cross_entropy, _batch())


def test_a_parameter_in_the_closure_of_a_loss_is_refused() -> None:
    centers = nn.Embedding(2, 2)
    with pytest.raises(CaptureError, match=rf"requires a gradient at .*{HERE}.*nn.Module"):
        Captured(
            Model(kept_mask),
            lambda out, y: F.cross_entropy(out, y) + (out - centers(y)).square().mean(),
            _batch(),
        )
