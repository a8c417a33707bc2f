"""Cases of views, indexing, factories, reductions and matrix products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hetpipe.conformance.cases.case import aten, grads, table

case = table("shapes")

case("view", lambda a: (a.view(6, 2), a.view(-1), aten._unsafe_view(a, [2, 6]) + 1), "3x4")
case(
    "noncontiguous",
    lambda a, b: (
        a.t() + b,
        (a.t() @ b.t()).t().reshape(-1),
        a.t().reshape(2, 6) * 2,
        a.t().contiguous().view(12),
    ),
    "3x4 4x3",
    terms=4,
)
case("permute", lambda a: (a.permute(2, 0, 1), a.transpose(0, -1) + 1, a.mT), "2x3x4")
case("expand", lambda a: (a.expand(2, 3, 4), a.expand(-1, 4) * 2), "3x1")
case(
    "squeeze",
    lambda a: (
        a.squeeze(),
        a.squeeze(0),
        a.squeeze(1),
        aten.squeeze.dims(a, [0, 2]),
        a.unsqueeze(-1),
        a.unsqueeze(0),
    ),
    "1x3x1",
)
case("slice", lambda a: (a[1:3], a[:, ::2], a[:, -2:], a[1], a[..., -1], a[2:9]), "4x5")
case(
    "slice_scatter",
    lambda a, b: (aten.slice_scatter(a, b, 1, 1, 3), aten.select_scatter(a, b[:, 0], 1, 2)),
    "4x5 4x2",
)
case("slice_backward", grads(lambda a: a[1:3, ::2].sin(), 1), "4x5 2x3")
case(
    "slice_backward_whole",
    lambda dy: (
        aten.slice_backward(dy, [4, 5], 1, 1, 4, 1),
        aten.select_backward(dy[:, 0], [4, 5], 1, 2),
    ),
    "4x3",
)
case("select_backward", grads(lambda a: a[1].sin(), 1), "4x5 5")
case(
    "cat",
    lambda a, b: (torch.cat([a, b], 1), torch.stack([a, a], 1), torch.cat([a, a, a])),
    "3x2 3x4",
)
case(
    "cat_empty_vector",  # cat ignores a tensor of shape (0,), such as an empty cache of keys
    lambda a: (torch.cat([a.new_zeros(0), a], 1), torch.cat([a, a.new_zeros(0), a], -1)),
    "3x2",
)
case("stack", lambda a: aten.stack([a, a + 1], -1), "3x2")
case("split", lambda a: (*a.split(2, 1), *a.split([1, 4], 1), *a.chunk(2), *a.unbind(0)), "3x5")
case("repeat", lambda a: (a.repeat(2, 3), a.flip(0), a.roll(1, 1), a.roll(2)), "2x3")
case(
    "pad", lambda a: (F.pad(a, (1, 2)), F.pad(a, (1, 0, 2, 1), value=1.5), F.pad(a, (-1, 1))), "2x3"
)
case("triangles", lambda a: (a.tril(), a.triu(1), a.tril(-1), a.diagonal() + 0), "4x4")
case("index", lambda a, i: (a[i], a[:, i], a[i, i], aten._unsafe_index(a, [i])), "5x5 5:3")
case(
    "index_put",
    lambda a, i, v: (aten.index_put(a, [i], v, True), aten._unsafe_index_put(a, [i], v, True)),
    "5x4 5:6 6x4",
    terms=6,
)
case("index_put_once", lambda a, v: aten.index_put(a, [torch.arange(3)], v), "5x4 3x4")
case("index_select", lambda a, i: (a.index_select(1, i), a.gather(1, i.expand(5, 3))), "5x4 4:3")
case("gather_nothing", lambda a, i: a.gather(0, i), "5 5:2x0")
case(
    "scatter",
    lambda a, i, s: (aten.scatter_add(a, 0, i, s), aten.scatter.value(a, 0, i, 2.0)),
    "5x3 5:4x3 4x3",
    terms=4,
)
case(
    "scatter_src",
    lambda a, s: aten.scatter.src(a, 0, torch.arange(4)[:, None].expand(4, 3), s),
    "5x3 4x3",
)
case(
    "factories",
    lambda a: (
        torch.zeros_like(a),
        torch.ones_like(a),
        torch.full_like(a, 2.5),
        torch.arange(5),
        torch.arange(2, 9, 3),
        torch.arange(3.0),
        torch.zeros(2, 3),
        torch.ones(2),
        torch.full((2,), 7),
        aten.scalar_tensor(2.0) + 0,
        a.new_zeros(3),
        a.new_ones(2),
        a.new_full((2,), 4.0),
        aten.arange.start(1, 4),
    ),
    "2x3",
)
case("zeros_like", lambda a: torch.zeros_like(a) + a, "2x3")
case(
    "empty_filled",
    lambda a: (aten.fill(torch.empty(2, 3), 1.0), aten.fill(torch.empty_like(a), 2.0)),
    "3",
)


case(
    "sum", lambda a: (a.sum(), a.sum(1), a.sum((0, 2), keepdim=True), a.sum(-1)), "3x4x5", terms=60
)
case(
    "sum_bool_int",
    lambda m, i: (m.sum(), m.sum(0), i.sum(), i.sum(1), i.float().mean()),
    "?4x5 9:4x5",
    terms=20,
)
case("mean", lambda a: (a.mean(), a.mean(1), a.mean((0, 2), keepdim=True)), "3x4x5", terms=60)
case("prod", lambda a: (a.prod(), a.prod(1)), "2x4", terms=8)
case(
    "extremes",
    lambda a: (
        a.amax(1),
        a.amin((0, 1), keepdim=True),
        a.max(),
        a.min(),
        a.argmax(1),
        a.argmin(0, True),
        a.argmax(),
        *a.max(1),
        *a.min(0),
    ),
    "4x6",
)
case("any_all", lambda m: (m.any(), m.any(1), m.all(), m.all(0), aten.any.dims(m, [0, 1])), "?4x3")
case(
    "variance",
    lambda a: (a.var(1), a.var(), *torch.var_mean(a, 1, correction=0, keepdim=True)),
    "4x6",
    terms=24,
)
case("cumsum", lambda a: (a.cumsum(1), a.cumsum(0), a[0, 0].cumsum(0)), "3x5", terms=5)
case("cumsum_integers", lambda k: (k.cumsum(-1), (k > 3).cumsum(0)), "7:4x6")
case("matmul", lambda a, b: (a @ b, aten.mm(a, b), a.t().t() @ b), "5x7 7x3", terms=7)
case("mm_thin", lambda a, b: (a @ b, b @ a), "1x6 6x1", terms=6)
case("mm_transposed", lambda a, b: (a.t() @ b, b.t() @ a), "7x4 7x5", terms=7)
case("bmm", lambda a, b: (torch.bmm(a, b), torch.bmm(b.mT, a.mT)), "3x4x5 3x5x2", terms=5)
case(
    "addmm",
    lambda c, a, b: (torch.addmm(c, a, b), torch.addmm(c, a, b, beta=0.5, alpha=2.0)),
    "3 4x6 6x3",
    terms=6,
)
case("baddbmm", lambda c, a, b: torch.baddbmm(c, a, b, alpha=0.5), "2x1x3 2x4x6 2x6x3", terms=6)
case("vectors", lambda a, b: (a @ b, torch.dot(b, b), aten.mv(a, b)), "4x6 6", terms=6)
case("linear", grads(F.linear, 3), "2x4x6 3x6 3 2x4x3", terms=8)
case(
    "linear_whole",
    lambda x, w, b: (aten.linear(x, w, b), aten.matmul(x, w.t())),
    "4x6 3x6 3",
    terms=6,
)
case("mm_large", lambda a, b: a @ b, "100x130 130x70", terms=130, large=True)
case("reshape_whole", lambda a: aten.reshape(a.t(), [12]) + 1, "3x4")
case("fill", lambda a, b: (aten.fill(a, 2.5), aten.fill(a, b) + a), "3x4 ()")
case(
    "as_strided",
    lambda a: (aten.as_strided(a, [12], [1]) + 1, aten.as_strided(a, [2, 3], [1, 4], 1)),
    "3x4",
)
