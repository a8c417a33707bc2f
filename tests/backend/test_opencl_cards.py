"""Kernels for graphics cards under NVIDIA's assembler, without a card."""

from __future__ import annotations

import nvptx
import pytest

pytestmark = pytest.mark.skipif(bool(nvptx.lacking()), reason=f"no {nvptx.lacking()}")

SUMS = """
__kernel void kept(__global const float *a, __global float *out, int n)
{
    float sums[8];
    for (int i = 0; i < 8; ++i)
        sums[i] = a[i];
    for (int k = 0; k < n; ++k)
        sums[%s] += a[k];
    for (int i = 0; i < 8; ++i)
        out[i] = sums[i];
}
"""


@pytest.mark.parametrize("card", nvptx.CARDS)
def test_an_array_with_an_unknown_index_is_on_the_stack(card: str) -> None:
    (on_stack,) = nvptx.usage_of("".join(nvptx.ptx_of(SUMS % "k & 7").values()), card).values()
    (in_registers,) = nvptx.usage_of("".join(nvptx.ptx_of(SUMS % "7").values()), card).values()
    assert on_stack.stack_nbytes == 32
    assert not on_stack.fits
    assert in_registers.fits
    assert in_registers.registers > 8
