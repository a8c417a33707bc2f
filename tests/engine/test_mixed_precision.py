"""Passes in half precision equal torch.autocast; weights and updates stay float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import batches
from pipelines import pipeline
from reference import distance
from torch import nn

import hetpipe as hp
from hetpipe.capture.precision import Precision
from hetpipe.capture.program import STATE
from hetpipe.crew.crew import Crew
from hetpipe.errors import CaptureError, HetpipeError
from hetpipe.pipeline.fit import check_dtypes
from hetpipe.pipeline.lossscale import Scaling

DEVICES = ("pytorch:cpu:0", "pytorch:cpu:0", "numpy:cpu:0")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
COUNT = 4
LR = 1e-4
"""Updates so small that bfloat16 could not add them to a weight of 0.1."""
ADAMW = hp.optim.adamw(lr=LR)
SGD = hp.optim.sgd(lr=0.1)


class Net(nn.Module):
    """A model with operators that autocast narrows, widens or leaves unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.norm = nn.Linear(20, 32), nn.LayerNorm(32)
        self.middle, self.last = nn.Linear(32, 16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.norm(self.entry(x)))
        x = torch.softmax(self.middle(x), 1).float() * x[:, :16]
        return self.last(x)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def sum_and_count(output: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    counted = (y != 0).float()
    return (F.cross_entropy(output, y, reduction="none") * counted).sum(), counted.sum()


def open_mixed(
    crew: Crew, precision: str | None, schedule: str = "1f1b", members: str = "01",
    loss_fn: Callable[..., Any] = F.cross_entropy, cut_dtype: str | None = None, **options: Any,
) -> hp.Pipeline:  # fmt: skip
    """Open a pipeline of `net` with passes in the given precision."""
    count = 1 if schedule == "pipedream" else COUNT
    options = {"optimizer": ADAMW, **options}
    return pipeline(
        crew, net(), loss_fn, batches(1)[0], members, schedule, count,
        precision=Precision(precision, cut_dtype), **options,
    )  # fmt: skip


class Eager:
    """Plain torch with micro-batches, autocast if `dtype` is given, and a gradient scaler."""

    def __init__(self, dtype: torch.dtype | None, **scaler: Any) -> None:
        self.model, self._dtype = net(), dtype
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, **scaler)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self._optimizer.zero_grad()
        total = 0.0
        for rows, wanted in zip(x.split(12 // COUNT), y.split(12 // COUNT), strict=True):
            with torch.autocast("cpu", self._dtype, enabled=self._dtype is not None):
                loss = F.cross_entropy(self.model(rows), wanted) / COUNT
            self.scaler.scale(loss).backward()
            total += float(loss.detach())
        self.scaler.unscale_(self._optimizer)
        self.gradients = {n: p.grad.clone() for n, p in self.model.named_parameters()}
        self.scaler.step(self._optimizer)
        self.scaler.update()
        return total


def change(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: state[name] - value for name, value in net().state_dict().items()}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("precision", "schedule", "cut_dtype", "recompute"),
    [
        ("bfloat16", "1f1b", None, "none"),
        ("bfloat16", "zb-h1", None, "inputs"),
        ("float16", "1f1b", None, "min-cut"),
        ("float16", "zb-h1", "float16", "none"),
    ],
)
def test_equals_autocast(
    crew: Crew, precision: str, schedule: str, cut_dtype: str | None, recompute: str
) -> None:
    """The rounding is the same, so only the order of float32 sums differs.

    That changes a rounding now and then, little compared with the effect of autocast.
    """
    data = batches(3)
    with open_mixed(crew, precision, schedule, cut_dtype=cut_dtype, recompute=recompute) as pipe:
        _, gradients = pipe.gradients(*data[0])
        losses = [pipe.step(x, y) for x, y in data]
        state, evaluated = pipe.state_dict(), pipe.evaluate([data[0]]).loss
        assert all(value.dtype == "float32" for value in crew.read(STATE).values())
        assert pipe.skipped == 0
    eager, plain = Eager(DTYPES[precision]), Eager(None)
    wanted = [eager.step(*data[0])]
    plain.step(*data[0])
    effect = distance(eager.gradients, plain.gradients)
    assert effect > 1e-4  # autocast has an effect
    assert distance(gradients, eager.gradients) < 0.1 * effect
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    wanted += [eager.step(x, y) for x, y in data[1:]]
    assert losses == pytest.approx(wanted, rel=1e-4)
    assert distance(change(state), change(eager.model.state_dict())) < 1e-2
    with torch.no_grad(), torch.autocast("cpu", DTYPES[precision]):
        output = eager.model(data[0][0])
        assert evaluated == pytest.approx(float(F.cross_entropy(output, data[0][1])), rel=1e-3)


def test_an_adapting_scale_equals_torchs(crew: Crew) -> None:
    """From a scale that is far too high, updates are skipped until all gradients are finite.

    Skipped updates do not count. Then the scale grows, overflows, and shrinks again.
    """
    rule = hp.LossScale(start=2.0**22, interval=2)
    eager = Eager(torch.float16, init_scale=rule.start, growth_interval=rule.interval)
    scales, wanted = [], []
    with open_mixed(crew, "float16", loss_scale=rule) as pipe:
        for x, y in batches(14):
            before = pipe.state_dict()
            assert pipe.step(x, y) == pytest.approx(eager.step(x, y), rel=1e-3)
            scales.append(pipe.loss_scale)
            wanted.append(eager.scaler.get_scale())
            if wanted[-1] < (wanted[-2] if len(wanted) > 1 else rule.start):
                assert all(torch.equal(before[name], v) for name, v in pipe.state_dict().items())
        state, skipped = pipe.state_dict(), pipe.skipped
    assert scales == wanted
    assert scales[0] == rule.start / 2
    assert max(b / a for a, b in pairwise(scales)) == 2
    assert skipped == 1 + sum(b < a for a, b in pairwise(scales))
    assert distance(change(state), change(eager.model.state_dict())) < 1e-2


ADAPTING = hp.LossScale(2.0**8, interval=1)


@pytest.mark.parametrize(
    ("schedule", "loss_fn", "clip_norm", "scales"),
    [
        ("1f1b", F.cross_entropy, None, (2.0**10, ADAPTING)),
        ("1f1b", sum_and_count, 0.1, (2.0**10, ADAPTING)),
        ("pipedream", sum_and_count, None, (2.0**10,)),
    ],
)
def test_a_power_of_two_changes_nothing_in_float32(
    crew: Crew, schedule: str, loss_fn: Callable[..., Any], clip_norm: float | None, scales: Any
) -> None:
    found = []
    for scale in (None, *scales):
        # Not Adam, because a wrong scale hardly changes its updates.
        options = {"loss_scale": scale, "clip_norm": clip_norm, "optimizer": SGD}
        with open_mixed(crew, None, schedule, loss_fn=loss_fn, **options) as pipe:
            losses = [result.loss for result in pipe.run(batches(3))]
            assert pipe.loss_scale == (2.0**11 if scale is ADAPTING else scale or 1.0)
            found.append((losses, pipe.state_dict()))
    for losses, state in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(value, state[name]) for name, value in found[0][1].items())


def test_asynchronous_updates_need_a_fixed_scale(crew: Crew) -> None:
    with pytest.raises(HetpipeError, match=r"no moment at which all stages.*loss_scale=1024\.0"):
        open_mixed(crew, "float16", "pipedream")
    found = []
    for precision, scale in (("float16", 1024.0), ("bfloat16", None), (None, None)):
        options = {"loss_scale": scale, "optimizer": SGD}
        with open_mixed(crew, precision, "pipedream", **options) as pipe:
            list(pipe.run(batches(6)))
            found.append(change(pipe.state_dict()))
    for half in found[:2]:
        assert 1e-5 < distance(half, found[2]) < 2e-2


def test_a_checkpoint_has_the_scale(crew: Crew, tmp_path: Path) -> None:
    data = batches(8)
    rule = hp.LossScale(start=2.0**20, interval=2)
    with open_mixed(crew, "float16", loss_scale=rule) as pipe:
        for x, y in data[:5]:
            pipe.step(x, y)
        pipe.save(tmp_path)
        assert pipe.skipped > 0
        kept = pipe.loss_scale, pipe.skipped, pipe.steps
        losses = [pipe.step(x, y) for x, y in data[5:]]
        state = pipe.state_dict()
    with open_mixed(crew, "float16", loss_scale=rule, checkpoint=tmp_path) as pipe:
        assert (pipe.loss_scale, pipe.skipped, pipe.steps) == kept
        assert [pipe.step(x, y) for x, y in data[5:]] == losses
        assert all(torch.equal(value, state[n]) for n, value in pipe.state_dict().items())


@pytest.mark.slow
def test_a_pipeline_is_profiled_and_planned_in_its_precision(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half-precision tensors cross cuts unchanged; devices without the precision are refused."""
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))

    def planned(precision: str) -> hp.Pipeline:
        return hp.Pipeline(
            net(), F.cross_entropy, batches(1)[0], cluster=crew.cluster, crew=crew, cuts=[1],
            microbatches=COUNT, optimizer=hp.optim.sgd(lr=0.1), precision=precision,
        )  # fmt: skip

    with planned("float16") as pipe:
        assert pipe.plan.layers[1] == "middle"
        assert pipe.plan.cut_nbytes == (32 * 3 * 2,)
        assert pipe.step(*batches(1)[0]) > 0
        assert (pipe.loss_scale, pipe.skipped) == (2.0**16, 0)
    with pytest.raises(HetpipeError, match=r"precision='bfloat16': numpy:cpu:0"):
        planned("bfloat16")


def test_gradients_not_finite_at_any_scale_raise_an_error() -> None:
    scaling = Scaling(hp.LossScale(start=2.0), 2.0)
    scaling.record(skipped=True)
    assert scaling.scale == 1.0
    with pytest.raises(HetpipeError, match="the scale is not the reason"):
        scaling.record(skipped=True)


def test_devices_without_the_dtype_are_refused_by_name(crew: Crew) -> None:
    with pytest.raises(HetpipeError, match=r"precision='bfloat16': numpy:cpu:0 computes in "):
        open_mixed(crew, "bfloat16", members="02")
    info = replace(crew.infos["m0"], id="some:device:0", dtypes=("float32",))
    with pytest.raises(HetpipeError, match=r"cut_dtype='float16': some:device:0 has float32;"):
        check_dtypes(Precision(cut="float16"), [info])
    casts = replace(info, cast_dtypes=("float16",))
    check_dtypes(Precision(cut="float16"), [casts])
    with pytest.raises(HetpipeError, match=r"precision='float16': some:device:0 computes in"):
        check_dtypes(Precision("float16"), [casts])


def test_invalid_options_are_refused(crew: Crew) -> None:
    with pytest.raises(CaptureError, match="precision='int8' is not known"):
        Precision("int8")
    with pytest.raises(HetpipeError, match="loss_scale=0"):
        open_mixed(crew, "float16", loss_scale=0.0)
    with pytest.raises(HetpipeError, match="start must be at least 1"):
        hp.LossScale(start=0.5)
    with pytest.raises(HetpipeError, match="clip_each=True looks at each stage's gradients alone"):
        open_mixed(crew, "float16", clip_norm=1.0, clip_each=True)
