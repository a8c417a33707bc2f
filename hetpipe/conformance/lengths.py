"""Checks of reductions and products of many lengths, and of tensors with many elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hetpipe.conformance.cases.case import grads
from hetpipe.conformance.check import NotAsked, check
from hetpipe.conformance.operators import aten, judge, normal
from hetpipe.conformance.rig import Rig

SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1025)
"""Lengths of reductions: at, below and above the usual block sizes of kernels."""
PRODUCTS = ((1, 1, 1), (1, 7, 1), (3, 1, 5), (5, 17, 3), (8, 16, 8), (33, 65, 17), (129, 31, 66))


def _reduced(fn: Callable[[torch.Tensor], Any], rig: Rig) -> None:
    for size in SIZES:
        judge(rig, fn, [normal(size, seed=size)], size)
        judge(rig, fn, [normal(3, size, seed=size)], 3 * size)


for _name, _fn in {
    "sum": lambda x: (x.sum(), x.sum(-1), x.sum(0)),
    "mean": lambda x: (x.mean(), x.mean(-1), x.mean(0)),
    "largest": lambda x: (x.amax(), x.amax(-1), x.amin(0)),
    "softmax": lambda x: x.softmax(-1),
    "variance": lambda x: torch.var_mean(x, -1, correction=0),
}.items():
    check(
        f"lengths/{_name}",
        "a reduction reads every element once, whatever its length",
        "an off-by-one reduction: the last elements of a block, or the remainder after the blocks",
    )(partial(_reduced, _fn))


@check(
    "lengths/product",
    "a matrix product reads every element once, whatever its shape",
    "an off-by-one reduction: the edges of a tile",
)
def _(rig: Rig) -> None:
    for question in _products(PRODUCTS):
        judge(rig, *question)


LONG_SUMS = ((3, 1101, 5), (5, 1537, 7), (2, 4099, 3), (17, 9001, 2), (1, 70_001, 1))
"""Products (m, k, n) whose sums are longer than the blocks into which kernels usually cut K."""
WIDE = ((256, 256, 256), (257, 300, 272), (130, 1024, 64))
"""Products large enough for a device's matrix units, which may round operands."""
WIDE_CONVOLUTIONS = (
    ((2, 256, 12, 12), (256, 256, 1, 1), 0),
    ((2, 64, 12, 12), (256, 64, 3, 3), 1),
    ((2, 256, 144), (256, 256, 1), 0),
)
"""Input shapes, weight shapes and padding. As products, the convolutions are as large as `WIDE`,
but with short sums, so that errors of rounded operands exceed the tolerance."""
MANY_ELEMENTS = ((1 << 16) + 1, (1 << 20) + 3)
"""Element counts beyond 16-bit indices and beyond the usual limits of a launch."""


Question = tuple[Callable[..., Any], list[torch.Tensor], int]
"""A function, its inputs, and the terms of its longest sum."""


def _products(shapes: Sequence[tuple[int, int, int]]) -> list[Question]:
    return [(torch.mm, [normal(m, k), normal(k, n, seed=1)], k) for m, k, n in shapes]


def _judge_all(rig: Rig, questions: Sequence[Question]) -> None:
    """Judge each function that the device accepts. Raises `NotAsked` if the device accepts none."""
    refused: list[NotAsked] = []
    for fn, inputs, terms in questions:
        try:
            judge(rig, fn, inputs, terms)
        except NotAsked as reason:
            refused.append(reason)
    if len(refused) == len(questions):
        raise refused[0]


def _not_interpreted(rig: Rig) -> None:
    if rig.is_interpreter:
        raise NotAsked("a large case, which takes too long on a device that interprets kernels")


@check(
    "lengths/long product",
    "a matrix product adds all K terms, for any K",
    "a kernel that drops the last part of K if K has several blocks",
)
def _(rig: Rig) -> None:
    batches = [normal(2, 3, 2051), normal(2, 2051, 4, seed=1)]
    _judge_all(rig, [*_products(LONG_SUMS), (torch.bmm, batches, 2051)])


@check(
    "lengths/wide product",
    "a product of float32 is computed in float32, whatever its size",
    "TF32 or half precision inside a product: the device's matrix units round the operands",
)
def _(rig: Rig) -> None:
    _not_interpreted(rig)
    batches = [normal(2, 256, 256), normal(2, 256, 264, seed=1)]
    _judge_all(rig, [*_products(WIDE), (torch.bmm, batches, 256)])


@check(
    "lengths/wide convolution",
    "a convolution of float32 and its gradients are computed in float32, whatever their size",
    "TF32 or half precision inside a convolution: the device's matrix units round the operands",
)
def _(rig: Rig) -> None:
    if rig.info.capabilities.emulated:
        raise NotAsked("a large case; an emulated device has no matrix units that round operands")
    questions: list[Question] = []
    for x, weight, padding in WIDE_CONVOLUTIONS:
        convolve = torch.conv1d if len(x) == 3 else torch.conv2d
        fn = partial(convolve, padding=padding)
        inputs = [normal(*x), normal(*weight, seed=1), normal(weight[0], seed=2)]
        tangent = normal(*fn(*inputs).shape, seed=3)
        terms = max(weight[1] * math.prod(weight[2:]), tangent.numel() // weight[0])
        questions += [(fn, inputs, terms), (grads(fn, 3), [*inputs, tangent], terms)]
    _judge_all(rig, questions)


@check(
    "lengths/many elements",
    "an operator computes every element of a tensor of any size",
    "a limit of the launch, or an index of too few bits, beyond 65,535 or 2^20 elements",
)
def _(rig: Rig) -> None:
    _not_interpreted(rig)
    questions: list[Question] = []
    for size in MANY_ELEMENTS:
        x, long, wide = normal(size, seed=2), normal(size // 16 + 1, 17), normal(3, size // 3)
        questions += [
            (lambda x: x * 2.0 + 1.0, [x], 1),
            (lambda x: (x.sum(), x.amax()), [x], size),
            (lambda x: x.flip(0), [x], 1),
        ]
        for fn in (lambda x: x.t() + 0.0, lambda x: x.sum(0), lambda x: x.sum(1)):
            questions += [(fn, [long], size), (fn, [wide], size)]
    rows = (1 << 16) + 9
    index = torch.tensor([0, rows - 1, 1 << 16, (1 << 16) - 1])
    table = normal(rows, 2)
    questions += [
        (lambda x: (x + 1.0, x.sum(-1)), [table], 2),
        (lambda x, i: aten.index_select(x, 0, i), [table, index], 1),
    ]
    _judge_all(rig, questions)
