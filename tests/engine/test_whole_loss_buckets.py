"""Buckets with a loss over whole mini-batches: losses and weights equal torch's on the same
padding."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelines import user_pipeline
from reference import check_close
from torch import Tensor, nn

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError

LENGTHS = (4, 6, 9)
VARIED = (3, 6, 9, 4, 8, 5)
WORDS, WIDTH, ROWS = 11, 6, 5  # the width is a bucket's length, too
LR = 0.1


class Encoder(nn.Module):
    """Returns the mean of the hidden states that the mask keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        kept = mask.unsqueeze(-1).to(self.tokens.weight.dtype)
        return (self.body(self.tokens(ids)) * kept).sum(1) / kept.sum(1)


class Texts(nn.Module):
    """Two encoders of pairs of texts; the second one reads the texts backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Encoder(), Encoder()

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(ids, mask), self.other(ids.flip(1), mask.flip(1))


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        one, other = (F.normalize(each, dim=1) for each in out)
        logits = self.scale.exp() * one @ other.t()
        return (F.cross_entropy(logits, y) + F.cross_entropy(logits.t(), y)) / 2


class Tagger(nn.Module):
    """Returns scores of each token, and a tensor without a length."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        hidden = self.encoder.body(self.encoder.tokens(ids))
        return {"scores": self.head(hidden), "text": self.encoder(ids, mask)}


def weighted(out: dict[str, Tensor], y: Tensor) -> Tensor:
    """Class weights with a mean over all tokens, and the variance over texts."""
    weight = torch.arange(1.0, WORDS + 1, dtype=out["scores"].dtype)
    tags = F.cross_entropy(out["scores"].flatten(0, 1), y.flatten(), weight=weight)
    return tags - 0.1 * out["text"].var(0).mean()


Batch = tuple[dict[str, Tensor], Tensor]


def batch(length: int, tags: bool, rows: int = ROWS) -> Batch:
    generator = torch.Generator().manual_seed(length)
    ids, y = torch.randint(WORDS, (2, rows, length), generator=generator)
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, length - 1] = 0
    x = {"ids": ids, "mask": mask}
    return x, y.masked_fill(mask == 0, -1) if tags else torch.arange(rows)


def padded(x: dict[str, Tensor], y: Tensor, tags: bool) -> Batch:
    more = next(n for n in LENGTHS if n >= x["ids"].shape[1]) - x["ids"].shape[1]
    y = F.pad(y, (0, more), value=-1) if tags else y
    return {name: F.pad(leaf, (0, more)) for name, leaf in x.items()}, y


def ignoring(out: dict[str, Tensor], y: Tensor) -> Tensor:
    return weighted(out, y.masked_fill(y < 0, -100))


def opened(crew: Crew, model: nn.Module, loss: Any, tags: bool, **options: Any) -> hp.Pipeline:
    buckets = hp.Buckets(LENGTHS, pad={"mask": 0, **({"y": -1} if tags else {})})
    options = {
        "optimizer": hp.optim.sgd(lr=LR), "cuts": [2], "microbatches": 2, "buckets": buckets,
        "loss_over": "mini-batch", **options,
    }  # fmt: skip
    return user_pipeline(crew, model, loss, batch(7, tags), **options)


def case(tags: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if tags:
        return Tagger().double(), ignoring
    return Texts().double(), Contrast().double()


def torchs(model: nn.Module, loss: Any, lengths: tuple[int, ...], tags: bool) -> list[float]:
    """Train the model and the loss in torch, and return the losses."""
    modules = nn.ModuleList([model, *([loss] if isinstance(loss, nn.Module) else [])])
    optimizer = torch.optim.SGD(modules.parameters(), lr=LR)
    losses = []
    for length in lengths:
        x, y = padded(*batch(length, tags), tags)
        found = loss(model(**x), y)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(float(found.detach()))
    return losses


@pytest.mark.parametrize("tags", [False, True])
def test_training_equals_torch_on_the_same_padding(crew: Crew, tags: bool, tmp_path: Path) -> None:
    """Outputs with and without a length, in every bucket; a resume continues bit for bit."""
    model, loss = case(tags)
    plain, plain_loss = copy.deepcopy((model, loss))
    with opened(crew, model, loss, tags) as pipe:
        name = "y (dimension 1)" if tags else "x.mask (dimension 1)"
        assert any(name in note for note in pipe.plan.notes)
        found = [result.loss for result in pipe.run(batch(n, tags) for n in VARIED)]
        assert found == pytest.approx(torchs(plain, plain_loss, VARIED, tags), rel=1e-10)
        check_close(pipe.state_dict(), plain.state_dict(), 1e-10, 1e-10)
        pipe.save(tmp_path)
        expected = [pipe.step(*batch(n, tags)) for n in (9, 3)]
    more = {"cluster": crew.cluster, "crew": crew, "optimizer": hp.optim.sgd(lr=LR)}
    buckets = hp.Buckets(LENGTHS, pad={"mask": 0, **({"y": -1} if tags else {})})
    with hp.Pipeline.load(
        tmp_path, model, loss, batch(7, tags), loss_over="mini-batch", buckets=buckets, **more
    ) as pipe:
        assert [pipe.step(*batch(n, tags)) for n in (9, 3)] == expected


def test_other_calls_take_every_length(crew: Crew) -> None:
    model, loss = case(tags=True)
    with opened(crew, model, loss, tags=True, accumulate=2, clip_norm=0.5) as pipe:
        batches = [batch(n, True, rows) for n, rows in ((3, 5), (8, 4), (5, 2))]
        pairs = [padded(*each, True) for each in batches]
        losses = [float(loss(model(**x), y).detach()) for x, y in pairs]
        mean = sum(each * len(b[1]) for each, b in zip(losses, batches, strict=True)) / 11
        assert pipe.evaluate(batches).loss == pytest.approx(mean, rel=1e-10)
        for (x, y), expected in zip(batches, losses, strict=True):
            assert pipe.gradients(x, y)[0] == pytest.approx(expected, rel=1e-10)
            scores = pipe.predict(x)["scores"]
            assert torch.allclose(scores, model(**x)["scores"], atol=1e-12)
        found = pipe.diagnose(*batches[0])
        assert (found.verdict, found.notes) == ("healthy", ()), str(found)


class Squares(Tagger):
    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        hidden = self.encoder.tokens(ids)
        return {"scores": self.head(hidden), "text": hidden @ hidden.transpose(1, 2)}


class Doubled(Tagger):
    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.encoder.tokens(ids))
        return {"scores": scores, "text": torch.cat([scores, scores], 1)}


@pytest.mark.parametrize(
    ("model", "pad", "text"),
    [
        (Squares(), {"y": -1}, r"tensor 1 .* \(5, 9, 9\) for batches of length 9, and \(5, 6, 6\)"),
        (Doubled(), {"y": -1}, r"tensor 1 .* \(5, 18, 11\) for batches of length 9"),
        (Tagger(), {}, r"not known which labels loss_fn leaves out: give the value, .*'y': -100"),
    ],
)
def test_unclear_padding_is_refused(
    crew: Crew, model: nn.Module, pad: dict[str, float], text: str
) -> None:
    buckets = hp.Buckets(LENGTHS, pad={"mask": 0, **pad})
    with pytest.raises(HetpipeError, match=text):
        opened(crew, model, ignoring, tags=True, buckets=buckets, cuts=[1])
