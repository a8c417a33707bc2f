"""The average of the weights equals torch's, and forwards with it leave the weights alone."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import delayed
import priced
import pytest
import torch
import torch.nn.functional as F
from captures import shared
from crews import ALIKE, Crews
from models import CASES, MLP, Normalized, batches
from pipelines import members_by_stage, pipeline, user_pipeline
from priced import Speeds
from reference import backward, check_close
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hetpipe as hp
from hetpipe.cluster import Cluster
from hetpipe.crew.crew import Crew
from hetpipe.errors import CheckpointError, HetpipeError
from hetpipe.optim.average import with_average
from hetpipe.profile.measure import layer_bytes

DECAY = 0.9
PAGE = Path(__file__).parents[2] / "docs" / "training.md"
UNLIKE = {
    "numpy": ("numpy:cpu:0", "pytorch:cpu:0"),
    "opencl": ("opencl:pocl:0", "pytorch:cpu:0"),
}
State = Mapping[str, torch.Tensor]


def average_of(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))


def average_after(model: nn.Module, weights: Sequence[State]) -> State:
    """Return torch's average of a model that has these weights after its updates."""
    model = copy.deepcopy(model)
    average = average_of(model)
    for state in weights:
        model.load_state_dict(state)
        average.update_parameters(model)
    return average.module.state_dict()


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def seeded(kind: Callable[[], nn.Module] = MLP) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def large_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradients overflow at a loss scale that float32 has."""
    return 100 * F.cross_entropy(output, y)


def open_mlp(crew: Crew, kind: Callable[[], nn.Module] = MLP, **options: Any) -> hp.Pipeline:
    """Open a pipeline of two stages and two micro-batches for `batches`."""
    given = {"optimizer": hp.optim.adamw(lr=0.01), "ema": DECAY, **options}
    return pipeline(crew, seeded(kind), large_loss, batches(1)[0], "01", "1f1b", 2, **given)


@pytest.mark.parametrize(
    ("devices", "dtype"),
    [("opencl", torch.float32), ("numpy", torch.float32), ("numpy", torch.float64)],
    ids=str,
)
def test_twenty_updates_equal_torchs(crews: Crews, devices: str, dtype: torch.dtype) -> None:
    """With tied weights on two devices, groups of parameters and a clip."""
    case = CASES["tied_autoencoder"]
    model, generator = seeded(case.model).to(dtype), torch.Generator().manual_seed(1)
    data = [tuple(t.to(dtype) for t in case.batch(generator)) for _ in range(20)]
    plain = copy.deepcopy(model)
    average = average_of(plain)

    def torchs(of: nn.Module) -> torch.optim.Optimizer:
        weights = [p for p in of.parameters() if p.ndim > 1]
        biases = [p for p in of.parameters() if p.ndim < 2]
        groups = [{"params": weights}, {"params": biases, "lr": 0.1, "momentum": 0.5}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    theirs = torchs(plain)
    with user_pipeline(
        crews(UNLIKE[devices]), model, case.loss_fn, data[0], cuts=[3], microbatches=2,
        schedule="1f1b", clip_norm=0.5, ema=DECAY, optimizer=torchs(model),
    ) as pipe:  # fmt: skip
        assert equal(pipe.ema_state_dict(), model.state_dict())  # before the first update
        tolerances = (1e-5, 1e-6) if dtype is torch.float32 else (0.0, 1e-12)
        weights = []
        for number, (x, y) in enumerate(data):
            pipe.step(x, y)
            theirs.zero_grad()
            backward(plain, case.loss_fn, x, y, 2)
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            theirs.step()
            average.update_parameters(plain)
            weights.append(pipe.state_dict())
            if number in (0, 1, 19):
                found = pipe.ema_state_dict()
                check_close(found, average.module.state_dict(), *tolerances)
                check_close(found, average_after(model, weights), 1e-6, tolerances[1])
                torch.testing.assert_close(pipe.predict(x, ema=True), average(x).detach())
                torch.testing.assert_close(pipe.predict(x), plain(x).detach())
        x, y = data[0]
        assert pipe.evaluate([(x, y)], ema=True).loss == pytest.approx(
            case.loss_fn(average(x), y).item(), rel=1e-5
        )
        pipe.copy_to(plain, ema=True)
        assert equal(plain.state_dict(), found)
        assert pipe.diagnose(x, y).verdict == "healthy"


@pytest.mark.parametrize(
    ("counts", "options"),
    [
        ((2, 1), {"optimizer": hp.optim.sgd(lr=0.1)}),
        ((1, 1), {"accumulate": 2, "clip_norm": 0.1}),
    ],
    ids=["replicas", "accumulation"],
)
def test_replicas_and_accumulation(
    crew: Crew, counts: Sequence[int], options: dict[str, Any]
) -> None:
    """The model has batch norms: their buffers are not averaged."""
    data, model = batches(4), seeded(Normalized)
    given = {"optimizer": hp.optim.adamw(lr=0.01), "ema": DECAY, **options}
    with pipeline(
        crew, model, F.cross_entropy, data[0], members_by_stage(crew, counts), "1f1b", 2, **given
    ) as pipe:
        weights = []
        for number, (x, y) in enumerate(data, 1):
            pipe.step(x, y)
            if number % given.get("accumulate", 1) == 0:
                weights.append(pipe.state_dict())
        check_close(pipe.ema_state_dict(), average_after(model, weights), 1e-6, 1e-7)
        assert torch.equal(
            pipe.ema_state_dict()["first.1.running_mean"], weights[-1]["first.1.running_mean"]
        )


def test_skipped_updates_do_not_count(crews: Crews) -> None:
    """The first scale is too high, and after 3 updates the scale is too high again."""
    scale = hp.LossScale(2.0**127, growth=2.0**110, backoff=2.0**-110, interval=3)
    weights, skipped = [], []
    with open_mlp(crews(("pytorch:cpu:0",) * 2), loss_scale=scale) as pipe:
        for x, y in batches(6):
            before = pipe.skipped
            pipe.step(x, y)
            skipped.append(pipe.skipped > before)
            if not skipped[-1]:
                weights.append(pipe.state_dict())
        assert skipped == [True, False, False, False, True, False]
        check_close(pipe.ema_state_dict(), average_after(seeded(), weights), 1e-6, 1e-7)


def test_a_split_layer_is_averaged_whole(crew: Crew) -> None:
    data, model = batches(4), seeded()
    with user_pipeline(
        crew, model, F.cross_entropy, data[0], split={"layers.2": 10}, cuts=[3], microbatches=2,
        schedule="1f1b", ema=DECAY,
    ) as pipe:  # fmt: skip
        weights = []
        for x, y in data:
            pipe.step(x, y)
            weights.append(pipe.state_dict())
        check_close(pipe.ema_state_dict(), average_after(model, weights), 1e-6, 1e-7)


ASYNCHRONOUS: dict[str, tuple[str, Any, int, str]] = {
    "stash": ("pipedream", "012", 1, "stash"),
    "2bw": ("pipedream", "012", 4, "2bw"),
    "pipeoptim": ("pipedream", "012", 1, "pipeoptim"),
    "spectrain": ("pipedream", "012", 1, "spectrain"),
    "asp": ("asp", [("m0", "m1")], 1, "stash"),
}


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_the_newest_weights_are_averaged(crew: Crew, name: str) -> None:
    """The weights after k updates are those of a stream that ends after k mini-batches."""
    schedule, members, microbatches, policy = ASYNCHRONOUS[name]
    weights = []
    for count in range(1, 6):
        with pipeline(
            crew, *delayed.task(), members, schedule, microbatches, weights=policy, ema=DECAY,
            optimizer=hp.optim.sgd(lr=0.03, momentum=0.9),
        ) as pipe:  # fmt: skip
            assert len(list(pipe.run(delayed.batch(n) for n in range(count)))) == count
            weights.append(pipe.state_dict())
            found = pipe.ema_state_dict()
    check_close(found, average_after(delayed.network(), weights), 0.0, 1e-12)


def test_averages_move_with_their_layers(crews: Crews, speeds: Speeds) -> None:
    """One of two tied layers changes its stage."""
    weights = []
    with priced.open_planned(crews(ALIKE[:2]), priced.mixed(), ema=DECAY) as pipe:
        for number in range(6):
            pipe.step(*priced.batch(number))
            weights.append(pipe.state_dict())
            if number == 2:
                assert equal(pipe.ema_state_dict(), pipe.ema_state_dict())
                speeds["m0"] = 3.0
                assert pipe.rebalance().moved
        found = pipe.ema_state_dict()
    check_close(found, average_after(priced.mixed(), weights), 1e-6, 1e-7)


def trained(crew: Crew, data: Any) -> State:
    with open_mlp(crew, Normalized, ema=None) as pipe:
        for x, y in data:
            pipe.step(x, y)
        return pipe.state_dict()


def test_the_weights_come_back_bit_for_bit(crew: Crew) -> None:
    """After errors, between two predictions, and after stages for a new size were loaded."""
    data = batches(4)
    expected = trained(crew, data)
    with open_mlp(crew, Normalized) as pipe:
        for x, y in data[:2]:
            pipe.step(x, y)
        before, average = pipe.state_dict(), pipe.ema_state_dict()
        assert not equal(before, average)

        def fails(output: torch.Tensor, y: torch.Tensor) -> float:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pipe.evaluate(data, {"fails": fails}, ema=True)
        assert equal(pipe.state_dict(), before)
        predictions = pipe.predict_batches([x[:5] for x, _ in data], ema=True)
        first = next(predictions)
        assert equal(pipe.ema_state_dict(), average)
        assert torch.equal(first, pipe.predict(data[0][0][:5], ema=True))
        assert equal(pipe.state_dict(), before)
        pipe.step(*data[2])
        next(predictions)  # by the present average
        pipe.step(*data[3])
        assert equal(pipe.state_dict(), expected)


def test_a_checkpoint_keeps_the_average(crew: Crew, tmp_path: Path) -> None:
    data = batches(6)
    with open_mlp(crew) as pipe:
        for x, y in data[:3]:
            pipe.step(x, y)
        pipe.save(tmp_path)
        kept = pipe.ema_state_dict()
        for x, y in data[3:]:
            pipe.step(x, y)
        wanted = pipe.ema_state_dict()
    with open_mlp(crew, checkpoint=tmp_path) as pipe:
        assert equal(pipe.ema_state_dict(), kept)
        for x, y in data[3:]:
            pipe.step(x, y)
        assert equal(pipe.ema_state_dict(), wanted)
    with pytest.raises(CheckpointError, match=r"trained with ema=0.9, and would .* ema=None"):
        open_mlp(crew, checkpoint=tmp_path, ema=None)
    with open_mlp(crew, checkpoint=tmp_path, ema=None, changed=["ema"]) as pipe:
        with pytest.raises(HetpipeError, match="keeps no average"):
            pipe.ema_state_dict()
        pipe.save(tmp_path)
        saved = pipe.state_dict()
    with pytest.raises(CheckpointError, match=r"changed=\['ema'\]"):
        open_mlp(crew, checkpoint=tmp_path)
    with open_mlp(crew, checkpoint=tmp_path, changed=["ema"]) as pipe:
        assert equal(pipe.ema_state_dict(), saved)
        pipe.step(*data[0])
        new = {name: DECAY * saved[name] + (1 - DECAY) * v for name, v in pipe.state_dict().items()}
        check_close(pipe.ema_state_dict(), new, 1e-5, 1e-7)


def test_the_lines_on_the_page_run(crew: Crew) -> None:
    (section,) = re.findall(r"\n## Average of the weights\n(.*?)\n## ", PAGE.read_text(), re.DOTALL)
    code = "\n".join(re.findall(r"^    (.*)$", section, re.MULTILINE))
    (x, y), model = batches(1)[0], seeded()
    names = {"hp": hp, "model": model, "loss_fn": F.cross_entropy, "x": x, "y": y}
    exec(code, {**names, "cluster": Cluster(crew.cluster.members[:2])})
    assert not equal(model.state_dict(), seeded().state_dict())


def test_the_memory_of_the_average_is_counted(crew: Crew) -> None:
    captured = shared(seeded(), F.cross_entropy, batches(1)[0])
    count = len(captured.layer_names)
    plain = hp.optim.adamw()
    sizes = []
    for optimizer in (plain, with_average(plain, DECAY)):
        stages = captured.stage_graphs(range(1, count), [{}] * count, [12], optimizer, extras=())
        sizes.append(layer_bytes(captured, stages, 12))
    for one, other in zip(*sizes, strict=True):
        assert other.state_nbytes == one.state_nbytes + one.params_nbytes


def test_wrong_decays_and_missing_averages_are_refused(crew: Crew) -> None:
    for wrong in (1.5, 1, 0, -0.1, True, "0.9", float("nan")):
        with pytest.raises(HetpipeError, match=r"ema=.*: give the decay of the average, a number"):
            open_mlp(crew, ema=wrong)
    with open_mlp(crew, ema=None) as pipe:
        (x, y), model = batches(1)[0], MLP()
        calls: list[Callable[[], Any]] = [
            pipe.ema_state_dict,
            lambda: pipe.copy_to(model, ema=True),
            lambda: pipe.evaluate([(x, y)], ema=True),
            lambda: pipe.predict(x, ema=True),
        ]
        for call in calls:
            with pytest.raises(HetpipeError, match=r"keeps no average .* ema=0.999"):
                call()
