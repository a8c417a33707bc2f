"""Batches of varying length: losses equal torch's on the same padding, and each bucket is captured
and compiled once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from crews import Crews
from engine_backends import EarlyBackend
from pipelines import user_pipeline
from torch import nn

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member
from hetpipe.crew.crew import Crew
from hetpipe.errors import CaptureError, CheckpointError, HetpipeError
from hetpipe.sdk.host import registry

PAGE = Path(__file__).parents[2] / "docs" / "shapes.md"
LENGTHS = (4, 8, 16)
VARIED = (3, 7, 16, 4, 10, 8)
UNLIKE = ("numpy:cpu:0", "pytorch:cpu:0", "numpy:cpu:0")
WORDS, WIDTH = 12, 8
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.norm(hidden)).chunk(3, -1))
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :].bool())
        return hidden + self.out(read.squeeze(1)).tanh()


class Text(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTHS[-1], WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS)

    def used(self, length: int) -> Sequence[nn.Module]:
        return [*self.blocks]

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        hidden = self.tokens(input_ids) + self.places(torch.arange(length))
        for block in self.used(length):
            hidden = block(hidden, attention_mask)
        return self.head(hidden)


class Shallow(Text):
    """Short texts skip a layer."""

    def used(self, length: int) -> Sequence[nn.Module]:
        return [*self.blocks][: 1 if length < LENGTHS[1] else 2]


class Forked(nn.Module):
    """Short texts use another weight in the same layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WORDS)
        self.short, self.long = (nn.Parameter(torch.ones(WORDS)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x) * (self.short if x.shape[1] < LENGTHS[1] else self.long)


def token_loss(output: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    losses = F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum")
    return losses, (y != -100).sum()


def word_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def batch(length: int, samples: int = 4, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(100 * length + seed)
    ids, y = torch.randint(WORDS, (2, samples, length), generator=generator)
    mask = torch.ones(samples, length, dtype=torch.int64)
    mask[0, length - 1] = 0
    return {"input_ids": ids, "attention_mask": mask}, y.masked_fill(mask == 0, -100)


def padded(x: Mapping[str, torch.Tensor], y: torch.Tensor) -> Batch:
    more = next(bucket for bucket in LENGTHS if bucket >= y.shape[1]) - y.shape[1]
    return {n: F.pad(leaf, (0, more)) for n, leaf in x.items()}, F.pad(y, (0, more), value=-100)


def text() -> Text:
    torch.manual_seed(0)
    return Text()


@cache
def captured() -> Captured:
    return hp.capture(text(), token_loss, batch(6), buckets=LENGTHS)


def open_text(crew: Crew, **options: Any) -> hp.Pipeline:
    given = {"cuts": [4], "microbatches": 2, "schedule": "1f1b", "captured": captured(), **options}
    return user_pipeline(crew, text(), token_loss, batch(6), **{"buckets": LENGTHS, **given})


def torchs(lengths: Sequence[int] = VARIED, accumulate: int = 1) -> tuple[list[float], Text]:
    """Return torch's losses on the padded batches, and the model after them."""
    model = text()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, total, count = [], torch.zeros(()), 0
    for length in lengths:
        x, y = padded(*batch(length))
        summed, counted = token_loss(model(**x), y)
        losses.append((summed / counted).item())
        total, count = total + summed, count + int(counted)
        if len(losses) % accumulate == 0:
            optimizer.zero_grad()
            (total / count).backward()
            optimizer.step()
            total, count = torch.zeros(()), 0
    return losses, model


@pytest.fixture
def crew(crews: Crews) -> Crew:
    return crews(UNLIKE)


def check_state(pipe: hp.Pipeline, model: nn.Module) -> None:
    for name, value in pipe.state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], atol=1e-5), name


@pytest.mark.parametrize("devices", [UNLIKE, ("opencl:pocl:0", "pytorch:cpu:0")], ids=str)
def test_losses_and_weights_equal_torchs_on_the_same_padding(
    crews: Crews, devices: Sequence[str]
) -> None:
    losses, model = torchs()
    with open_text(crews(devices)) as pipe:
        found = [result.loss for result in pipe.run(batch(length) for length in VARIED)]
        assert found == pytest.approx(losses, rel=1e-4)
        check_state(pipe, model)
        loss, grads = pipe.gradients(*batch(5))
        x, y = padded(*batch(5))
        summed, count = token_loss(model(**x), y)
        model.zero_grad()
        (summed / count).backward()
        assert loss == pytest.approx((summed / count).item(), rel=1e-4)
        assert torch.allclose(grads["head.weight"], model.head.weight.grad, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe", "cuts": [4], "replicas": [1, 2]},
        {"schedule": "zb-h1"},
        {"accumulate": 2},
    ],
    ids=str,
)
def test_every_way_to_train_equals_torch(crew: Crew, priced: None, options: dict[str, Any]) -> None:
    losses, model = torchs(accumulate=options.get("accumulate", 1))
    with open_text(crew, **options) as pipe:
        assert [pipe.step(*batch(n)) for n in VARIED] == pytest.approx(losses, rel=1e-4)
        check_state(pipe, model)


@pytest.mark.parametrize("transport", ["local", "shared-memory"])
def test_batches_of_unlike_buckets_are_under_way_at_once(crews: Crews, transport: str) -> None:
    """The padding changes no loss, so the reference pads every batch to the largest bucket."""
    options = {"schedule": "pipedream", "microbatches": 1}
    crew = crews(UNLIKE[:2], transport)
    with open_text(crew, **options) as pipe:
        found = [result.loss for result in pipe.run(batch(n) for n in VARIED * 2)]
        assert pipe.predict(batch(3)[0]).shape == (4, 3, WORDS)
    one = {"buckets": LENGTHS[-1:], "captured": None}
    with open_text(crew, **options, **one) as pipe:
        whole = [result.loss for result in pipe.run(batch(n) for n in VARIED * 2)]
    assert found == pytest.approx(whole, rel=1e-4)


class Answers(nn.Module):
    """Points at a place in the text, and names one of 16 classes, as many as the largest bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.place, self.kind = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, LENGTHS[-1])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.tokens(x)
        return {"place": self.place(hidden).squeeze(2), "kind": self.kind(hidden.mean(1))}


def place_loss(output: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["place"], y) + F.cross_entropy(output["kind"], y)


def test_outputs_are_cut_to_the_length_of_the_batch(crew: Crew) -> None:
    def accuracy(output: torch.Tensor, y: torch.Tensor) -> float:
        return float((output.argmax(2) == y).float().mean())

    model = text().eval()
    with open_text(crew) as pipe:
        for length in (3, 8, 13, 16):
            x, y = batch(length)
            right = model(**padded(x, y)[0])[:, :length]
            assert torch.allclose(pipe.predict(x), right, atol=1e-5)
            found = pipe.evaluate([(x, y)], {"accuracy": accuracy})
            assert found.metrics["accuracy"] == pytest.approx(accuracy(right, y))
            summed, count = token_loss(right, y)
            assert found.loss == pytest.approx((summed / count).item(), rel=1e-4)


@pytest.mark.parametrize("lengths", [LENGTHS[1:], LENGTHS[-1:]], ids=str)
def test_only_the_dimension_of_the_length_is_cut(crew: Crew, lengths: Sequence[int]) -> None:
    x, y = torch.randint(WORDS, (4, 11)), torch.randint(8, (4,))
    options = {"cuts": [1], "microbatches": 1, "schedule": "1f1b", "buckets": lengths}
    with user_pipeline(crew, Answers(), place_loss, (x, y), **options) as pipe:
        output = pipe.predict(x)
        assert output["place"].shape == (4, 11)
        assert output["kind"].shape == (4, 16)
        if len(lengths) > 1:
            with pytest.raises(HetpipeError, match=r"y\[3\] is 9, but .* has 8 classes"):
                pipe.step(x[:, :7], torch.tensor([0, 1, 2, 9]))


def test_each_bucket_is_captured_and_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_instances", dict(registry._instances))
    registry.register_backend(EarlyBackend)
    counted = hp.capture(text(), token_loss, batch(6), buckets=LENGTHS)
    assert counted.exports <= len(LENGTHS)
    members = tuple(Member(f"m{n}", "early:cpu:0") for n in range(2))
    with (
        Crew.start(Cluster(members, transport="local")) as crew,
        open_text(crew, captured=counted) as pipe,
    ):

        def compiled() -> list[str]:
            calls = crew.call(["m0", "m1"], "engine_backends:forecasts")
            return [graph for _, graphs in calls for graph in graphs]

        # In each stage a forward and a backward for each length, an update, and a check.
        graphs = compiled()
        assert len(graphs) == len(set(graphs)) == 2 * (2 * len(LENGTHS) + 2)
        for length in (*VARIED, *VARIED):
            pipe.step(*batch(length))
        assert not compiled()
        pipe.predict(batch(3)[0])
        assert compiled()
        for length in VARIED:
            pipe.predict(batch(length)[0])
        assert not compiled()
        assert counted.exports <= 2 * len(LENGTHS)


def test_a_training_continues_from_a_checkpoint(crew: Crew, tmp_path: Path) -> None:
    with open_text(crew, optimizer=hp.optim.adamw(lr=0.01)) as pipe:
        for length in VARIED[:3]:
            pipe.step(*batch(length))
        pipe.save(tmp_path / "saved")
        right = [pipe.step(*batch(length)) for length in VARIED[3:]]
    options = {
        "cluster": crew.cluster, "crew": crew, "optimizer": hp.optim.adamw(lr=0.01),
    }  # fmt: skip
    load = (tmp_path / "saved", text(), token_loss, batch(6))
    with hp.Pipeline.load(*load, buckets=LENGTHS, captured=captured(), **options) as pipe:
        assert [pipe.step(*batch(length)) for length in VARIED[3:]] == right
    with pytest.raises(CheckpointError, match="the checkpoint was trained with buckets="):
        hp.Pipeline.load(*load, buckets=[8, 16], **options)


def test_a_pipeline_with_buckets_explains_and_diagnoses_itself(crew: Crew, priced: None) -> None:
    with open_text(crew, priced=True) as pipe:
        for length in VARIED:
            pipe.step(*batch(length))
        assert "padded to a length of 4, 8, 16 in x.input_ids" in str(pipe.plan)
        assert "times and memory are for 16" in str(pipe.plan)
        assert pipe.diagnose(*batch(5)).verdict == "healthy"
        str(pipe.explain())


def test_long_and_odd_batches_are_refused(crew: Crew) -> None:
    with open_text(crew) as pipe:
        x, y = batch(17)
        for call in (
            lambda: pipe.step(x, y),
            lambda: pipe.predict(x),
            lambda: pipe.evaluate([(x, y)]),
            lambda: pipe.gradients(x, y),
            lambda: list(pipe.run([(x, y)])),
        ):
            with pytest.raises(
                HetpipeError, match=r"length 17 .* bucket, 16: cut .*\[4, 8, 16, 17\]"
            ):
                call()
        with pytest.raises(HetpipeError, match=r"in their length: x.input_ids 5, .* y 6"):
            pipe.step(batch(5)[0], batch(6)[1])
        with pytest.raises(HetpipeError, match=r"\(4,\), .* only dimensions 0 and 1 may differ"):
            pipe.step(batch(5)[0], torch.zeros(4, dtype=torch.int64))
        assert pipe.step(*batch(5)) > 0


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ([4], "length 6 is above the largest bucket, 4"),
        (hp.Buckets([8], dim=2), r"no tensor of x has the dimension 2 .*x.input_ids \(4, 6\)"),
        (hp.Buckets([8], dim={"ids": 1}), "names 'ids', which .*mean x.input_ids"),
        (hp.Buckets([8], dim={"y": 1}), "no tensor of x has the dimension"),
        (hp.Buckets([8], pad={"y": -100.5}), "pad y with -100.5, which int64 cannot hold"),
    ],
    ids=["short", "dimension", "name", "only y", "value"],
)  # fmt: skip
def test_buckets_that_do_not_fit_the_example_are_refused(buckets: Any, message: str) -> None:
    with pytest.raises(HetpipeError, match=message):
        hp.capture(text(), token_loss, batch(6), buckets=buckets)


def test_a_value_that_is_not_known_is_refused() -> None:
    x, y = torch.randn(4, 6, 3), torch.randn(4, 6)
    with pytest.raises(HetpipeError, match=r"must pad x, a tensor of float32.*pad=\{'x': 0\}"):
        hp.capture(nn.Linear(3, 1), F.mse_loss, (x, y), buckets=[8])
    with pytest.raises(HetpipeError, match="must pad y, a tensor of float32"):
        hp.capture(nn.Linear(3, 1), F.mse_loss, (x, y), buckets=hp.Buckets([8], pad={"x": 0}))


def squares(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((output - y.float().unsqueeze(2)) ** 2).mean()


def test_labels_that_the_loss_does_not_leave_out_are_refused() -> None:
    x, y = batch(6)
    with pytest.raises(HetpipeError, match="pad y with -100, and it is not known that the loss"):
        hp.capture(Text(), squares, (x, y), buckets=[8])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Shallow, r"layers for 4 \(length 4\) samples in training but .*: layer 4 is head, not"),
        (Forked, r"reads long for 4 samples but not for 4 \(length 4\), and every update"),
    ],
)
def test_a_model_that_depends_on_the_length_is_refused(model: Any, message: str) -> None:
    x, y = batch(6)
    x = x if model is Shallow else x["input_ids"]
    with pytest.raises(CaptureError, match=message):
        hp.capture(model(), word_loss, (x, y), buckets=[4, 8])


def test_a_capture_must_have_the_pipelines_buckets(crew: Crew) -> None:
    with pytest.raises(HetpipeError, match=r"captured has Buckets\(.*\(4, 8, 16\).*, not Buckets"):
        open_text(crew, buckets=[8, 16])


def test_the_pages_script_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    exec(compile(script, "docs/shapes.md", "exec"), {"__name__": "page"})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 17
    assert lines[-1].startswith("torch.Size([3, ")
