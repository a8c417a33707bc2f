"""Models for measurements of training steps on one core; a step takes about a second."""

from __future__ import annotations

from hetpipe import optim
from hetpipe.zoo.bert import Bert
from hetpipe.zoo.convnext import ConvNeXt
from hetpipe.zoo.data import RandomModel, images, language, span_loss, spans
from hetpipe.zoo.gpt import GPT
from hetpipe.zoo.lstm import workload as lstm
from hetpipe.zoo.resnet import ResNet
from hetpipe.zoo.text import token_loss
from hetpipe.zoo.vgg import VGG, VGG11
from hetpipe.zoo.workload import Workload

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 1024, 128, 384, 6, 6
SAMPLES = 8

__all__ = ["bert", "gpt2", "lstm", "resnet18", "vgg11"]


def gpt2() -> Workload:
    """Return GPT-2 with six blocks of width 384."""
    return RandomModel(
        lambda: GPT(VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS),
        language(VOCABULARY, LENGTH), SAMPLES, optim.adamw(lr=6e-4), token_loss,
    ).workload("gpt2, 6 x 384")  # fmt: skip


def bert() -> Workload:
    """Return BERT with six layers of width 384."""
    return RandomModel(
        lambda: Bert(VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS),
        spans(VOCABULARY, LENGTH), SAMPLES, optim.adamw(lr=5e-5), span_loss,
    ).workload("bert, 6 x 384")  # fmt: skip


def resnet18() -> Workload:
    """Return ResNet-18 for images of 64 x 64."""
    return RandomModel(
        lambda: ResNet((2, 2, 2, 2), classes=10, deep=False), images(64, 10), SAMPLES,
        optim.sgd(lr=0.01, momentum=0.9),
    ).workload("resnet18, 64 x 64")  # fmt: skip


def convnext() -> Workload:
    """Return ConvNeXt-T for images of 64 x 64."""
    return RandomModel(
        lambda: ConvNeXt((96, 192, 384, 768), (3, 3, 9, 3), 10), images(64, 10), SAMPLES,
        optim.sgd(lr=0.01, momentum=0.9),
    ).workload("convnext, 64 x 64")  # fmt: skip


def vgg11() -> Workload:
    """Return VGG-11 for images of 64 x 64."""
    return RandomModel(
        lambda: VGG(VGG11, grid=2, hidden=512, classes=10), images(64, 10),
        SAMPLES, optim.sgd(lr=0.01, momentum=0.9),
    ).workload("vgg11, 64 x 64")  # fmt: skip
