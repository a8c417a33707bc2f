"""Codes: operations as small integers, which arrays can hold and use as indices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from hetpipe.schedule.action import ENDS, TIED_OPS, Op

Array = np.ndarray[Any, Any]

OPS = tuple(Op)
CODES = {op: code for code, op in enumerate(OPS)}

RECEIVE, COMPUTE, SEND, OTHER = range(4)
"""The roles of operations. A step of `schedule.order.Order` receives, computes, then sends. The
wait for a loss counts as COMPUTE here."""


def _role(op: Op) -> int:
    if op.holds:
        return COMPUTE
    if ENDS.get(op, ("", None, None))[1:] == (0, 0) or op is Op.ALL_REDUCE:
        return OTHER  # a message or a sum between lanes or replicas of a stage
    return SEND if op.is_send else RECEIVE


ROLES = np.array([_role(op) for op in OPS], np.int8)
COMPUTES = np.array([op.is_compute for op in OPS])
IS_TIED = np.array([op in TIED_OPS for op in OPS])
KINDS = np.array(["FBGP".find(op.value[-1]) for op in OPS])
"""For a send or receive between stages: the kind of its message, as an index of "FBGP"."""
WAYS = np.array([sum(step or 0 for step in ENDS.get(op, ("", 0, 0))[1:]) for op in OPS])
"""The steps from an action's stage to the stage at the other end of its message: 1, -1, or 0 if
that stage is no neighbour."""
SENDERS = np.full(len(OPS), -1, np.int8)
"""By code of a pass, the code of the operation that sends its result to another stage; -1 if no
operation does."""
for _makers, _sender in (
    ((Op.FORWARD,), Op.SEND_FORWARD),
    ((Op.BACKWARD, Op.BACKWARD_INPUT), Op.SEND_BACKWARD),
):
    SENDERS[[CODES[op] for op in _makers]] = CODES[_sender]


def are(codes: Array, ops: Iterable[Op]) -> Array:
    """Return, for each code, whether it belongs to one of `ops`."""
    chosen = np.zeros(len(OPS), bool)
    chosen[[*map(CODES.__getitem__, ops)]] = True
    return chosen[codes]
