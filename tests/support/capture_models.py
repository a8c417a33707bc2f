"""Small models that together contain everything that makes capture hard."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from hetpipe.capture import Captured


class Case(NamedTuple):
    """A model, its loss and a batch of 12 samples; float64 unless a model forbids it."""

    model: Callable[[], nn.Module]
    loss_fn: Callable[[Any, Any], Any]
    batch: Callable[[], tuple[Any, Any]]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.bn(self.stem(x)), inplace=True))
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return self.head(F.adaptive_avg_pool2d(F.relu(x + y), 1).flatten(1))


class ChannelsLast(nn.Module):
    """A model that normalises channels last, so it pools tensors that are not row-major."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4 * 7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        rows, space = y.flatten(2), y.unsqueeze(2)
        pooled = [
            F.adaptive_avg_pool2d(y, 1),
            F.adaptive_avg_pool2d(y, (2, 1)),
            F.adaptive_avg_pool1d(rows, 1),
            F.adaptive_avg_pool1d(rows, 2),
            F.adaptive_avg_pool3d(space, 1),
        ]
        return self.head(torch.cat([one.flatten(1) for one in pooled], 1))


class TwoBranch(nn.Module):
    """The last layer and both branches read the entry, so cuts relay it used and unused."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(6, 5)
        self.left = nn.Linear(5, 5)
        self.right = nn.Linear(5, 5)
        self.merge = nn.Linear(10, 5)
        self.last = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        entry = torch.relu(self.entry(x))
        flags = entry > 0.3  # crosses a cut without a tangent
        left, right = torch.tanh(self.left(entry)), torch.sigmoid(self.right(entry))
        merged = self.merge(torch.cat([left, right], 1))
        return self.last(torch.where(flags, merged * 0.5 + entry, merged))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 5)
        self.inner = nn.Linear(5, 5)
        self.decode = nn.Linear(5, 6, bias=False)
        self.decode.weight = nn.Parameter(torch.empty(0))
        self.output = nn.Linear(6, 5, bias=False)
        self.output.weight = self.encode.weight
        del self.decode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = torch.tanh(self.inner(torch.tanh(self.encode(x))))
        return self.output(F.linear(code, self.encode.weight.t()))


class Masked(nn.Module):
    """Keyword inputs, a mask that crosses cuts, an unused and a frozen parameter, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.second = nn.Linear(6, 6)
        self.third = nn.Linear(6, 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6), persistent=False)

    def forward(self, values: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        keep = (mask * 2 - 1).clamp(0)
        x = torch.tanh(self.first(values)) * self.scale * keep
        with torch.no_grad():
            centre = x.mean(1, keepdim=True)
        x = torch.tanh(self.frozen(x - centre)) + torch.arange(6)
        x = torch.relu(self.second(x)) * keep
        return {"logits": self.third(x), "aux": (x, centre)}


def _masked_loss(output: dict[str, Any], y: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output["logits"], y["label"]) + output["aux"][0].square().mean()


class Embedder(nn.Module):
    """Integer inputs in a tuple, and a loss that is a sum with a count."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6, padding_idx=0)
        self.places = nn.Embedding(5, 6)
        self.mix = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
        places = self.places(torch.arange(ids.shape[1]))
        x = self.tokens(ids) + places + segment[:, None, None]
        return self.head(F.gelu(self.norm(self.mix(x))))


def _summed(logits: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=0, reduction="sum")
    return total, (y != 0).sum()


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.relu(self.first(x)))
        return self.third(F.dropout(torch.tanh(self.second(x)), 0.5, self.training))


class Attention(nn.Module):
    """torch's encoder layer: packed projections, fused attention, pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Repeated(nn.Module):
    """A module called twice, and a norm whose statistics both calls update."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(6, 6)
        self.shared = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.shared(self.shared(self.entry(x))))
        return self.head(self.norm(torch.relu(self.middle(self.norm(x)))))


def _gpt2(**settings: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=31, n_positions=8, n_embd=8, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **settings,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _bert(**settings: Any) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=31, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=8, num_labels=3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **settings,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def _lm_loss(output: Any, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), y.flatten())


def _ids() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 31, (12, 6)), torch.randint(0, 31, (12, 6))


def _bert_batch() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    mask = torch.ones(12, 6, dtype=torch.long)
    mask[::2, 4:] = 0
    return {"input_ids": _ids()[0], "attention_mask": mask}, torch.randint(0, 3, (12,))


def _vectors(*shape: int) -> torch.Tensor:
    return torch.randn(12, *shape, dtype=torch.float64)


def _labels(classes: int = 4) -> torch.Tensor:
    return torch.randint(0, classes, (12,))


CASES: dict[str, Case] = {
    "mlp": Case(Mlp, F.mse_loss, lambda: (_vectors(6), _vectors(4))),
    "residual": Case(Residual, F.cross_entropy, lambda: (_vectors(3, 6, 6), _labels())),
    "channels_last": Case(ChannelsLast, F.cross_entropy, lambda: (_vectors(3, 6, 6), _labels())),
    "two_branch": Case(TwoBranch, F.cross_entropy, lambda: (_vectors(6), _labels())),
    "tied": Case(Tied, F.cross_entropy, lambda: (_vectors(6), _labels())),
    "masked": Case(
        Masked,
        _masked_loss,
        lambda: (
            {"values": _vectors(6), "mask": torch.randint(0, 2, (12, 6))},
            {"label": _labels()},
        ),
    ),
    "embedder": Case(
        Embedder,
        _summed,
        lambda: ((torch.randint(0, 11, (12, 5)), _vectors()), torch.randint(0, 11, (12, 5))),
    ),
    "attention": Case(Attention, F.cross_entropy, lambda: (_vectors(5, 6), _labels())),
    "recurrent": Case(Recurrent, F.cross_entropy, lambda: (_vectors(4, 6), _labels())),
    "repeated": Case(Repeated, F.cross_entropy, lambda: (_vectors(6), _labels())),
    "gpt2": Case(_gpt2, _lm_loss, _ids),
    "gpt2_eager": Case(lambda: _gpt2(attn_implementation="eager"), _lm_loss, _ids),
    "bert": Case(_bert, lambda out, y: F.cross_entropy(out.logits, y), _bert_batch),
    "bert_eager": Case(
        lambda: _bert(attn_implementation="eager"),
        lambda out, y: F.cross_entropy(out.logits, y),
        _bert_batch,
    ),
}


def make(name: str) -> tuple[nn.Module, Callable[[Any, Any], Any], tuple[Any, Any]]:
    """Return a case's model in float64, loss and batch, always with the same values."""
    torch.manual_seed(3)
    case = CASES[name]
    return case.model().double(), case.loss_fn, case.batch()


@cache
def captured(name: str) -> Captured:
    """Return the capture of a case, which is made once and never changed."""
    return Captured(*make(name))
