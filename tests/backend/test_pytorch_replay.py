"""Captured graphs keep the contract: results are new, inputs unchanged, weights read in place.

A tape stands for the driver's graph. Like the graph, it reads and writes the tensors of its
capture. Between two runs the tests poison all static tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from found_devices import trace
from hetpipe.backends.pytorch import choice
from hetpipe.backends.pytorch.choice import times_in_turns
from hetpipe.backends.pytorch.program import Program
from hetpipe.backends.pytorch.replay import Replay, Replayed
from random_graphs import random_function

CPU = torch.device("cpu")


class Tape:
    """Captures a run and replays it on the same tensors. A capture changes no tensor."""

    def __init__(self) -> None:
        self.captures = 0
        self.static: list[torch.Tensor] = []

    def record(self, run: Callable[[], list[torch.Tensor]]) -> tuple[Replay, list[torch.Tensor]]:
        self.captures += 1
        (inputs,) = (cell.cell_contents for cell in run.__closure__ or () if _is_list(cell))
        before = [tensor.clone() for tensor in inputs]
        results = run()
        for tensor, value in zip(inputs, before, strict=True):
            tensor.copy_(value)
        given = {tensor.data_ptr() for tensor in inputs}
        self.static = [result for result in results if result.data_ptr() not in given]

        def replay() -> None:
            for result, value in zip(results, run(), strict=True):
                if result.data_ptr() != value.data_ptr():
                    result.copy_(value)

        return replay, results


def _is_list(cell: Any) -> bool:
    return isinstance(cell.cell_contents, list)


def poison(replayed: Replayed, tape: Tape) -> None:
    captured = replayed._captured
    for tensor in (*tape.static, *(captured._static.values() if captured else ())):
        tensor.fill_(float("nan"))


def step(p: torch.Tensor, g: torch.Tensor, x: torch.Tensor) -> Any:
    """Return a result that reuses x, an updated weight, zeroed gradients, and a new tensor."""
    square, scale = p.t() @ p, x.sum()
    y = (x * 2).exp()
    return y, p - 0.1 * g * scale, torch.zeros_like(g), square


def replays(fn: Any, count: int, donate: set[int], steady: set[int]) -> tuple[Replayed, Tape]:
    graph = trace(fn, [torch.randn(3, 3) for _ in range(count)], {})
    tape = Tape()
    program = Program(graph, frozenset(donate), CPU, "pytorch:cpu:0")
    return Replayed(program.call, frozenset(steady), tape.record), tape


@torch.inference_mode()
def test_a_training_reads_weights_in_place_and_keeps_earlier_results() -> None:
    replayed, tape = replays(step, 3, {0, 1, 2}, {0})
    p, g = torch.randn(3, 3), torch.randn(3, 3)
    weights, gradients = p.clone(), g.clone()
    held = []
    for number in range(6):
        x = torch.randn(3, 3)  # at another address each time, because all results are held
        given = x.clone()
        g.copy_(gradients.normal_())
        wanted = step(weights, gradients, x)
        weights = wanted[1]
        results = replayed([p, g, given])
        assert results[1].data_ptr() == p.data_ptr()
        assert results[2].data_ptr() == g.data_ptr()
        held.append((given, results[0], wanted[0], results[3], wanted[3]))
        poison(replayed, tape)
        torch.testing.assert_close(p, weights)
        for _, y, y_wanted, square, square_wanted in held:
            torch.testing.assert_close(y, y_wanted)
            torch.testing.assert_close(square, square_wanted)
        assert tape.captures == min(number, 2)  # x moves, so a second capture copies it


@torch.inference_mode()
def test_inputs_that_are_not_donated_do_not_change() -> None:
    replayed, tape = replays(step, 3, set(), {0})
    for _ in range(4):
        inputs = [torch.randn(3, 3) for _ in range(3)]
        before = [tensor.clone() for tensor in inputs]
        for found, wanted in zip(replayed(inputs), step(*before), strict=True):
            torch.testing.assert_close(found, wanted)
        poison(replayed, tape)
        for tensor, value in zip(inputs, before, strict=True):
            assert torch.equal(tensor, value)


@torch.inference_mode()
def test_versions_of_weights_cause_at_most_two_further_captures() -> None:
    """A policy that keeps versions gives each run other weights."""
    replayed, tape = replays(lambda a, b, c, x: (a @ x + b * c,), 4, set(), {0, 1, 2})
    first, second = ([torch.randn(3, 3) for _ in range(3)] for _ in range(2))
    for moved in (0, 0, 1, 2, 3, 1, 0, 3):  # in the run after the capture, one weight moves
        weights = second[:moved] + first[moved:]
        a, b, c = weights
        x = torch.randn(3, 3)
        torch.testing.assert_close(replayed([a, b, c, x])[0], a @ x + b * c)
        poison(replayed, tape)
    assert tape.captures == 3


@torch.inference_mode()
def test_random_graphs_agree_for_every_donation() -> None:
    generator = np.random.default_rng(0)
    binary = [torch.add, torch.mul, torch.maximum]
    unary = [torch.relu, torch.tanh, torch.t, lambda t: t.reshape(-1).view(3, 3)]
    for _ in range(4):
        chosen = random_function(generator, 10, binary, unary)

        def fn(*inputs: torch.Tensor, chosen: Any = chosen) -> Any:
            return tuple(value + 0 for value in chosen(*inputs))

        for donate in itertools.chain.from_iterable(
            itertools.combinations(range(3), size) for size in range(4)
        ):
            replayed, tape = replays(fn, 3, set(donate), {0})
            held = []
            for _ in range(4):
                inputs = [torch.randn(3, 3) for _ in range(3)]
                held.append((replayed([tensor.clone() for tensor in inputs]), fn(*inputs)))
                poison(replayed, tape)
            for found, wanted in held:
                for one, other in zip(found, wanted, strict=True):
                    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, TypeError])
def test_a_way_that_fails_is_not_chosen(error: type[Exception]) -> None:
    def fail(_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        raise error("no memory for the graph")

    value = torch.arange(3.0)
    ways = {"eager": lambda tensors: [tensors[0].add_(1)], "eager graph": fail}
    times_s = times_in_turns(ways, [value], frozenset({0}), lambda: None)
    assert times_s == {"eager": []}
    assert choice.fastest(times_s) == "eager"
    assert value.tolist() == [0, 1, 2]
    with pytest.raises(error):
        times_in_turns({"eager": fail}, [value], frozenset({0}), lambda: None)
