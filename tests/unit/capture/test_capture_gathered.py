"""Products of an embedding's rows: where a batch repeats rows, the table is multiplied instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_harness import Stages, check, compare, eager, total
from torch import nn

from hetpipe.capture import Captured
from hetpipe.sdk.graph import core_decompositions, operator_name

ROWS, WIDTH, OUT, CLASSES, STEPS = 7, 5, 6, 3, 5
ENOUGH, TOO_FEW = 3, 2
"""Sample counts with at least twice as many tokens as the table has rows, and with fewer."""
SUMS, LSTM = "aten.embedding_dense_backward", ("hetpipe.lstm", "hetpipe.lstm_backward")
KEPT = core_decompositions(keep=(SUMS, *LSTM))


class Matrix(nn.Module):
    """A product of rows and a matrix, which is stored plainly or transposed."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.matrix = nn.Parameter(torch.randn((OUT, WIDTH) if transposed else (WIDTH, OUT)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.matrix.t() if self.transposed else self.matrix)


READERS = {
    "linear": lambda: nn.Linear(WIDTH, OUT),
    "unbiased": lambda: nn.Linear(WIDTH, OUT, bias=False),
    "matrix": lambda: Matrix(transposed=False),
    "transposed": lambda: Matrix(transposed=True),
    "lstm": lambda: nn.LSTM(WIDTH, OUT),
    "lstm, samples first": lambda: nn.LSTM(WIDTH, OUT, batch_first=True),
}
"""Modules that read the rows. LSTMs have a fourth product over all tokens, with their states."""


class Model(nn.Module):
    """A model from tokens (n, STEPS) to class scores."""

    def __init__(self, reader: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, **settings)
        self.reader = reader
        self.head = nn.Linear(OUT, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table(x)
        turned = isinstance(self.reader, nn.LSTM) and not self.reader.batch_first
        y = self.reader(rows.transpose(0, 1) if turned else rows)
        y = y[0] if isinstance(y, tuple) else y
        return self.head(y.tanh().mean(0 if turned else 1))


def row_products(model: nn.Module, samples: int, table: Mapping[Any, Any] = KEPT) -> int:
    """Check the passes against eager torch, and count their products that have a row per token."""
    batch = torch.randint(0, ROWS, (samples, STEPS)), torch.randint(0, CLASSES, (samples,))
    case = model.double(), F.cross_entropy, batch
    captured = Captured(*case)
    graphs = captured.stage_graphs([], [table], [samples], None)
    check(case, captured, graphs, [samples])
    nodes = [n for p in graphs[0].passes[samples].programs for n in p.graph.graph.nodes]
    found = [n for n in nodes if operator_name(n) in ("aten.mm.default", "aten.addmm.default")]
    tokens = samples * STEPS
    return sum(any(tokens in arg.meta["val"].shape for arg in n.args[-2:]) for n in found)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_tables_are_multiplied_where_tokens_repeat_rows(reader: str) -> None:
    torch.manual_seed(2)
    left = int("lstm" in reader)
    assert row_products(Model(READERS[reader]()), ENOUGH) == left
    assert row_products(Model(READERS[reader]()), TOO_FEW) == left + 3


def test_a_padding_row_and_a_frozen_table() -> None:
    """The gradient of a table with a padding row omits that row, so the matrix cannot use it."""
    torch.manual_seed(3)
    assert row_products(Model(nn.Linear(WIDTH, OUT), padding_idx=1), ENOUGH) == 3
    frozen = Model(nn.Linear(WIDTH, OUT))
    frozen.table.weight.requires_grad_(False)
    assert row_products(frozen, ENOUGH) == 0


@pytest.mark.parametrize("table", [{}, KEPT], ids=["aten", "core"])
def test_halves_of_a_backward(table: Mapping[Any, Any]) -> None:
    """The half with the weight gradients sums the rows, also with torch's own operators."""
    torch.manual_seed(6)
    batch = torch.randint(0, ROWS, (ENOUGH, STEPS)), torch.randint(0, CLASSES, (ENOUGH,))
    case = Model(nn.Linear(WIDTH, OUT)).double(), F.cross_entropy, batch
    captured = Captured(*case)
    graphs = captured.stage_graphs([2], [table] * 2, [ENOUGH], None, halves=True)
    found = total(Stages(captured, graphs, halves=True).step(batch, [ENOUGH], [1.0]))
    assert row_products(case[0], ENOUGH, table) == 0
    for name, value in eager(*case, [ENOUGH], [1.0])[2].items():
        compare(found[name], value, name)


def test_decomposed_row_sums_are_not_used() -> None:
    torch.manual_seed(4)
    assert row_products(Model(nn.Linear(WIDTH, OUT)), ENOUGH, core_decompositions(keep=LSTM)) == 2


def test_rows_with_another_reader_and_a_tied_table() -> None:
    """The pass keeps rows that another operator reads too, and the sums of their gradients."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(ROWS, WIDTH)
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.table(x)
            y = self.first(rows).tanh() + self.second(rows.flip(1)).tanh()
            return F.linear(y.mean(1), self.table.weight)[:, :CLASSES]

    torch.manual_seed(5)
    assert row_products(Two(), ENOUGH) == 4  # three of `second`, and a gradient of `first`
