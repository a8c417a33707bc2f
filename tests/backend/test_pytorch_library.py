"""torch's fused kernels for accelerators: counted on the meta device, or replaced by formulas."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.operatorcounts import Launches
from hetpipe.backends.pytorch import attention, masks
from hetpipe.backends.pytorch.program import Program
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.sdk.graph import canonical
from hetpipe.sdk.operators.attention import plain_attention, plain_attention_backward
from hetpipe.sdk.operators.masked_attention import (
    plain_masked_attention,
    plain_masked_attention_backward,
)
from hetpipe.sdk.operators.random import draw_mask

CASES = [  # size, batch dimension, samples, probability
    ((12, 5, 7), 0, 12, 0.9),
    ((3, 8, 5), 1, 4, 0.5),
    ((2, 3, 6), 2, 3, 0.1),
    ((5,), 0, 5, 0.3),
    ((8, 10), 0, 2, 1.0),
    ((8, 10), 0, 2, 0.0),
]
formula: Any = plain_attention
derivative: Any = plain_attention_backward
META = torch.device("meta")
STATES = [(0, 1, 0), (2**63 - 1, 7, 2**32 - 3), (-5, 2**31 + 3, 100)]  # seed, step, first sample
SITES = (1, 2**31 + 5)
FORMS = [  # dtype, shape of the query, length of the keys, width of the values, causal
    (torch.float32, (2, 3, 33, 16), 33, 16, True),
    (torch.float32, (2, 3, 20, 16), 40, 8, True),
    (torch.float32, (4, 64, 16), 64, 16, False),
    (torch.bfloat16, (2, 3, 33, 16), 33, 16, True),
    (torch.bfloat16, (4, 64, 16), 64, 16, False),
]


@pytest.mark.parametrize("state", STATES)
def test_masks_equal_the_reference(state: tuple[int, ...]) -> None:
    for size, batch_dim, samples, keep in CASES:
        for site in SITES:
            arguments = torch.tensor(state), site, list(size), keep, batch_dim, samples
            assert torch.equal(masks.keep_mask(*arguments), draw_mask(*arguments)), arguments


def counted(function: Any, inputs: list[Tensor]) -> tuple[Launches, list[Tensor]]:
    """Run a function's graph as on CUDA, but on the meta device."""
    inputs = [x.to("meta") for x in inputs]
    program = Program(canonical(make_fx(function)(*inputs)), frozenset(), META, "test", "cuda")
    counts = Launches()
    with torch.no_grad(), counts:
        results = program.call(inputs)
    return counts, results


def test_a_mask_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def mask(rng: Tensor) -> tuple[Tensor]:
        return (torch.ops.hetpipe.keep_mask(rng, 3, [4, 6], 0.9, 0, 4),)

    masks.best_mask.cache_clear()
    monkeypatch.setattr(masks, "find_spec", lambda name: name)
    counts, (result,) = counted(mask, [torch.zeros(3, dtype=torch.int64)])
    masks.best_mask.cache_clear()
    assert dict(counts.names) == {"keep_mask_by_triton": 1}
    assert (result.shape, result.dtype) == ((4, 6), torch.bool)


def test_a_missing_triton_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(masks, "find_spec", lambda name: None)
    masks.best_mask.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert masks.best_mask("cuda") is masks.keep_mask
    masks.best_mask.cache_clear()
    assert "Triton is missing" in caplog.text


@pytest.mark.slow
def test_the_tritons_kernel_computes_the_reference() -> None:
    """Triton's interpreter runs the kernel on the CPU; it must be chosen before the import."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def check_kernel() -> None:
    from hetpipe.backends.pytorch.mask_kernel import keep_mask_kernel

    for state in STATES:
        rng = torch.tensor(state)
        for size, batch_dim, samples, keep in CASES:
            out, batch = torch.zeros(size, dtype=torch.bool), size[batch_dim]
            elements, after = out.numel() // samples, math.prod(size[batch_dim + 1 :])
            blocks, before = (elements + 3) // 4, math.prod(size[:batch_dim])
            keep_mask_kernel[samples * blocks // 8 + 1,](
                rng, out.view(torch.uint8), 5, masks.limit(keep), blocks, samples * blocks,
                elements, before, batch, after, BLOCK=8,
            )  # fmt: skip
            assert torch.equal(out, draw_mask(rng, 5, list(size), keep, batch_dim, samples))


def operands(form: tuple[Any, ...]) -> tuple[list[Tensor], bool]:
    dtype, shape, length, width, is_causal = form
    generator = torch.Generator().manual_seed(0)
    shapes = (shape, (*shape[:-2], length, shape[-1]), (*shape[:-2], length, width))
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes], is_causal


@pytest.mark.parametrize("form", FORMS)
def test_attention_is_one_launch_each_way(form: tuple[Any, ...]) -> None:
    inputs, is_causal = operands(form)
    own = torch.ops.hetpipe

    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        out, logsumexp = own.attention(*inputs, is_causal, 0.5)
        return out, logsumexp

    def backward(*inputs: Tensor) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = own.attention_backward(*inputs, is_causal, 0.5)
        return results

    def attentions(counts: Launches) -> list[int]:
        left = {"clone", "constant_pad_nd"}  # results in row-major order, and padded logarithms
        assert all("attention" in name or name in left for name in counts.names), counts.names
        return [n for name, n in counts.names.items() if "attention" in name]

    results = formula(*inputs, is_causal, 0.5)
    counts, found = counted(forward, inputs)
    assert attentions(counts) == [1]
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in results]
    counts, found = counted(backward, [results[0], *inputs, *results])
    assert attentions(counts) == [1]
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in inputs]


def check_bias(bias: Tensor, query: Tensor, key: Tensor) -> None:
    """Check the rules of the efficient kernel: every score, and aligned rows."""
    assert bias.shape == (*query.shape[:3], key.shape[2])
    assert bias.stride(-1) == 1
    assert all(stride % 16 == 0 for stride in bias.stride()[:-1])


def kernels() -> SimpleNamespace:
    """Return torch's kernels for CUDA as formulas, with the layouts of their documentation."""

    def rows(length: int) -> int:
        return -(-length // 32) * 32

    def efficient(q: Tensor, k: Tensor, v: Tensor, *how: Any, scale: float) -> tuple[Any, ...]:
        assert how[1:3] == (True, 0.0)
        if how[0] is None:
            out, sums = formula(q, k, v, how[3], scale)
        else:
            check_bias(how[0], q, k)
            out, sums = plain_masked_attention(q, k, v, how[0], scale)
        padded = torch.full((*sums.shape[:2], rows(sums.shape[2])), math.inf)
        padded[..., : sums.shape[2]] = sums
        return out, padded, torch.empty(()), torch.empty(())

    def efficient_backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor,
        sums: Tensor, seed: Tensor, offset: Tensor, dropout: float, which: list[bool], *how: Any,
        scale: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert sums.shape == (*q.shape[:2], rows(q.shape[2]))
        assert sums[..., q.shape[2] :].isinf().all()
        sums = sums[..., : q.shape[2]]
        if bias is None:
            return *derivative(grad, q, k, v, out, sums, *how, scale), None
        check_bias(bias, q, k)
        return *plain_masked_attention_backward(grad, q, k, v, bias, out, sums, scale), None

    def flash(q: Tensor, k: Tensor, v: Tensor, *how: Any, scale: float) -> tuple[Any, ...]:
        assert (how[0], how[2]) == (0.0, False)
        return *formula(q, k, v, how[1], scale), *(None,) * 7

    def flash_backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor,
        first_q: None, first_k: None, length_q: int, length_k: int, *how: Any, scale: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert (length_q, length_k, how[0]) == (q.shape[2], k.shape[2], 0.0)
        return tuple(derivative(grad, q, k, v, out, sums, how[1], scale))

    return SimpleNamespace(
        _scaled_dot_product_efficient_attention=efficient,
        _scaled_dot_product_efficient_attention_backward=efficient_backward,
        _scaled_dot_product_flash_attention=flash,
        _scaled_dot_product_flash_attention_backward=flash_backward,
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_flash", [False, True])
def test_attention_passes_its_operands(
    form: tuple[Any, ...], has_flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "aten", kernels())
    monkeypatch.setattr(attention, "_has_flash", lambda *_: has_flash)
    monkeypatch.setattr(attention, "_has_efficient", lambda *_: True)
    inputs, is_causal = operands(form)
    found = attention.attention(*inputs, is_causal, 0.5)
    results = formula(*inputs, is_causal, 0.5)
    backward = [results[0], *inputs, *results, is_causal, 0.5]
    found += attention.attention_backward(*backward)
    for left, right in zip(found, results + derivative(*backward), strict=True):
        torch.testing.assert_close(left, right)


BIASES = [(2, 1, 1, 20), (1, 1, 33, 20), (2, 3, 33, 20), (1, 1, 1, 20), (2, 3, 33, 32)]


def masked_operands(shape: tuple[int, ...]) -> list[Tensor]:
    """Return query, key, value and a bias of this shape, which hides some keys."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 33, 16), (2, 3, shape[-1], 16), (2, 3, shape[-1], 8), shape)
    *heads, bias = (torch.randn(s, generator=generator) for s in shapes)
    bias[..., 1:].masked_fill_(bias[..., 1:] > 0.5, -math.inf)
    return [*heads, bias]


@pytest.mark.parametrize("shape", BIASES)
def test_masked_attention_passes_its_operands(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "aten", kernels())
    monkeypatch.setattr(attention, "_has_efficient", lambda *_: True)
    operands = masked_operands(shape)
    found = attention.masked_attention(*operands, 0.5)
    results = plain_masked_attention(*operands, 0.5)
    backward = [results[0], *operands, *results]
    found += attention.masked_attention_backward(*backward, 0.5)
    wanted = results + plain_masked_attention_backward(*backward, 0.5)
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right)


def test_masked_attention_is_one_launch_each_way() -> None:
    own, operands = torch.ops.hetpipe, masked_operands(BIASES[-1])
    results = plain_masked_attention(*operands, 0.5)

    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(own.masked_attention(*inputs, 0.5))

    def backward(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(own.masked_attention_backward(*inputs, 0.5))

    for function, inputs in ((forward, operands), (backward, [results[0], *operands, *results])):
        counts, _ = counted(function, inputs)
        launched = {name: n for name, n in counts.names.items() if "attention" in name}
        assert list(launched.values()) == [1]
        assert set(counts.names) - set(launched) <= {"clone", "constant_pad_nd"}


if __name__ == "__main__":
    check_kernel()
