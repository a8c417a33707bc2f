"""float16 at the cuts: half the bytes, and the same result as torch with rounding at the cuts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captures import shared
from crews import Crews
from models import batches
from pipelines import pipeline
from reference import Trained, distance, gradients_of, train
from torch import nn

import hetpipe as hp
from hetpipe.capture.precision import Precision
from hetpipe.crew.crew import Crew
from hetpipe.crew.routing import wires
from hetpipe.errors import CaptureError, HetpipeError
from hetpipe.sdk.graph import graph_outputs
from hetpipe.wire.shares import Shares
from hetpipe.wire.wire import Wire

DEVICES = ("numpy:cpu:0", "numpy:cpu:0", "pytorch:cpu:0")
HALF = Precision(cut="float16")
WIDTHS = (20, 32, 24, 16, 5)
MICROBATCHES = 4


class Rounded(torch.autograd.Function):
    """Rounds a tensor and its gradient to float16 and back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.half().float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.half().float()


class Chain(nn.Module):
    """Linear layers; each layer in `cuts` rounds its input as a cut before it would."""

    def __init__(self, cuts: Sequence[int] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(WIDTHS))
        self.cuts = cuts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, layer in enumerate(self.layers):
            if n in self.cuts:
                x = Rounded.apply(x)
            x = torch.tanh(layer(x)) if n < 3 else layer(x)
        return x


class Skip(nn.Module):
    """A model whose first result and a mask skip the second layer and enter the third."""

    def __init__(self, rounds: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.rounds = rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        round_ = Rounded.apply if self.rounds else lambda x: x
        first = torch.tanh(self.first(x))
        mask = first > 0
        first = round_(first)
        second = round_(torch.tanh(self.second(first)))
        later = round_(first)  # its gradient is rounded, added to the other, and rounded again
        return self.third(second) + torch.where(mask, later, 2 * later)[:, :5]


SGD = hp.optim.sgd(lr=0.1, momentum=0.9)


def open_halved(
    crew: Crew, model: nn.Module, schedule: str, members: str, microbatches: int = MICROBATCHES,
    precision: Precision = HALF, **options: Any,
) -> hp.Pipeline:  # fmt: skip
    """Open a pipeline with float16 at its cuts."""
    task = model, F.cross_entropy, batches(1)[0]
    return pipeline(
        crew, *task, members, schedule, microbatches, precision=precision, optimizer=SGD, **options
    )


def train_in_torch(model: nn.Module) -> Trained:
    return train(
        model, F.cross_entropy, batches(3), MICROBATCHES, lambda p: torch.optim.SGD(p, 0.1, 0.9)
    )


def close(state: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Compare; one different rounding changes a weight by about lr * 2^-11 of a gradient."""
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "members", "recompute"),
    [
        ("1f1b", "012", "inputs"),
        ("gpipe", "01", "min-cut"),
        ("zb-h1", "02", "none"),
        ("zb-v", "0110", "inputs"),
        ("interleaved", "0202", "none"),
    ],
)
def test_equals_torch_with_rounding_at_the_cuts(
    crew: Crew, schedule: str, members: str, recompute: str
) -> None:
    """The results agree up to float32's last digits.

    Now and then a last digit changes one rounding to float16, in one number among hundreds. From
    plain torch, all numbers differ by up to 2^-11.
    """
    torch.manual_seed(0)
    model = Chain()
    with open_halved(crew, model, schedule, members, recompute=recompute) as pipe:
        cuts = pipe.plan.cuts
        _, gradients = pipe.gradients(*batches(1)[0])
        losses = [pipe.step(x, y) for x, y in batches(3)]
        state = pipe.state_dict()
    rounding = Chain(cuts)
    rounding.load_state_dict(model.state_dict())
    rounded, plain = train_in_torch(rounding), train_in_torch(model)
    assert losses == pytest.approx(rounded.losses, rel=1e-5)
    assert losses == pytest.approx(plain.losses, rel=1e-3)
    assert distance(gradients, rounded.gradients) < 0.2 * distance(gradients, plain.gradients)
    assert distance(gradients, plain.gradients) < 2**-9
    close(state, rounded.state)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["pocl", "intel-cpu"])
def test_devices_without_float16_arithmetic(crews: Crews, runtime: str) -> None:
    """The device runs the middle stage, so both its passes take and return float16."""
    device = f"opencl:{runtime}:0"
    if device not in [info.id for info in hp.discover_devices()[0]]:
        pytest.skip(f"no {device}")
    torch.manual_seed(0)
    model = Chain()
    crew = crews(("numpy:cpu:0", device, "pytorch:cpu:0"))
    with open_halved(crew, model, "1f1b", "012") as pipe:
        assert "float16" not in crew.infos["m1"].dtypes
        cuts = pipe.plan.cuts
        losses = [pipe.step(x, y) for x, y in batches(3)]
        state = pipe.state_dict()
    rounding = Chain(cuts)
    rounding.load_state_dict(model.state_dict())
    rounded = train_in_torch(rounding)
    assert losses == pytest.approx(rounded.losses, rel=1e-5)
    close(state, rounded.state)


@pytest.mark.slow
def test_a_tensor_that_skips_a_stage_is_rounded_once(crew: Crew) -> None:
    """Its gradients are summed in float32 where they meet; its mask keeps its dtype."""
    torch.manual_seed(0)
    model = Skip()
    with open_halved(crew, model, "1f1b", "012") as pipe:
        losses = [pipe.step(x, y) for x, y in batches(3)]
        state = pipe.state_dict()
        graphs = stages(model, pipe.plan.cuts, HALF)
        sent = wires_of(graphs)
    assert {slot.dtype for wire in sent for layout in wire.layouts.values() for slot in layout} == {
        "float16", "bool",
    }  # fmt: skip
    middle = graphs[1].passes[3].forward
    passed = {slot.key for slot in middle.inputs} & {slot.key for slot in middle.outputs}
    assert len(passed) == 2
    returned = zip(middle.outputs, graph_outputs(middle.graph), strict=True)
    assert {slot.key for slot, node in returned if node.op == "placeholder"} == passed
    rounding = Skip(rounds=True)
    rounding.load_state_dict(model.state_dict())
    rounded = train_in_torch(rounding)
    assert losses == pytest.approx(rounded.losses, rel=1e-5)
    close(state, rounded.state)


@pytest.mark.slow
def test_asynchronous_updates_and_evaluation_round_too(crew: Crew) -> None:
    """Stale weights have no plain torch equivalent, so the test compares with float32 cuts."""
    torch.manual_seed(0)
    model = Chain()
    found = []
    for precision in (HALF, Precision()):
        with open_halved(crew, model, "pipedream", "012", 1, precision) as pipe:
            losses = [result.loss for result in pipe.run(batches(6))]
            found.append((*losses, pipe.evaluate([batches(1)[0]]).loss))
            cuts, state = pipe.plan.cuts, pipe.state_dict()
            if precision == HALF:
                evaluated = Chain(cuts)
                evaluated.load_state_dict(state)
                x, y = batches(1)[0]
                wanted = F.cross_entropy(evaluated(x), y).item()
                assert found[0][-1] == pytest.approx(wanted, rel=2e-5)
    assert found[0] == pytest.approx(found[1], rel=2e-3)
    assert found[0] != pytest.approx(found[1], rel=1e-6)


def wires_of(graphs: Sequence[Any]) -> list[Wire]:
    return wires([[stage] for stage in graphs], Shares(((1.0,),) * len(graphs)), [3])


def stages(model: nn.Module, cuts: Sequence[int], precision: Precision) -> list[Any]:
    captured = shared(model, F.cross_entropy, batches(1)[0], precision)
    return captured.stage_graphs(cuts, [{}] * (len(cuts) + 1), [3], None)


def test_half_the_bytes_are_planned_and_sent() -> None:
    """Both directions send half the bytes, and a stage's saved input takes half the memory."""
    sent, planned, saved = [], [], []
    for precision in (HALF, Precision()):
        model = Chain()
        graphs = stages(model, [1, 3], precision)
        layouts = [w.layouts for w in wires_of(graphs)]
        sent.append(
            [sum(slot.nbytes for slot in layout) for kinds in layouts for layout in kinds.values()]
        )
        captured = shared(model, F.cross_entropy, batches(1)[0], precision)
        planned.append(captured.layer_graph(3).cut_nbytes)
        saved.append(graphs[1].passes[3].saved_nbytes)
    assert sent[0] == [32 * 3 * 2, 32 * 3 * 2, 16 * 3 * 2, 16 * 3 * 2]
    assert sent[1] == [2 * nbytes for nbytes in sent[0]]
    assert planned[0] == (32 * 3 * 2, 24 * 3 * 2, 16 * 3 * 2)
    assert planned[1] == tuple(2 * nbytes for nbytes in planned[0])
    assert saved[1] - saved[0] == 32 * 3 * 2


@pytest.mark.slow
def test_a_pipeline_plans_with_half_the_bytes(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    with hp.Pipeline(
        Chain(), F.cross_entropy, batches(1)[0], cluster=crew.cluster, crew=crew, cuts=[2],
        microbatches=MICROBATCHES, optimizer=hp.optim.sgd(lr=0.1), cut_dtype="float16",
    ) as pipe:  # fmt: skip
        assert pipe.plan.cut_nbytes == (24 * 3 * 2,)
        assert pipe.step(*batches(1)[0]) > 0


def faint_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, y) * 1e-7


def test_without_a_loss_scale_small_gradients_are_lost(crew: Crew) -> None:
    """A loss of 1e-7 has gradients too small for float16, so the first stage gets none."""
    torch.manual_seed(0)
    model, (x, y) = Chain(), batches(1)[0]
    _, expected = gradients_of(model, faint_loss, x, y)
    largest = []
    for scale in (None, 2.0**20):
        with pipeline(
            crew, model, faint_loss, (x, y), "02", "1f1b", MICROBATCHES, precision=HALF,
            optimizer=SGD, loss_scale=scale,
        ) as pipe:  # fmt: skip
            _, gradients = pipe.gradients(x, y)
        largest.append(float(gradients["layers.0.weight"].abs().max()))
        if scale is not None:
            for name, gradient in expected.items():
                # Each product has a factor that was rounded by at most 2^-11 of its value.
                bound = 2**-9 * float(gradient.abs().max())
                torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=bound)
    assert largest[0] == 0 < largest[1]


def test_invalid_cut_dtypes_are_refused(crew: Crew) -> None:
    with pytest.raises(CaptureError, match=r"cut_dtype='bfloat16'.*numpy has no bfloat16"):
        Precision(cut="bfloat16")
    with pytest.raises(CaptureError, match="cut_dtype='int8' is not known"):
        Precision(cut="int8")
    captured = shared(Chain(), F.cross_entropy, batches(1)[0])
    with pytest.raises(HetpipeError, match=r"captured has .*cut=None"):
        hp.Pipeline(
            Chain(), F.cross_entropy, batches(1)[0], cluster=crew.cluster, crew=crew,
            captured=captured, optimizer=hp.optim.sgd(lr=0.1), cut_dtype="float16",
        )  # fmt: skip
