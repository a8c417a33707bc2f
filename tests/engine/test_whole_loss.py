"""With `loss_over="mini-batch"`, losses, gradients and weights equal plain torch's, whose loss sees
the outputs of all samples."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from crews import Crews
from pipelines import user_pipeline
from plans import unpriced
from reference import check_close, cut, leaf, sizes
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import hetpipe as hp
from hetpipe.capture.whole_loss import WholeLossCaptured
from hetpipe.cluster import Cluster
from hetpipe.crew.crew import Crew
from hetpipe.errors import CaptureError, CheckpointError, HetpipeError, NotFiniteError, PlanError

WIDE, NARROW = torch.float64, torch.float32
ROWS, LR = 10, 1e-2


class Towers(nn.Module):
    """Two encoders, whose outputs a loss compares."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.text = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return self.image(image), self.text(text)


class Contrast(nn.Module):
    """CLIP's loss with a trained temperature: all other samples are negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        image, text = (F.normalize(tower, dim=1) for tower in out)
        logits = image @ text.t() * self.scale.exp()
        return (F.cross_entropy(logits, y) + F.cross_entropy(logits.t(), y)) / 2


def towers(count: int = 5, dtype: torch.dtype = WIDE) -> tuple[nn.Module, nn.Module, list[Any]]:
    torch.manual_seed(0)
    model, loss = Towers().to(dtype), Contrast().to(dtype)
    data = [
        ((torch.randn(ROWS, 6, dtype=dtype), torch.randn(ROWS, 5, dtype=dtype)), torch.arange(ROWS))
        for _ in range(count)
    ]
    return model, loss, data


class Classifier(nn.Module):
    """Returns a dict with scores, features and a tensor of whole numbers."""

    def __init__(self, tied: bool = False, normed: bool = False) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(8) if normed else nn.Identity()
        self.first = nn.Sequential(nn.Linear(6, 8, bias=not normed), norm)
        self.middle = nn.Linear(8, 6)
        self.last = nn.Linear(6, 8)
        if tied:
            self.last.weight = self.first[0].weight = nn.Parameter(torch.randn(8, 6) * 0.3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        features = self.middle(torch.tanh(self.first(x)))
        scores = self.last(torch.tanh(features))
        return {"scores": scores, "more": [features, scores.argmax(1)]}


def weighted(out: dict[str, Any], y: Tensor) -> Tensor:
    """Class weights with a mean, the variance of features over samples, and the classes found."""
    weight = torch.arange(1.0, 9.0, dtype=out["scores"].dtype)
    features, found = out["more"]
    spread = features.var(0).mean() * (1 + (found == y).sum())
    return F.cross_entropy(out["scores"], y, weight=weight) - 0.1 * spread


def counted(out: dict[str, Any], y: Tensor) -> tuple[Tensor, Tensor]:
    scores = out["scores"] - out["scores"].mean()
    kept = y < 6
    return (F.cross_entropy(scores, y, reduction="none") * kept).sum(), kept.sum()


def classes(dtype: torch.dtype = WIDE, count: int = 5, **how: bool) -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(1)
    model = Classifier(**how).to(dtype)
    data = [(torch.randn(ROWS, 6, dtype=dtype), torch.randint(8, (ROWS,))) for _ in range(count)]
    return model, data


def outputs(model: nn.Module, x: Any, microbatches: int) -> Any:
    """Return the joined outputs of micro-batches."""
    lo, parts = 0, []
    for size in sizes(len(leaf(x)), microbatches):
        part = cut(x, lo, lo + size)
        parts.append(model(*part) if isinstance(part, tuple) else model(part))
        lo += size
    return tree_map(lambda *tensors: torch.cat(tensors), *parts)


class Plain:
    """Trains copies in plain torch."""

    def __init__(self, model: nn.Module, loss: Any, optimizer: Any = torch.optim.Adam) -> None:
        self.model, self.loss = copy.deepcopy((model, loss))
        modules = [m for m in (self.model, self.loss) if isinstance(m, nn.Module)]
        self.parameters = list(nn.ModuleList(modules).parameters())
        self.optimizer = optimizer(self.parameters, lr=LR)

    def step(
        self, *batches: Any, microbatches: int = 1, clip: float | None = None, updates: bool = True
    ) -> list[float]:
        """Update once with the mean loss of the mini-batches, and return their losses."""
        self.optimizer.zero_grad()
        before = copy.deepcopy(self.model.state_dict())
        losses, totals, count = [], [], 0.0
        for x, y in batches:
            found = self.loss(outputs(self.model, x, microbatches), y)
            total, own = found if isinstance(found, tuple) else (found, torch.tensor(1.0))
            losses.append(float(total.detach() / own))
            totals.append(total)
            count += float(own)
        (sum(totals) / count).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, clip)
        if updates:
            self.optimizer.step()
        else:
            self.model.load_state_dict(before)  # forwards change statistics
        return losses


def opened(crew: Crew, model: nn.Module, loss: Any, example: Any, **options: Any) -> hp.Pipeline:
    options = {"optimizer": hp.optim.adam(lr=LR), "microbatches": 3, **options}
    return user_pipeline(crew, model, loss, example, loss_over="mini-batch", **options)


def compare(pipe: hp.Pipeline, plain: Plain, data: list[Any], digits: float, **how: Any) -> None:
    """Compare gradients, then losses and weights over an update for each mini-batch."""
    loss, grads = pipe.gradients(*data[0])
    assert loss == pytest.approx(plain.step(data[0], updates=False, **how)[0], rel=digits)
    named = {n: p.grad for n, p in plain.model.named_parameters() if p.grad is not None}
    if isinstance(plain.loss, nn.Module):
        named |= {f"loss.{n}": p.grad for n, p in plain.loss.named_parameters()}
    check_close(grads, named, digits, digits)
    found = [result.loss for result in pipe.run(data)]
    expected = [plain.step(batch, **how)[0] for batch in data]
    assert found == pytest.approx(expected, rel=digits)
    check_close(pipe.state_dict(), plain.model.state_dict(), digits, digits)
    if isinstance(plain.loss, nn.Module):
        check_close(pipe.loss_state_dict(), plain.loss.state_dict(), digits, digits)


@pytest.mark.parametrize(
    ("cuts", "microbatches", "dtype"),
    [([], 3, WIDE), ([3], 4, WIDE), ([1, 3], 3, NARROW), ([2], 1, WIDE)],
)
def test_contrastive_training_equals_torch(
    crew: Crew, cuts: list[int], microbatches: int, dtype: torch.dtype
) -> None:
    """Micro-batches are uneven, and a tower may end in an earlier stage than the other."""
    model, loss, data = towers(dtype=dtype)
    digits = 1e-10 if dtype is WIDE else 1e-5
    with opened(crew, model, loss, data[0], cuts=cuts, microbatches=microbatches) as pipe:
        assert pipe.plan.schedule == "gpipe"
        plain = Plain(model, loss)
        compare(pipe, plain, data, digits)


def test_an_evaluation_equals_torch(crew: Crew) -> None:
    model, loss, data = towers()
    with opened(crew, model, loss, data[0], cuts=[3], ema=0.5) as pipe:
        plain = Plain(model, loss)
        assert pipe.step(*data[0]) == pytest.approx(plain.step(data[0])[0], rel=1e-10)
        smaller = [((x[0][:7], x[1][:7]), y[:7]) for x, y in data[:2]]
        found = pipe.evaluate([data[0], *smaller], {"size": lambda out, y: len(out[0])})
        with torch.no_grad():
            losses = [plain.loss(plain.model(*x), y) for x, y in (data[0], *smaller)]
        mean = (losses[0] * 10 + losses[1] * 7 + losses[2] * 7) / 24
        assert found.loss == pytest.approx(float(mean), rel=1e-10)
        assert found.metrics["size"] == pytest.approx((10 * 10 + 2 * 49) / 24)
        assert pipe.step(*smaller[0]) == pytest.approx(plain.step(smaller[0])[0], rel=1e-10)
        assert pipe.evaluate(data[:1], ema=True).loss != pipe.evaluate(data[:1]).loss


@pytest.mark.parametrize(
    ("loss", "how"), [(weighted, {"tied": True}), (counted, {}), (counted, {"normed": True})]
)
def test_other_losses_equal_torch(crew: Crew, loss: Any, how: dict[str, bool]) -> None:
    """Outputs are in a dict, and batch norms use the statistics of each micro-batch."""
    model, data = classes(**how)
    with opened(crew, model, loss, data[0], cuts=[1, 2]) as pipe:
        compare(pipe, Plain(model, loss), data, 1e-10, microbatches=3)


def test_clipping_and_accumulation_equal_torch(crew: Crew) -> None:
    model, data = classes(count=4)
    options = {"clip_norm": 0.05, "accumulate": 2, "recompute": "inputs"}
    options["optimizer"] = hp.optim.sgd(lr=LR)
    with opened(crew, model, counted, data[0], cuts=[2], **options) as pipe:
        plain = Plain(model, counted, torch.optim.SGD)
        found = [pipe.step(x, y) for x, y in data]
        expected = plain.step(*data[:2], clip=0.05) + plain.step(*data[2:], clip=0.05)
        assert found == pytest.approx(expected, rel=1e-10)
        check_close(pipe.state_dict(), plain.model.state_dict(), 1e-10, 1e-10)


class Headed(nn.Module):
    """Shares a layer with the model, and has a matrix of parameters."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.rest = nn.Parameter(torch.full((3, 2), 0.1))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        scores = self.head(out)
        spread = scores.var(0).sum() * self.rest.sum()
        return F.cross_entropy(scores, y) + 0.01 * spread + self.rest.square().sum()


def test_a_layer_of_model_and_loss_trains_as_in_torch(crew: Crew) -> None:
    """A mini-batch may also have fewer samples than micro-batches."""
    _, data = classes()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh()).double()
    loss = Headed(model[0]).double()
    with opened(crew, model, loss, data[0], cuts=[1], microbatches=3) as pipe:
        plain = Plain(model, loss)
        small = [(x[:2], y[:2]) for x, y in data[:1]]
        found = [pipe.step(x, y) for x, y in data + small]
        assert found == pytest.approx([plain.step(b)[0] for b in data + small], rel=1e-10)
        check_close(pipe.state_dict(), plain.model.state_dict(), 1e-10, 1e-10)
        check_close(pipe.loss_state_dict(), plain.loss.state_dict(), 1e-10, 1e-10)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 8)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Masked(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        return self.body[0](x).masked_fill(torch.arange(8) > 5, float("-inf"))


def infinite(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y % 6, weight=torch.arange(1.0, 9.0, dtype=out.dtype))


def test_outputs_need_not_be_finite(crew: Crew) -> None:
    _, data = classes()
    with opened(crew, Masked().double(), infinite, data[0], cuts=[]) as pipe:
        model = Masked().double()
        model.load_state_dict({**model.state_dict(), **pipe.state_dict()})
        compare(pipe, Plain(model, infinite), data, 1e-10)


def replicated(
    crew: Crew, model: nn.Module, loss: Any, example: Any, members: Sequence[Any],
    schedule: str = "gpipe",
) -> hp.Pipeline:  # fmt: skip
    captured = WholeLossCaptured(model, loss, example)
    plan, costs = unpriced(captured, members, schedule, ROWS, 2, cuts=[2])
    return hp.Pipeline(
        model, loss, example, cluster=crew.cluster, crew=crew, captured=captured, plan=plan,
        costs=costs, optimizer=hp.optim.adam(lr=LR), loss_over="mini-batch",
    )  # fmt: skip


def test_replicas_equal_torch(crew: Crew) -> None:
    model, loss, data = towers()
    with replicated(crew, model, loss, data[0], ["m0", ("m1", "m2")]) as pipe:
        compare(pipe, Plain(model, loss), data, 1e-10)


def test_a_plan_for_another_schedule_is_refused(crew: Crew) -> None:
    model, loss, data = towers()
    with pytest.raises(PlanError, match="a plan for 1f1b was given: give schedule='gpipe'"):
        replicated(crew, model, loss, data[0], ["m0", "m1"], "1f1b")


def test_a_later_change_of_the_loss_is_refused(crew: Crew) -> None:
    model, loss, data = towers()
    loss.factor = 1.0
    with opened(crew, model, loss, data[0], cuts=[2]) as pipe:
        loss.factor = 2.0
        with pytest.raises(HetpipeError, match=r"factor of the loss \(Contrast\) is 2.0"):
            pipe.step(*data[0])


def test_an_opencl_device_as_last_stage_equals_torch(crews: Crews) -> None:
    if "opencl:pocl:0" not in [info.id for info in hp.discover_devices(["opencl"])[0]]:
        pytest.skip("no PoCL")
    model, loss, data = towers(dtype=NARROW)
    with opened(crews(("numpy:cpu:0", "opencl:pocl:0")), model, loss, data[0], cuts=[2]) as pipe:
        compare(pipe, Plain(model, loss), data, 1e-4)


def spread(out: Tensor, y: Tensor) -> Tensor:
    """A loss that drops random features, and compares all pairs of samples."""
    out = F.dropout(out, 0.5)
    return (out @ out.t()).square().mean() + F.cross_entropy(out, y)


def test_dropout_does_not_depend_on_stages_nor_micro_batches(crew: Crew) -> None:
    _, data = classes()
    model = Noisy().double()
    runs = []
    for cuts, microbatches in (([], 1), ([1], 3), ([1, 2], 4)):
        with opened(crew, model, spread, data[0], cuts=cuts, microbatches=microbatches) as pipe:
            runs.append([result.loss for result in pipe.run(data)])
    assert runs[1] == pytest.approx(runs[0], rel=1e-10)
    assert runs[2] == pytest.approx(runs[0], rel=1e-10)
    assert len(set(runs[0])) == len(data)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_is_near_torch(crews: Crews, precision: str) -> None:
    model, loss, data = towers(dtype=NARROW)
    crew = crews(("pytorch:cpu:0",) * 2)
    with opened(crew, model, loss, data[0], cuts=[2], precision=precision) as pipe:
        plain = Plain(model, loss)
        found = [result.loss for result in pipe.run(data)]
        assert found == pytest.approx([plain.step(batch)[0] for batch in data], rel=2e-2)
        predicted, expected = pipe.predict(data[0][0]), plain.model(*data[0][0])
        assert all(
            torch.allclose(*pair, atol=0.03) for pair in zip(predicted, expected, strict=True)
        )


def test_a_resumed_training_continues_bit_for_bit(crew: Crew, tmp_path: Path) -> None:
    model, loss, data = towers()
    options: dict[str, Any] = {"cuts": [3]}
    with opened(crew, model, loss, data[0], **options) as pipe:
        for x, y in data[:2]:
            pipe.step(x, y)
        pipe.save(tmp_path)
        expected = [pipe.step(x, y) for x, y in data[2:]]
        state, loss_state = pipe.state_dict(), pipe.loss_state_dict()
    more = {"cluster": crew.cluster, "crew": crew, "optimizer": hp.optim.adam(lr=LR)}
    with pytest.raises(CheckpointError, match="loss_over='mini-batch'"):
        hp.Pipeline.load(tmp_path, model, micro, data[0], **more)
    more["loss_over"] = "mini-batch"
    with hp.Pipeline.load(tmp_path, model, loss, data[0], **more) as pipe:
        assert [pipe.step(x, y) for x, y in data[2:]] == expected
        assert all(torch.equal(state[n], value) for n, value in pipe.state_dict().items())
        assert torch.equal(pipe.loss_state_dict()["scale"], loss_state["scale"])


def micro(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return (out[0] - out[1]).square().mean()


class Stuck(torch.autograd.Function):
    """Has a backward that fails."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ValueError("no way back")


class Failing(nn.Module):
    """Fails, there or in its backward, or is not finite, if `y` says so."""

    def forward(self, out: dict[str, Any], y: Tensor) -> Tensor:
        if int(y.sum()) == -ROWS:
            raise ValueError("no label is valid\nmore")
        if int(y.min()) == -3:
            return cast(Tensor, Stuck.apply(weighted(out, y.clamp(min=0))))
        return weighted(out, y.clamp(min=0)) * (float("inf") if int(y.min()) == -2 else 1.0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_failing_loss_applies_nothing(crew: Crew, accumulate: int) -> None:
    model, data = classes(normed=True)
    (x, y), bad, endless = data[0], -torch.ones(ROWS, dtype=torch.long), data[0][1].clone()
    endless[0] = -2
    stuck = data[0][1].clone()
    stuck[0] = -3
    options = {"cuts": [2], "accumulate": accumulate}
    with opened(crew, model, Failing(), data[0], **options) as pipe:
        before = pipe.state_dict()
        for labels, error, text in (
            (bad, HetpipeError, r"loss_fn fails .* \(ValueError: no label is valid\)"),
            (stuck, HetpipeError, r"loss_fn has no gradient .* \(ValueError: no way back\)"),
            (endless, NotFiniteError, r"the loss of mini-batch 0 is (inf|nan)"),
        ):
            for call in (pipe.step, pipe.gradients):
                with pytest.raises(error, match=text):
                    call(x, labels)
        with pytest.raises(HetpipeError, match="loss_fn fails"):
            pipe.evaluate([(x, y), (x, bad), (x, y)])
        after = pipe.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        plain = Plain(model, Failing())
        found = [pipe.step(x, y) for x, y in data[:accumulate]]
        assert found == pytest.approx(plain.step(*data[:accumulate], microbatches=3), rel=1e-10)
        check_close(pipe.state_dict(), plain.model.state_dict(), 1e-10, 1e-10)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, out: dict[str, Any], y: Tensor) -> Tensor:
        self.seen.add_(1)
        return weighted(out, y)


def vector(out: dict[str, Any], y: Tensor) -> Tensor:
    return F.cross_entropy(out["scores"], y, reduction="none")


class Scorer(Classifier):
    def loss(self, out: dict[str, Any], y: Tensor) -> Tensor:
        return weighted(out, y)


def foreign(weight: nn.Parameter) -> Callable[[dict[str, Any], Tensor], Tensor]:
    return lambda out, y: weighted(out, y) + weight.sum()


@pytest.mark.parametrize(
    ("loss", "options", "error", "text"),
    [
        (weighted, {"loss_over": "minibatch"}, HetpipeError, "did you mean mini-batch"),
        (weighted, {"schedule": "1f1b"}, PlanError, "needs all outputs .* give schedule='gpipe'"),
        (weighted, {"schedule": "pipedream"}, PlanError, "schedule='pipedream' was given"),
        (vector, {}, CaptureError, r"must be a 0-d tensor, but loss_fn returned shape \(10,\)"),
        (foreign(nn.Parameter(torch.ones(3))), {}, HetpipeError, r"a parameter \[3\] that is not"),
        (lambda out, y: weighted(out, y).detach(), {}, HetpipeError, "no gradient of the loss"),
        (Counting(), {}, HetpipeError, "changes its buffer seen"),
        (Scorer().loss, {}, CaptureError, "refers to a module of the model"),
    ],
)
def test_wrong_use_is_refused(
    crew: Crew, loss: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    model, data = classes()
    options = {"loss_over": "mini-batch", "microbatches": 2, "cuts": [1], **options}
    with pytest.raises(error, match=text):
        user_pipeline(crew, model, loss, data[0], **options)


class Whole(nn.Module):
    """Returns a tensor that has no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layer(x)
        return out, out.mean(0)


def test_outputs_without_samples_are_refused(crew: Crew) -> None:
    _, data = classes()
    with pytest.raises(HetpipeError, match="whose first dimension is the samples"):
        opened(crew, Whole().double(), lambda out, y: out[0].mean(), data[0], cuts=[])


def test_a_loss_of_pairs_is_refused_with_this_cure(crew: Crew) -> None:
    model, _, data = towers()
    with pytest.raises(HetpipeError, match="loss_over='mini-batch'"):
        user_pipeline(crew, model, pairs, data[0], microbatches=2, cuts=[1])


def pairs(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return (out[0] @ out[1].t()).logsumexp(1).mean()


def test_a_pipeline_without_an_optimizer_evaluates(crew: Crew) -> None:
    model, loss, data = towers()
    options = {"loss_over": "mini-batch", "optimizer": None, "microbatches": 3, "cuts": [2]}
    with user_pipeline(crew, model, loss, data[0], **options) as pipe:
        found = pipe.evaluate(data[:2]).loss
    expected = [float(loss(model(*x), y).detach()) for x, y in data[:2]]
    assert found == pytest.approx(sum(expected) / 2, rel=1e-10)
    with pytest.raises(HetpipeError, match="loss_over='mini-batch' needs a loss"):
        user_pipeline(crew, model, None, data[0], **options)


def test_the_lines_on_the_page_run(crew: Crew) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"\n## Losses over the whole .*?\n(.*?)\n## ", page, re.DOTALL)
    code = "\n".join(re.findall(r"^(?:    (.*))?$", section, re.MULTILINE))
    torch.manual_seed(0)
    model, x, y = (
        nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))),
        torch.randn(8, 6),
        torch.zeros(8),
    )
    names: dict[str, Any] = {
        "hp": hp,
        "nn": nn,
        "F": F,
        "torch": torch,
        "model": model,
        "x": x,
        "y": y,
    }
    names["cluster"] = Cluster(crew.cluster.members[:2])
    exec(code, names)
    assert 0 < names["result"].loss < 2 * math.log(8)
