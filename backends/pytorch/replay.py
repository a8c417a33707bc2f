"""Replays a program from a graph of the card's driver (CUDA, HIP): one launch for all operators.

A captured graph reads and writes fixed addresses, and each replay overwrites the results of the
last replay. The contract of backends wants new results and unchanged inputs, and several
micro-batches in flight hold results of the same program. These rules keep the contract:

- A *fixed* input has the same address in every run: a weight, or a gradient that each run adds to.
  The graph uses the caller's memory. If the address changes, the program is captured again.
- All other inputs are copied into static tensors before a replay.
- A result in the memory of a fixed input needs no copy, because the input was donated. A result in
  the static copy of a donated input is copied back into the donated input. All other results are
  copied into new tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .program import Way, home_of

Replay = Callable[[], None]
Recorder = Callable[[Callable[[], list[torch.Tensor]]], tuple[Replay, list[torch.Tensor]]]
"""Captures the work of a function on the present stream without doing it. Returns a function that
does the work, and the function's results, which hold values after each replay."""


class Replayed:
    """Runs `way` from a graph, from the second run on. `steady` inputs are the weights."""

    def __init__(self, way: Way, steady: frozenset[int], record: Recorder) -> None:
        self._way = way
        self._steady = steady
        self._record = record
        self._fixed: frozenset[int] | None = None
        self._has_moved = False
        self._captured: _Captured | None = None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._fixed is None:  # libraries allocate their workspaces in the first run
            results = self._way(tensors)
            homes = {home_of(result, tensors) for result in results}
            self._fixed = self._steady.union(home for home in homes if home is not None)
            return results
        if self._captured is None:
            self._captured = _Captured(self._way, tensors, self._fixed, self._record)
        elif moved := self._captured.moved(tensors):
            # An address that changes again and again must not cause a capture each time.
            self._fixed = frozenset() if self._has_moved else self._fixed - moved
            self._has_moved = True
            self._captured = None  # frees its memory
            self._captured = _Captured(self._way, tensors, self._fixed, self._record)
        return self._captured.run(tensors)


class _Captured:
    """A captured program, with its static tensors. It keeps no tensor of the caller."""

    def __init__(
        self, way: Way, tensors: Sequence[torch.Tensor], fixed: frozenset[int], record: Recorder
    ) -> None:
        self._addresses = {index: tensors[index].data_ptr() for index in fixed}
        self._static = {
            index: torch.empty_like(tensor)
            for index, tensor in enumerate(tensors)
            if index not in fixed
        }
        inputs = [self._static.get(index, tensor) for index, tensor in enumerate(tensors)]
        self._replay, self._results = record(lambda: way(inputs))
        self._homes = [home_of(result, inputs) for result in self._results]

    def moved(self, tensors: Sequence[torch.Tensor]) -> frozenset[int]:
        """Return the fixed inputs that have other addresses than in the capture."""
        places = self._addresses.items()
        return frozenset(index for index, at in places if tensors[index].data_ptr() != at)

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._static:
            given = [tensors[index] for index in self._static]
            torch._foreach_copy_(list(self._static.values()), given)
        self._replay()
        results, sources, targets = [], [], []
        for result, home in zip(self._results, self._homes, strict=True):
            own = torch.empty_like(result) if home is None else tensors[home].view(result.shape)
            if home is None or home in self._static:
                sources.append(result)
                targets.append(own)
            results.append(own)
        if targets:
            torch._foreach_copy_(targets, sources)
        return results


def cuda_recorder(device: torch.device) -> Recorder:
    """Return a recorder of CUDA graphs, or of HIP graphs in a torch for AMD.

    All graphs of a device share one pool of memory, because they run one after another and leave
    nothing in it but their results. Other threads may call the driver during a capture.
    """
    pools: list[Any] = []

    def record(run: Callable[[], list[torch.Tensor]]) -> tuple[Replay, list[torch.Tensor]]:
        if not pools:
            pools.append(torch.cuda.graph_pool_handle())
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        with torch.cuda.graph(graph, pools[0], stream, capture_error_mode="thread_local"):
            results = run()
        return graph.replay, results

    return record
