"""Which tensors travel between which stages, and how a message lies in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, permutations
from typing import Any

import numpy as np

from hetpipe.capture.program import CUT, GRAD, PARAM, TANGENT, PassPrograms, Slot, StageGraphs
from hetpipe.engine.channel import ALIGN, aligned
from hetpipe.errors import HetpipeError

Array = np.ndarray[Any, Any]
Layout = tuple[Slot, ...]
Kind = tuple[str, int]
"""A message's letter (see `Message.kind`) and its micro-batch's samples, 0 for tied weights."""

FORWARD, BACKWARD, TIED_GRAD, TIED_PARAM = "FBGP"
EVALUATION = "E"  # forward, in evaluation
ALL_REDUCE = "A"
TIED = frozenset({TIED_GRAD, TIED_PARAM})
ON_HOST = TIED | {ALL_REDUCE}
"""Kinds whose tensors are summed or replaced on the host."""


Place = tuple[int, int]
"""A stage, and which of its replicas."""


@dataclass(frozen=True)
class Wire:
    """What travels from one place to another: the layout of each kind of message."""

    source: Place
    target: Place
    layouts: dict[Kind, Layout]

    @property
    def packed_nbytes(self) -> int:
        """Room that the largest message needs."""
        return max(packed_nbytes(layout) for layout in self.layouts.values())


def wires(stages: Sequence[Sequence[StageGraphs]]) -> list[Wire]:
    """The wires that a pipeline needs; kinds of messages without a tensor do not appear.

    `stages[n]` are the replicas of stage n. Raises `HetpipeError` for replicas amid other stages.
    """
    layouts: dict[tuple[Place, Place], dict[Kind, Layout]] = {}

    def add(source: Place, target: Place, kind: Kind, layout: Layout) -> None:
        if layout:
            layouts.setdefault((source, target), {})[kind] = layout

    if len(stages) > 1 and any(len(replicas) > 1 for replicas in stages):
        raise HetpipeError(
            f"{[len(replicas) for replicas in stages]} replicas of {len(stages)} stages: only a "
            "whole model, one stage, can have replicas so far"
        )
    for n, replicas in enumerate(stages):
        places = [(n, replica) for replica in range(len(replicas))]
        for source, target in permutations(places, 2):
            add(source, target, (ALL_REDUCE, 0), gradients(replicas[0]))
    firsts = [replicas[0] for replicas in stages]
    for n, (left, right) in enumerate(pairwise(firsts)):
        here, there = (n, 0), (n + 1, 0)
        for samples, passes in left.passes.items():
            near, far = passes, right.passes[samples]
            cuts = _common(near.forward.outputs, _inputs(far), CUT, (n, n + 1))
            add(here, there, (FORWARD, samples), cuts)
            if near.backward is not None and far.backward is not None:
                found = _common(far.backward.outputs, near.backward.inputs, TANGENT, (n + 1, n))
                add(there, here, (BACKWARD, samples), found)
        for samples, program in left.evaluation.items():
            far_end = right.evaluation[samples].inputs
            crossing = _common(program.outputs, far_end, CUT, (n, n + 1))
            add(here, there, (EVALUATION, samples), crossing)
    for one, other, letter, layout in _tied(firsts):
        add((one, 0), (other, 0), (letter, 0), layout)
    return [Wire(*ends, kinds) for ends, kinds in layouts.items()]


def gradients(stage: StageGraphs) -> Layout:
    """What the replicas of a stage must sum."""
    update = stage.update
    return () if update is None else tuple(s for s in update.inputs if s.role == GRAD)


def _inputs(passes: PassPrograms) -> tuple[Slot, ...]:
    backward = passes.backward.inputs if passes.backward is not None else ()
    return (*passes.forward.inputs, *backward)


def _common(
    sent: Sequence[Slot], wanted: Sequence[Slot], role: str, ends: tuple[int, int]
) -> Layout:
    known = {slot.name: slot for slot in sent if slot.role == role}
    layout: dict[str, Slot] = {}
    for slot in wanted:
        if slot.role != role or slot.name not in known:
            continue
        if known[slot.name] != slot:
            raise HetpipeError(
                f"stage {ends[0]} sends {slot.name} as {_text(known[slot.name])}, "
                f"stage {ends[1]} reads it as {_text(slot)}: they come from different captures"
            )
        host_dtype(slot.dtype)
        layout[slot.name] = slot
    return tuple(layout.values())


def _text(slot: Slot) -> str:
    return f"{slot.dtype}{list(slot.shape)}"


def _tied(stages: Sequence[StageGraphs]) -> list[tuple[int, int, str, Layout]]:
    grads: dict[tuple[int, int], list[Slot]] = {}
    for name, owner, others in dict.fromkeys(entry for stage in stages for entry in stage.tied):
        update = stages[owner].update
        if update is None:
            continue
        slot = next((s for s in update.inputs if s.key == (GRAD, name)), None)
        if slot is None:
            continue  # frozen: never updated, so never exchanged
        for other in others:
            grads.setdefault((owner, other), []).append(slot)
    found: list[tuple[int, int, str, Layout]] = []
    for (owner, other), slots in grads.items():
        params = tuple(Slot(PARAM, slot.name, slot.shape, slot.dtype) for slot in slots)
        found.append((other, owner, TIED_GRAD, tuple(slots)))
        found.append((owner, other, TIED_PARAM, params))
    return found


def host_dtype(name: str) -> np.dtype[Any]:
    """The numpy type in which a tensor is uploaded, downloaded and sent."""
    if name == "bfloat16":
        raise HetpipeError(
            "a bfloat16 tensor would leave its device, and host tensors are numpy's, which has no "
            "bfloat16; cast to float32 or float16 at the cut, or cut elsewhere"
        )
    return np.dtype(name)


@lru_cache(maxsize=256)
def offsets(layout: Layout) -> tuple[int, ...]:
    """Where each tensor begins in a message; in front there is room for the time of delivery."""
    found, offset = [], ALIGN
    for slot in layout:
        found.append(offset)
        offset = aligned(offset + slot.nbytes)
    return (*found, offset)


def packed_nbytes(layout: Layout) -> int:
    """Bytes of a whole message."""
    return offsets(layout)[-1]


def tensor_nbytes(layout: Layout) -> int:
    """Bytes of its tensors alone."""
    return sum(slot.nbytes for slot in layout)


def arrays_in(memory: Any, layout: Layout, base: int = 0) -> list[Array]:
    """The tensors of a message as arrays over `memory`, which begins at byte `base` of it."""
    return [
        np.ndarray(slot.shape, host_dtype(slot.dtype), memory, base + offset)
        for slot, offset in zip(layout, offsets(layout), strict=False)
    ]
