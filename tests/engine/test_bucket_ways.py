"""Buckets together with other options give torch's numbers on the same padding, or are refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from crews import Crews
from fits import Record
from pipelines import user_pipeline
from plans import unpriced
from priced import Speeds
from test_buckets import (
    LENGTHS,
    UNLIKE,
    VARIED,
    WORDS,
    Batch,
    Text,
    batch,
    captured,
    check_state,
    open_text,
    padded,
    text,
    token_loss,
    torchs,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.capture.export.example import Example
from hetpipe.cluster import Cluster, Link, Member
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError, NoMeanError

Members = list[str | tuple[str, ...]]
Shares = list[tuple[float, ...]]


@pytest.fixture
def crew(crews: Crews) -> Crew:
    return crews(UNLIKE)


def whole(length: int) -> Batch:
    """Return a batch whose mask keeps every word."""
    x, y = batch(max(length, 1))
    kept = {"input_ids": x["input_ids"], "attention_mask": torch.ones_like(x["attention_mask"])}
    return {name: leaf[:, :length] for name, leaf in kept.items()}, y.clamp_min(0)[:, :length]


def right_output(model: nn.Module, length: int) -> torch.Tensor:
    x, y = whole(length)
    output: torch.Tensor = model(**padded(x, y)[0])
    return output[:, :length].detach()


def mean(output: torch.Tensor, y: torch.Tensor) -> float:
    summed, count = token_loss(output, y)
    return (summed / count).item()


def open_planned(
    crew: Crew, model: nn.Module, made: Captured, example: Any, shares: Shares, members: Members,
    samples: int, **options: Any,
) -> hp.Pipeline:  # fmt: skip
    """Open a pipeline of two stages whose replicas have these shares."""
    plan, costs = unpriced(
        made, members, "1f1b", samples, 1, shares=shares, weights="flush", cuts=[1]
    )
    return user_pipeline(
        crew, model, token_loss, example, plan=plan, costs=costs, captured=made, **options
    )


def test_lengths_at_the_ends_of_buckets(crew: Crew) -> None:
    model = text().eval()
    with open_text(crew) as pipe:
        for length in (1, 4, 5):
            x, y = whole(length)
            right = right_output(model, length)
            torch.testing.assert_close(pipe.predict(x), right, atol=1e-5, rtol=1e-4)
            assert pipe.evaluate([(x, y)]).loss == pytest.approx(mean(right, y), rel=1e-4)
            assert pipe.gradients(x, y)[0] == pytest.approx(mean(right, y), rel=1e-4)
        x, y = whole(0)
        assert pipe.predict(x).shape == (4, 0, WORDS)
        with pytest.raises(NoMeanError, match="leave such a mini-batch out"):
            pipe.step(x, y)


class Noisy(Text):
    """The same with dropout, and without places. In eval mode other tensors cross its cuts."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.tokens(input_ids), 0.3, self.training)
        for block in self.blocks:
            hidden = F.dropout(block(hidden, attention_mask), 0.3, self.training)
        output: torch.Tensor = self.head(hidden)
        return output


def noisy() -> Text:
    torch.manual_seed(0)
    return Noisy()


@cache
def noisy_capture() -> Captured:
    return hp.capture(noisy(), token_loss, whole(6), buckets=LENGTHS)


def test_dropout_and_unequal_shares(crew: Crew) -> None:
    """Each replica draws the numbers of its rows of the padded micro-batch."""
    found = []
    ways: list[tuple[Shares, Members]] = [
        ([(1.0,), (1.0,)], ["m0", "m1"]),
        ([(0.25, 0.75), (1.0,)], [("m0", "m1"), "m2"]),
    ]
    for shares, members in ways:
        how = noisy(), noisy_capture(), whole(6), shares, members, 4
        with open_planned(crew, *how, buckets=LENGTHS) as pipe:
            losses = [pipe.step(*whole(length)) for length in VARIED]
            evaluated = pipe.evaluate([whole(length) for length in VARIED]).loss
            found.append(([*losses, evaluated], pipe.predict(whole(3)[0])))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-5, rtol=1e-4)


def test_products_in_bfloat16(crews: Crews) -> None:
    losses, _ = torchs()
    options: dict[str, Any] = {"precision": "bfloat16", "captured": None}
    with open_text(crews(("pytorch:cpu:0",) * 2), **options) as pipe:
        assert [pipe.step(*batch(length)) for length in VARIED] == pytest.approx(losses, rel=0.05)
        assert pipe.predict(batch(3)[0]).shape == (4, 3, WORDS)


class Wave(nn.Module):
    """Normalises frames over all samples and places, those of the padding among them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, (1, 3), padding=(0, 1)), nn.BatchNorm2d(6)
        self.last = nn.Linear(6, WORDS)

    def forward(self, frames: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(frames)).relu().squeeze(2).transpose(1, 2)
        output: torch.Tensor = self.last(hidden * (ids != 0).unsqueeze(2))
        return output


def wave(length: int, to: int = 0) -> Batch:
    """Return 8 samples of this length, padded to another one."""
    generator = torch.Generator().manual_seed(length)
    frames = torch.randn(8, 3, 1, length, generator=generator)
    ids, y = torch.randint(1, WORDS, (2, 8, length), generator=generator)
    more = (0, max(to - length, 0))
    return {"frames": F.pad(frames, more), "ids": F.pad(ids, more)}, F.pad(y, more, value=-100)


def wave_model() -> Wave:
    torch.manual_seed(0)
    return Wave()


def test_statistics_of_unequal_replicas_count_the_padding(crew: Crew) -> None:
    """Two tensors of x vary in different dimensions."""
    buckets = hp.Buckets([4, 8], dim={"frames": 3, "ids": 1, "y": 1}, pad={"frames": 0.0})
    example = Example(*wave(3), buckets)
    made = Captured(wave_model(), token_loss, example, sync_batch_norm=True)
    shares: Shares = [(0.25, 0.75), (1.0,)]
    how = wave_model(), made, wave(3), shares, [("m0", "m1"), "m2"], 8
    model = wave_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with open_planned(crew, *how, buckets=buckets, sync_batch_norm=True) as pipe:
        for length, bucket in ((3, 4), (8, 8), (5, 8), (4, 4)):
            x, y = wave(length, bucket)
            summed, count = token_loss(model(**x), y)
            optimizer.zero_grad()
            (summed / count).backward()
            optimizer.step()
            assert pipe.step(*wave(length)) == pytest.approx((summed / count).item(), rel=1e-4)
        for name, value in pipe.state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[name], atol=1e-4, rtol=1e-4)
        right = model.eval()(**wave(6, 8)[0])[:, :6].detach()
        torch.testing.assert_close(pipe.predict(wave(6)[0]), right, atol=1e-4, rtol=1e-4)


class Lengths:
    """A metric that notes the lengths of outputs and labels."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def update(self, output: torch.Tensor, y: torch.Tensor) -> None:
        self.seen.append((output.shape[1], y.shape[1]))

    def compute(self) -> float:
        return len(self.seen)


def test_forwards_without_an_optimizer(crew: Crew) -> None:
    model, lengths = text().eval(), Lengths()
    options = {"optimizer": None, "captured": None}
    with open_text(crew, **options) as pipe:
        outputs = pipe.predict_batches(whole(length)[0] for length in VARIED)
        for length, output in zip(VARIED, outputs, strict=True):
            right = right_output(model, length)
            torch.testing.assert_close(output, right, atol=1e-5, rtol=1e-4)
        found = pipe.evaluate([whole(length) for length in VARIED], {"lengths": lengths})
        weights = [whole(length)[1].numel() for length in VARIED]
        means = [mean(right_output(model, length), whole(length)[1]) for length in VARIED]
        expected = sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)
        assert found.loss == pytest.approx(expected, rel=1e-4)
        assert lengths.seen == [(length, length) for length in VARIED]


def test_layers_move_in_all_buckets(crew: Crew, speeds: Speeds) -> None:
    """Speeds are learnt in the largest bucket."""
    lengths = [3, 7, *[16] * 8, 4, 10, 8]
    losses, model = torchs(lengths)
    with open_text(crew, cuts=None) as pipe:
        before = pipe.plan.cuts
        speeds["m1"] = 4.0  # it has most layers
        found = [pipe.step(*batch(length)) for length in lengths[:2]]
        assert not pipe.rebalance(10**9).moved
        found += [pipe.step(*batch(length)) for length in lengths[2:-3]]
        assert pipe.rebalance(10**9).moved
        assert pipe.plan.cuts != before
        found += [pipe.step(*batch(length)) for length in lengths[-3:]]
        assert found == pytest.approx(losses, rel=1e-4)
        check_state(pipe, model)


def members_of(kind: str) -> tuple[Member, ...]:
    if kind == "boards":
        return tuple(Member(f"m{n}", "", board="vcu118", numerics=UNLIKE[n]) for n in range(2))
    return Member("m0", UNLIKE[0], speed=0.5), Member("m1", UNLIKE[1])


@pytest.mark.parametrize("kind", ["boards", "emulated"])
def test_boards_and_emulated_devices(kind: str) -> None:
    losses, _ = torchs()
    cluster = Cluster(members_of(kind), {frozenset(("m0", "m1")): Link(1e-5, 1e9)}, "local")
    with hp.Pipeline(
        text(), token_loss, batch(6), cluster=cluster, buckets=LENGTHS, captured=captured(),
        cuts=[4], microbatches=2, schedule="1f1b", optimizer=hp.optim.sgd(lr=0.1),
    ) as pipe:  # fmt: skip
        found, steps_s = [], []
        for length in VARIED:
            found.append(pipe.step(*batch(length)))
            steps_s.append(pipe.modelled_step_s or 0.0)
        assert found == pytest.approx(losses, rel=1e-4)
        if kind == "boards":  # a short mini-batch has a shorter modelled time
            assert steps_s[2] == pytest.approx(pipe.plan.step_s)
            assert steps_s[0] == steps_s[3] < steps_s[1] < steps_s[2]


class Texts(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(1, 17, (14,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(WORDS, (self.lengths[index],), generator=generator)


def collate(texts: list[torch.Tensor]) -> Batch:
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, -100)


def test_a_fit_continues_in_an_epoch_of_bucket_batches(crew: Crew, tmp_path: Path) -> None:
    """The loader has workers, the model has dropout, and the last mini-batch is smaller."""
    texts = Texts()

    def fit(record: Record, **how: Any) -> dict[str, torch.Tensor]:
        batches = hp.BucketBatches(texts.lengths, LENGTHS, 4, seed=1)
        loader = DataLoader(texts, batch_sampler=batches, collate_fn=collate, num_workers=2)
        options: dict[str, Any] = {"captured": noisy_capture(), "buckets": LENGTHS, "cuts": [4]}
        options |= {"microbatches": 2, "schedule": "1f1b", "optimizer": hp.optim.adamw(lr=0.01)}
        with user_pipeline(crew, noisy(), token_loss, whole(6), **options) as pipe:
            pipe.fit(loader, 2, callbacks=[record], **how)
            return pipe.state_dict()

    undisturbed, first, second = Record(), Record((2, 2), lambda state: state.stop()), Record()
    right = fit(undisturbed)
    fit(first, folder=tmp_path)
    state = fit(second, folder=tmp_path, resume="auto")
    assert len(first.losses) == 4 + 2
    assert first.losses + second.losses == undisturbed.losses
    assert all(torch.equal(state[name], value) for name, value in right.items())


class Translation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.words(target) + self.words(source[:, :1]))
        return output


def pair(source: int, target: int) -> Batch:
    ids = torch.ones(4, source + target, dtype=torch.int64)
    x = {"source": ids[:, :source], "target": ids[:, :target]}
    return x, ids[:, :target]


@pytest.mark.parametrize(
    ("dim", "message"),
    [
        (1, r"tensors of x differ in dimension 1: x.source 5, x.target 7; name the tensors"),
        ({"source": 1, "target": 1, "y": 1}, r"x.source 5, x.target 7, y 7; pad them to one"),
        ({"source": (1, 2)}, "for source: give the number of one dimension.*length x length"),
    ],
    ids=["a number", "both", "two dimensions"],
)
def test_two_lengths_are_refused(dim: Any, message: str) -> None:
    with pytest.raises(HetpipeError, match=message):
        hp.capture(Translation(), token_loss, pair(5, 7), buckets=hp.Buckets([8], dim=dim))


def test_one_of_two_lengths_varies(crew: Crew) -> None:
    buckets = hp.Buckets([8], dim={"target": 1, "y": 1})
    options: dict[str, Any] = {"buckets": buckets, "cuts": [1], "microbatches": 1}
    example = pair(5, 7)
    with user_pipeline(
        crew, Translation(), token_loss, example, schedule="1f1b", **options
    ) as pipe:
        assert pipe.predict(pair(5, 6)[0]).shape == (4, 6, WORDS)
        with pytest.raises(HetpipeError, match=r"x.source has shape \(4, 6\).* only the first dim"):
            pipe.predict(pair(6, 6)[0])
