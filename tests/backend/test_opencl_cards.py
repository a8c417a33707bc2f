"""Kernels for graphics cards under NVIDIA's assembler, without a card."""

from __future__ import annotations

import nvptx
import pytest
from ptx_group import Group

pytestmark = pytest.mark.skipif(bool(nvptx.lacking()), reason=f"no {nvptx.lacking()}")


@pytest.mark.parametrize(
    "model",
    [
        "digits",
        "gpt",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("lstm", "alexnet-small")),
    ],
)
def test_a_work_item_keeps_everything_in_registers(model: str) -> None:
    """Products kept their 16 sums on the stack, which is in the memory of the card."""
    programs = nvptx.lowered(model, nvptx.card()).values()
    launches = (launch for program in programs for launch in program.launches)
    found = nvptx.compiled(launches, (*nvptx.CARDS, nvptx.AMD_CARD))
    problems = {f"{each.file}: {each.kernel.name}: {each.problem}" for each in found}
    assert {each for each in problems if not each.endswith(": ")} == set()


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


@pytest.mark.parametrize("card", [*nvptx.CARDS, nvptx.AMD_CARD])
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


COUNTED = {
    "out[i] = a[i];": (0, 16, 0),
    "out[i] = a[8 * i];": (0, 8 + 64, 0),
    "if (i < 8) out[i] = a[i];": (0, 2, 0),
    "float s = n; for (int k = i / 32; k < n; ++k) s = fma(a[k], s, s); out[i] = s;": (
        2 * 32 * (9 + 8), 8 + 9 + 8, 0,
    ),
    "float s = n; for (int k = i % 4; k < n; ++k) s = fma(a[k], s, s); out[i] = s;": (
        2 * 16 * (9 + 8 + 7 + 6), 8 + 2 * 12, 0,
    ),
    "__local float t[2048]; t[32 * i] = n; barrier(1); out[i] = t[i];": (0, 8, 64 + 2),
    "vstore4(vload4(i, (__global float *)a), i, out);": (0, 8 * 8 * 4, 0),
}  # fmt: skip
"""Statements of 64 work-items: operations, sectors of 32 bytes, and wavefronts of local memory."""


@pytest.mark.parametrize("statements", COUNTED)
def test_a_group_is_counted(statements: str) -> None:
    text = f"""
    __kernel void counted(__global const float *restrict a, __global float *restrict out, int n)
    {{
        const int i = get_local_id(0);
        {statements}
    }}
    """
    group = Group(nvptx.ptx_of(text)["counted"], (640,), (64,), (1 << 40, 1 << 41, 9))
    group.run()
    assert (group.operations, group.sectors, group.wavefronts) == COUNTED[statements]
