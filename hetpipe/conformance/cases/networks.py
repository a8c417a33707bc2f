"""Cases of softmax, losses, normalisation, embeddings, dropout and an optimizer step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hetpipe.conformance.cases.case import aten, grads, r, table

case = table("networks")


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q * 0.5) @ k.transpose(-2, -1)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    return scores.masked_fill(mask.logical_not(), float("-inf")).softmax(-1) @ v


def _adamw(
    p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, lr: torch.Tensor
) -> Any:
    m = torch.lerp(m, g, 0.1)
    v = torch.addcmul(v * 0.999, g, g, value=0.001)
    return p * (1 - lr * 0.01) - lr * (m / (v.sqrt() + 1e-8)), m, v, torch.zeros_like(g)


case("softmax", grads(lambda a: a.softmax(-1), 1), "3x4x5 3x4x5", terms=5)
case("softmax_middle", grads(lambda a: a.softmax(1), 1), "3x4x5 3x4x5", terms=5)
case("log_softmax", grads(lambda a: a.log_softmax(1), 1), "3x6 3x6", terms=6)
for how in ("none", "mean", "sum"):
    tangent = r(5) if how == "none" else r()
    case(
        f"nll_{how}",
        grads(lambda a, y, h=how: F.nll_loss(a, y, reduction=h), 1),
        "5x4 4:5",
        tangent,
        terms=5,
    )
    case(
        f"mse_{how}",
        grads(lambda a, b, h=how: F.mse_loss(a, b, reduction=h), 2),
        "5 5",
        tangent,
        terms=5,
    )
case(
    "nll_weighted",
    grads(lambda a, y, w: F.nll_loss(a, y, w, ignore_index=2), 1),
    "6x4 4:6 +4 ()",
    terms=6,
)
case("nll_2d", grads(lambda a, y: F.nll_loss(a, y), 1), "2x3x2x2 3:2x2x2 ()", terms=8)
case(
    "cross_entropy",
    grads(lambda a, y: F.cross_entropy(a, y, ignore_index=1), 1),
    "6x4 4:6 ()",
    terms=6,
)
case("mse_core", lambda a, b: aten.mse_loss(a, b), "5 5", terms=5)

case(
    "layer_norm", grads(lambda x, w, b: F.layer_norm(x, (5,), w, b), 3), "3x4x5 5 5 3x4x5", terms=12
)
case("layer_norm_2d", grads(lambda x: F.layer_norm(x, (4, 5)), 1), "3x4x5 3x4x5", terms=20)
case(
    "group_norm",
    grads(lambda x, w, b: F.group_norm(x, 2, w, b), 3),
    "2x4x3x3 4 4 2x4x3x3",
    terms=18,
)
case(
    "batch_norm",
    grads(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), 3),
    "4x3x2x2 3 3 4x3x2x2",
    terms=16,
)
case(
    "batch_norm_plain",
    grads(lambda x: F.batch_norm(x, None, None, training=True), 1),
    "6x3 6x3",
    terms=6,
)
case(
    "batch_norm_eval",
    grads(lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b), 3),
    "4x3x2x2 3 3 3 +3 4x3x2x2",
    terms=16,
)
case(
    "batch_norm_functional",
    lambda x, w, b, m, v: aten._native_batch_norm_legit_functional(x, w, b, m, v, True, 0.1, 1e-5),
    "4x3x2x2 3 3 3 +3",
    terms=16,
)
case(
    "batch_norm_no_stats",
    lambda x, w, b: aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5),
    "4x3x2 3 3",
    terms=8,
)
case(
    "batch_norm_no_training",
    lambda x, w, b, m, v: aten._native_batch_norm_legit_no_training(x, w, b, m, v, 0.1, 1e-5)[0],
    "4x3x2 3 3 3 +3",
    terms=8,
)

case("embedding", grads(lambda w, i: F.embedding(i, w), 1), "6x4 6:2x3 2x3x4", terms=6)
case(
    "embedding_padding",
    grads(lambda w, i: F.embedding(i, w, padding_idx=1, scale_grad_by_freq=True), 1),
    "3x4 3:8 8x4",
    terms=8,
)
hetpipe = torch.ops.hetpipe
case(
    "keep_mask",
    lambda rng: (
        hetpipe.keep_mask(rng, 3, [4, 5], 0.7, 0, 4),
        hetpipe.keep_mask(rng, 9, [3, 6], 0.5, 1, 2),
    ),
    "rng",
)
case("uniform", lambda rng: hetpipe.uniform(rng, 1, [2, 3, 4], 1, 3), "rng")
case(
    "dropout",
    grads(lambda x, rng: x * hetpipe.keep_mask(rng, 0, [4, 6], 0.9, 0, 4) / 0.9, 1),
    "4x6 rng 4x6",
)
case("attention", grads(_attention, 3), "2x2x5x4 2x2x5x4 2x2x5x4 2x2x5x4", terms=5)
case("adamw", _adamw, "4x3 4x3 4x3 +4x3 +()")
