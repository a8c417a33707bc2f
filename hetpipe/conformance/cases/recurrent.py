"""Cases of an LSTM layer, forward and backward; most sizes do not fill a kernel's tiles."""

from __future__ import annotations

import torch

import hetpipe.sdk.operators.recurrent  # noqa: F401 - registers the operator
from hetpipe.conformance.cases.case import Feed, grads, r, table

case = table("recurrent")

own = torch.ops.hetpipe


def layer(
    x: torch.Tensor,
    h0: torch.Tensor,
    c0: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    *bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and the last c, with weights as small as torch's initial ones, to limit errors."""
    scale = w_hh.shape[1] ** -0.5
    y, last_c, *_ = own.lstm_layer(x, h0, c0, w_ih * scale, w_hh * scale, *bias or (None,))
    return y, last_c


def both(*args: torch.Tensor) -> torch.Tensor:
    """Return y and the last c in one tensor, so that both have a gradient."""
    y, last_c = layer(*args)
    return torch.cat([y, last_c.unsqueeze(0)])


def transposed(
    x: torch.Tensor, h0: torch.Tensor, c0: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor
) -> torch.Tensor:
    """Compute `both` from transposed inputs, so that inputs and gradients are not row-major."""
    y, last_c = layer(x.transpose(0, 1), h0.t(), c0.t(), w_ih.t(), w_hh.t())
    return torch.cat([y, last_c.unsqueeze(0)]).transpose(0, 1)


def layer_feeds(t: int, n: int, i: int, h: int) -> tuple[Feed, ...]:
    return r(t, n, i), r(n, h), r(n, h), r(4 * h, i), r(4 * h, h)


# Each shape: steps, batch, hidden width.
SHAPES = [(1, 1, 1), (3, 2, 5), (2, 13, 4), (4, 3, 17), (5, 4, 16)]
for t, n, h in SHAPES:
    name, feeds = f"lstm_{t}x{n}x{h}", layer_feeds(t, n, h + 2, h)
    loop = (r(t, n, 4 * h), r(n, h), r(n, h), r(4 * h, h))
    case(name, lambda *args: own.lstm(*args), *loop, terms=h)
    case(f"{name}_y", grads(lambda *x: layer(*x)[0], 5), *feeds, r(t, n, h), terms=t * n * h)
    case(f"{name}_c", grads(lambda *x: layer(*x)[1], 5), *feeds, r(n, h), terms=t * n * h)
case("lstm_both", grads(both, 5), *layer_feeds(3, 5, 4, 6), "4x5x6", terms=90)
case("lstm_bias", grads(both, 6), *layer_feeds(3, 5, 4, 6), "24 4x5x6", terms=90)
case(
    "lstm_transposed",
    grads(transposed, 5),
    *(r(5, 3, 4), r(6, 5), r(6, 5), r(4, 24), r(6, 24), r(5, 4, 6)),
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
        grads(both, 5),
        *(*layer_feeds(t, n, h, h), r(t + 1, n, h)),
        terms=t * n * h,
        large=True,
    )
