"""An LSTM layer: batches and widths that fill no tile, forward and backward."""

from __future__ import annotations

import torch
from operator_case import case, grads, r

import hetpipe.sdk.recurrent  # noqa: F401 - registers the operator

own = torch.ops.hetpipe


def lstm(
    gates_x: torch.Tensor, h0: torch.Tensor, c0: torch.Tensor, w_hh: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and c, for weights as torch starts them: with larger ones rounding grows step by step."""
    y, c, _ = own.lstm(gates_x, h0, c0, w_hh * w_hh.shape[1] ** -0.5)
    return y, c


def transposed(
    gates_x: torch.Tensor, h0: torch.Tensor, c0: torch.Tensor, w_hh: torch.Tensor
) -> torch.Tensor:
    """A weight, and a batch, that are not row-major."""
    return lstm(gates_x.transpose(0, 1), h0, c0, w_hh.t())[0]


# steps, batch, hidden
SHAPES = [(1, 1, 1), (3, 2, 5), (2, 13, 4), (4, 3, 17), (5, 4, 16)]
for t, n, h in SHAPES:
    inputs = (r(t, n, 4 * h), r(n, h), r(n, h), r(4 * h, h))
    name = f"lstm_{t}x{n}x{h}"
    case(name, lambda *args: own.lstm(*args), *inputs, terms=h)
    case(f"{name}_y", grads(lambda *x: lstm(*x)[0], 4), *inputs, r(t, n, h), terms=t * n * h)
    case(f"{name}_c", grads(lambda *x: lstm(*x)[1], 4), *inputs, r(t, n, h), terms=t * n * h)
case(
    "lstm_both",
    grads(lambda *x: torch.stack(lstm(*x)), 4),
    *(r(3, 5, 24), r(5, 6), r(5, 6), r(24, 6), r(2, 3, 5, 6)),
    terms=90,
)
case(
    "lstm_last_states",
    grads(lambda *x: torch.stack([every[-1] for every in lstm(*x)]), 4),
    *(r(3, 5, 24), r(5, 6), r(5, 6), r(24, 6), r(2, 5, 6)),
    terms=90,
)
case(
    "lstm_transposed",
    grads(transposed, 4),
    *(r(5, 3, 24), r(5, 6), r(5, 6), r(6, 24), r(3, 5, 6)),
    terms=90,
)
case(
    "lstm_saturated",
    lambda gates_x, *args: own.lstm(100 * gates_x, *args),
    *(r(3, 4, 40), r(4, 10), r(4, 10), r(40, 10)),
    terms=1000,
)
for t, n, h in [(9, 30, 33), (6, 25, 128), (2, 3, 1024)]:
    case(
        f"lstm_{t}x{n}x{h}",
        grads(lambda *x: torch.stack(lstm(*x)), 4),
        *(r(t, n, 4 * h), r(n, h), r(n, h), r(4 * h, h), r(2, t, n, h)),
        terms=t * n * h,
        large=True,
    )
