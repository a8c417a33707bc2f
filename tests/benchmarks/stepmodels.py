"""Models for measurements of training steps on one core; a step takes about a second."""

from __future__ import annotations

from dataclasses import dataclass

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

SAMPLES = 8

__all__ = ["bert", "gpt2", "lstm", "resnet18", "vgg11"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a transformer, and of its mini-batches."""

    vocabulary: int
    length: int
    width: int
    heads: int
    blocks: int
    samples: int

    def gpt(self, name: str) -> Workload:
        """Return GPT-2 in these sizes."""
        return RandomModel(
            lambda: GPT(self.vocabulary, self.length, self.width, self.heads, self.blocks),
            language(self.vocabulary, self.length), self.samples, optim.adamw(lr=6e-4), token_loss,
        ).workload(f"{name}, {self.blocks} x {self.width}")  # fmt: skip

    def bert(self) -> Workload:
        """Return BERT in these sizes."""
        return RandomModel(
            lambda: Bert(self.vocabulary, self.length, self.width, self.heads, self.blocks),
            spans(self.vocabulary, self.length), self.samples, optim.adamw(lr=5e-5), span_loss,
        ).workload(f"bert, {self.blocks} x {self.width}")  # fmt: skip


SIZES = Sizes(1024, 128, 384, 6, 6, SAMPLES)


def gpt2() -> Workload:
    """Return GPT-2 with six blocks of width 384."""
    return SIZES.gpt("gpt2")


def bert() -> Workload:
    """Return BERT with six layers of width 384."""
    return SIZES.bert()


def resnet18(pixels: int = 64, samples: int = SAMPLES) -> Workload:
    """Return ResNet-18 for square images."""
    return RandomModel(
        lambda: ResNet((2, 2, 2, 2), classes=10, deep=False), images(pixels, 10), samples,
        optim.sgd(lr=0.01, momentum=0.9),
    ).workload(f"resnet18, {pixels} x {pixels}")  # fmt: skip


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
