"""Counter-based random numbers: known answers, and independence of micro-batching."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_harness import Stages
from torch import nn

from hetpipe.capture import Captured
from hetpipe.errors import CaptureError
from hetpipe.sdk.operators.random import keep_mask, philox, uniform


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers of Random123 for philox4x32-10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    k0, k1 = (torch.tensor(word) for word in key)
    assert tuple(philox((c0, c1, c2, c3), (k0, k1)).tolist()) == expected


def test_counter_layout() -> None:
    """Check that element e of sample s is word e % 4 of block (e // 4, first_sample + s, site,
    step)."""
    seed, step, first, site = (7 << 32) + 5, 9, 3, 2
    drawn = uniform(torch.tensor([seed, step, first]), site, [2, 2, 3], 0, 2).reshape(2, 6)
    key = torch.tensor(5), torch.tensor(7)
    for sample in range(2):
        for element in range(6):
            counter = (element // 4, first + sample, site, step)
            c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
            word = int(philox((c0, c1, c2, c3), key)[element % 4])
            assert float(drawn[sample, element]) == (word >> 8) * 2.0**-24


@pytest.mark.parametrize(("shape", "dim"), [((12, 5), 0), ((24, 3), 0), ((3, 12, 2), 1)])
def test_masks_do_not_depend_on_micro_batches(shape: tuple[int, ...], dim: int) -> None:
    def mask(first: int, samples: int) -> torch.Tensor:
        size = list(shape)
        size[dim] = shape[dim] * samples // 12
        return keep_mask(torch.tensor([1, 2, first]), 0, size, 0.4, dim, samples)

    whole = mask(0, 12)
    assert 0.2 < float(whole.float().mean()) < 0.6
    torch.testing.assert_close(torch.cat([mask(0, 5), mask(5, 4), mask(9, 3)], dim), whole)


def test_negative_seeds_and_large_steps_wrap_to_32_bits() -> None:
    a = uniform(torch.tensor([-1, 2**32 + 4, 0]), 0, [1, 8], 0, 1)
    b = uniform(torch.tensor([-1, 4, 0]), 0, [1, 8], 0, 1)
    assert torch.equal(a, b)


class Noisy(nn.Module):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4000))
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(x) * self.scale


def _drawn(draw: Any) -> torch.Tensor:
    """Return the numbers that a model draws for a sample: they are the gradient of `scale`."""
    batch = torch.full((2, 4000), 0.25), torch.ones(2)
    model = Captured(Noisy(draw), lambda out, y: (out[0] * 1.0).sum(), batch)
    (gradients,) = Stages(model, model.stage_graphs([], [{}], [2], None)).step(batch, [2], [1.0])
    return gradients["scale"]


@pytest.mark.parametrize(
    ("draw", "mean", "std"),
    [
        (torch.rand_like, 0.5, 12**-0.5),
        (lambda x: torch.rand(x.shape), 0.5, 12**-0.5),
        (torch.randn_like, 0.0, 1.0),
        (lambda x: torch.randn(x.shape), 0.0, 1.0),
        (torch.bernoulli, 0.25, 0.1875**0.5),
        (lambda x: torch.empty_like(x).uniform_(-1, 3), 1.0, 4 * 12**-0.5),
        (lambda x: torch.empty_like(x).normal_(2, 3), 2.0, 3.0),
        (lambda x: F.dropout1d(x[..., None], 0.5)[..., 0], 0.25, 0.25),
        (lambda x: torch.empty_like(x).bernoulli_(0.25), 0.25, 0.1875**0.5),
    ],
)
def test_distributions(draw: Any, mean: float, std: float) -> None:
    values = _drawn(draw)
    error = std / 4000**0.5
    assert abs(float(values.mean()) - mean) < 5 * error
    assert float(values.std()) == pytest.approx(std, rel=0.1)
    assert len(values.unique()) >= 2


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda x: torch.empty_like(x).exponential_(), "exponential.*test_capture_random.py.*rand"),
        (lambda x: torch.rand(3, 5).sum() + x, r"draws the shape \(3, 5\).*2 samples"),
    ],
)
def test_irreproducible_draws_are_refused(draw: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        _drawn(draw)
