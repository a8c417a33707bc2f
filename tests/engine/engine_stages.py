"""A linear model cut by hand into stages, and its training in plain numpy.

    h0 = x w0;  h1 = h0 w1;  ...;  p = h w_last;  loss = sum((p - y)^2), count = p's elements

With `skip`, h0 is added to the input of the last stage, and the stages between relay it. With
`tied`, the first and the last stage have the same weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.capture.program import (
    COUNT,
    CUT,
    GRAD,
    INPUT,
    LOSS,
    PARAM,
    SAVED,
    SCALAR,
    STATE,
    TANGENT,
    PassPrograms,
    Program,
    Slot,
    StageGraphs,
)
from hetpipe.sdk.graph import canonical

WIDTH = 4
LR, MOMENTUM = 0.05, 0.9
Array = np.ndarray[Any, Any]


def program(
    body: Callable[..., Any], inputs: Sequence[Slot], outputs: Sequence[tuple[str, str]]
) -> Program:
    """Trace `body`; output slots get their shapes from the graph."""
    example = [torch.ones(slot.shape, dtype=getattr(torch, slot.dtype)) for slot in inputs]
    graph = canonical(make_fx(lambda *args: tuple(body(*args)))(*example))
    nodes = graph.graph.output_node().args[0]
    values = [node.meta["val"] for node in nodes]
    slots = [
        Slot(role, name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for (role, name), value in zip(outputs, values, strict=True)
    ]
    return Program(graph, tuple(inputs), tuple(slots))


def weight_name(stage: int, stages: int, tied: bool) -> str:
    return "w0" if tied and stage == stages - 1 else f"w{stage}"


def make_stages(
    stages: int, sizes: Sequence[int], *, skip: bool = False, tied: bool = False
) -> list[StageGraphs]:
    made = []
    for n in range(stages):
        name = weight_name(n, stages, tied)
        passes = {size: _passes(n, stages, size, name, skip) for size in sizes}
        ties = (("w0", 0, (stages - 1,)),) if tied and n in (0, stages - 1) else ()
        made.append(StageGraphs(n, passes, _update(name, owner=not (ties and n)), {}, ties))
    return made


def _matrix(role: str, name: str, rows: int = WIDTH) -> Slot:
    return Slot(role, name, (rows, WIDTH), "float64")


def _passes(n: int, stages: int, size: int, weight: str, skip: bool) -> PassPrograms:
    first, last = n == 0, n == stages - 1
    skips = skip and not first
    w, grad = _matrix(PARAM, weight), _matrix(GRAD, weight)
    enter = _matrix(INPUT, "x", size) if first else _matrix(CUT, f"h{n - 1}", size)
    relayed = [_matrix(CUT, "h0", size)] if skips and n > 1 else []

    def entering(h: torch.Tensor, rest: Sequence[torch.Tensor]) -> torch.Tensor:
        return h + rest[0] if last and skips and rest else h

    if last:
        target = _matrix(INPUT, "y", size)

        def forward(w: Any, h: Any, y: Any, *rest: Any) -> Any:
            error = torch.mm(entering(h, rest), w) - y
            return torch.sum(error * error), torch.full_like(torch.sum(y), size * WIDTH), error

        def backward(w: Any, h: Any, error: Any, tangent: Any, grad: Any, *rest: Any) -> Any:
            d_p = error * 2.0 * tangent
            d_h = torch.mm(d_p, w.t())
            grads = [d_h, grad + torch.mm(entering(h, rest).t(), d_p)]
            return [*grads, d_h] if rest else grads

        fw = program(
            forward, [w, enter, target, *relayed], [(LOSS, LOSS), (COUNT, COUNT), (SAVED, "error")]
        )
        tangent = Slot(TANGENT, LOSS, (), "float64")
        bw = program(
            backward,
            [w, enter, _matrix(SAVED, "error", size), tangent, grad, *relayed],
            [(TANGENT, f"h{n - 1}"), (GRAD, weight), *[(TANGENT, "h0")] * len(relayed)],
        )
        return PassPrograms(size, fw, bw)

    def forward(w: Any, h: Any, *rest: Any) -> Any:
        return (torch.mm(h, w), *rest)

    def backward(w: Any, h: Any, tangent: Any, grad: Any, *rest: Any) -> Any:
        made = [grad + torch.mm(h.t(), tangent)]
        if first:
            return made
        d_h = torch.mm(tangent, w.t())
        if skips and n == 1:
            return [*made, d_h + rest[0]]  # h0 also goes to the last stage
        return [*made, d_h, *rest]

    passing = skips and stages > 2
    h0 = [_matrix(CUT, "h0", size)] if passing and n > 1 else []
    outputs = [(CUT, f"h{n}")] + [(CUT, "h0")] * (passing and n >= 1)
    fw_inputs = [w, enter, *h0]
    if passing and n == 1:
        fw = program(lambda w, h: (torch.mm(h, w), h), [w, enter], outputs)
    else:
        fw = program(forward, fw_inputs, outputs)
    tangents = [_matrix(TANGENT, f"h{n}", size)]
    more = [_matrix(TANGENT, "h0", size)] if passing else []
    back = [] if first else [(TANGENT, f"h{n - 1}")] + [(TANGENT, "h0")] * (passing and n > 1)
    bw = program(backward, [w, enter, *tangents, grad, *more], [(GRAD, weight), *back])
    return PassPrograms(size, fw, bw)


def _update(weight: str, owner: bool) -> Program:
    w, grad = _matrix(PARAM, weight), _matrix(GRAD, weight)
    if not owner:
        return program(lambda g: [torch.zeros_like(g)], [grad], [(GRAD, weight)])
    state = _matrix(STATE, f"momentum/{weight}")
    lr, scale = (Slot(SCALAR, name, (), "float32") for name in ("lr", "grad_scale"))

    def body(w: Any, g: Any, m: Any, lr: Any, scale: Any) -> Any:
        moved = m * MOMENTUM + g * scale
        return w - moved * lr, moved, torch.zeros_like(g)

    outputs = [(PARAM, weight), (STATE, state.name), (GRAD, weight)]
    return program(body, [w, grad, state, lr, scale], outputs)


def make_values(stages: int, tied: bool = False) -> dict[str, Array]:
    rng = np.random.default_rng(7)
    count = stages - 1 if tied else stages
    return {f"w{n}": rng.normal(size=(WIDTH, WIDTH)) * 0.5 for n in range(count)}


class Reference:
    """The same training without stages, devices or micro-batches, in float64."""

    def __init__(self, stages: int, skip: bool = False, tied: bool = False) -> None:
        self.stages, self.skip, self.tied = stages, skip, tied
        self.weights = make_values(stages, tied)
        self.momentum = {name: np.zeros_like(w) for name, w in self.weights.items()}

    def gradients(self, x: Array, y: Array) -> tuple[float, dict[str, Array]]:
        """Return the sum of squares and its gradients."""
        last = self.stages - 1
        names = [weight_name(n, self.stages, self.tied) for n in range(self.stages)]
        skips = self.skip and self.stages > 2
        entering, h = [], x
        for n, name in enumerate(names):
            if skips and n == last:
                h = h + entering[1]
            entering.append(h)
            h = h @ self.weights[name]
        error = h - y
        grads = {name: np.zeros_like(w) for name, w in self.weights.items()}
        d_h, d_skip = 2.0 * error, 0.0
        for n in reversed(range(self.stages)):
            grads[names[n]] += entering[n].T @ d_h
            d_h = d_h @ self.weights[names[n]].T
            if skips and n == last:
                d_skip = d_h
            if n == 1:
                d_h = d_h + d_skip
        return float((error**2).sum()), grads

    def step(self, x: Array, y: Array) -> float:
        loss, grads = self.gradients(x, y)
        for name, grad in grads.items():
            self.momentum[name] = self.momentum[name] * MOMENTUM + grad / y.size
            self.weights[name] = self.weights[name] - self.momentum[name] * float(np.float32(LR))
        return loss / y.size
