"""Models for measurements of whole training steps on one core, of about a second each."""

from __future__ import annotations

from hetpipe import optim
from hetpipe.zoo.bert import Bert
from hetpipe.zoo.gpt import GPT
from hetpipe.zoo.lstm import workload as lstm
from hetpipe.zoo.random_data import images, language, random_workload, span_loss, spans
from hetpipe.zoo.resnet import ResNet
from hetpipe.zoo.text import token_loss
from hetpipe.zoo.vgg import VGG, VGG11
from hetpipe.zoo.workload import Workload

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 1024, 128, 384, 6, 6
SAMPLES = 8

__all__ = ["bert", "gpt2", "lstm", "resnet18", "vgg11"]


def gpt2() -> Workload:
    """Return GPT-2 with six blocks of width 384."""
    return random_workload(
        "gpt2, 6 x 384", lambda: GPT(VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS),
        language(VOCABULARY, LENGTH), SAMPLES, optim.adamw(lr=6e-4), token_loss,
    )  # fmt: skip


def bert() -> Workload:
    """Return BERT with six layers of width 384."""
    return random_workload(
        "bert, 6 x 384", lambda: Bert(VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS),
        spans(VOCABULARY, LENGTH), SAMPLES, optim.adamw(lr=5e-5), span_loss,
    )  # fmt: skip


def resnet18() -> Workload:
    """Return ResNet-18 for images of 64 x 64."""
    return random_workload(
        "resnet18, 64 x 64", lambda: ResNet((2, 2, 2, 2), classes=10, deep=False),
        images(64, 10), SAMPLES, optim.sgd(lr=0.01, momentum=0.9),
    )  # fmt: skip


def vgg11() -> Workload:
    """Return VGG-11 for images of 64 x 64."""
    return random_workload(
        "vgg11, 64 x 64", lambda: VGG(VGG11, grid=2, hidden=512, classes=10), images(64, 10),
        SAMPLES, optim.sgd(lr=0.01, momentum=0.9),
    )  # fmt: skip
