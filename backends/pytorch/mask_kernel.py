"""A Triton kernel for dropout masks; importing this module imports Triton, which torch may lack."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 256


@triton.jit(do_not_specialize=["site", "limit"])  # type: ignore[untyped-decorator]
def keep_mask_kernel(
    rng: tl.tensor,
    out: tl.tensor,
    site: tl.tensor,
    limit: tl.tensor,
    blocks: tl.tensor,
    total: tl.tensor,
    elements: tl.tensor,
    before: tl.tensor,
    batch: tl.tensor,
    after: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write four elements of one sample per lane; see `hetpipe.sdk.operators.random`.

    The result has the form [before, batch, after]; `elements` of them belong to each sample.
    `blocks` is a quarter of that, rounded up, and `total` the number of blocks of all samples.
    """
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sample, block = index // blocks, index % blocks
    counter = block.to(tl.uint32)
    words = tl.philox(
        tl.load(rng),
        counter,
        (tl.load(rng + 2) + sample).to(tl.uint32),
        (counter & 0) + site.to(tl.uint32),
        (counter & 0) + tl.load(rng + 1).to(tl.uint32),
    )
    for number in tl.static_range(4):
        element = block * 4 + number
        place = sample * elements + element
        row, rest = place // (before * after), place % (before * after)
        place = (rest // after * batch + row) * after + rest % after
        kept = (words[number] >> 8) < limit.to(tl.uint32)
        tl.store(out + place, kept.to(tl.uint8), mask=(index < total) & (element < elements))
