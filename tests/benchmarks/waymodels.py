"""Small models for measurements of the ways to run graphs; compiling takes a minute, not ten."""

from __future__ import annotations

from hetpipe import optim
from hetpipe.zoo.bert import Bert
from hetpipe.zoo.data import RandomModel, images, language, span_loss, spans
from hetpipe.zoo.gpt import GPT
from hetpipe.zoo.lstm import workload as lstm
from hetpipe.zoo.resnet import ResNet
from hetpipe.zoo.text import token_loss
from hetpipe.zoo.workload import Workload

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS, SAMPLES = 512, 64, 256, 4, 2, 4

__all__ = ["bert", "gpt", "lstm", "resnet18"]


def gpt() -> Workload:
    """Return GPT-2 with two blocks of width 256."""
    return RandomModel(
        lambda: GPT(VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS),
        language(VOCABULARY, LENGTH), SAMPLES, optim.adamw(lr=6e-4), token_loss,
    ).workload("gpt, 2 x 256")  # fmt: skip


def bert() -> Workload:
    """Return BERT with two layers of width 256."""
    return RandomModel(
        lambda: Bert(VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS),
        spans(VOCABULARY, LENGTH), SAMPLES, optim.adamw(lr=5e-5), span_loss,
    ).workload("bert, 2 x 256")  # fmt: skip


def resnet18() -> Workload:
    """Return ResNet-18 for images of 32 x 32."""
    return RandomModel(
        lambda: ResNet((2, 2, 2, 2), classes=10, deep=False), images(32, 10), SAMPLES,
        optim.sgd(lr=0.01, momentum=0.9),
    ).workload("resnet18, 32 x 32")  # fmt: skip
