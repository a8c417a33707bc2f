"""Kernels for graphics cards under NVIDIA's assembler, without a card."""

from __future__ import annotations

import nvptx
import pytest

pytestmark = pytest.mark.skipif(bool(nvptx.lacking()), reason=f"no {nvptx.lacking()}")

SUMS = """
__kernel void kept(__global const float *a, __global float *out, int n)
{
    float sums[SIZE];
    for (int i = 0; i < SIZE; ++i)
        sums[i] = a[i];
    for (int k = 0; k < n; ++k)
        sums[WHICH] += a[k];
    for (int i = 0; i < SIZE; ++i)
        out[i] = sums[i];
}
"""


@pytest.mark.parametrize("card", nvptx.CARDS)
def test_an_array_with_an_unknown_index_is_on_the_stack(card: str) -> None:
    def usage(*options: str) -> nvptx.Usage:
        if card.startswith("gfx"):
            return nvptx.of_amd(SUMS, options, card)["kept"]
        return nvptx.of_nvidia("".join(nvptx.ptx_of(SUMS, options).values()), card)["kept"]

    on_stack, in_registers = usage("-DSIZE=256", "-DWHICH=k&255"), usage("-DSIZE=8", "-DWHICH=7")
    assert on_stack.stack_nbytes >= 1024
    assert not on_stack.fits
    assert in_registers.fits
    assert in_registers.registers > 8
