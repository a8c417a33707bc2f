"""Small models for measurements of the ways to run graphs; compiling takes a minute, not ten."""

from __future__ import annotations

from benchmarks import stepmodels
from benchmarks.stepmodels import lstm
from hetpipe.zoo.workload import Workload

SIZES = stepmodels.Sizes(512, 64, 256, 4, 2, 4)

__all__ = ["bert", "gpt", "lstm", "resnet18"]


def gpt() -> Workload:
    """Return GPT-2 with two blocks of width 256."""
    return SIZES.gpt("gpt")


def bert() -> Workload:
    """Return BERT with two layers of width 256."""
    return SIZES.bert()


def resnet18() -> Workload:
    """Return ResNet-18 for images of 32 x 32."""
    return stepmodels.resnet18(32, SIZES.samples)
