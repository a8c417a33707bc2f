"""Peak memory of torch's tensors during an eager training step."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree

from hetpipe.train.eager import Eager, Tree


def peak_nbytes(eager: Eager, x: Tree, y: Tree, samples: int) -> int:
    """Return the peak bytes of all tensors: the persistent tensors, plus the most that a step adds.

    Weights, buffers, optimizer state and the batch are persistent. Torch's profiler counts all
    other tensors when they are allocated and freed. These include temporaries inside operators, but
    not the memory that libraries allocate themselves. An earlier step must have created the
    optimizer state. Gradients are set to None first.
    """
    for parameter in eager.model.parameters():
        parameter.grad = None
    tensors = [*eager.tensors(), *_pytree.tree_leaves((x, y))]
    storages = {
        each.data_ptr(): each.nbytes() for each in map(torch.Tensor.untyped_storage, tensors)
    }
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        eager.step(x, y, [samples])
    assert seen.profiler is not None
    events = [each for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = most = 0
    for each in sorted(events, key=lambda event: event.start_ns()):
        held += each.nbytes()
        most = max(most, held)
    return sum(storages.values()) + most
