"""Refuses to be started once per rank: hetpipe starts its own workers."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hetpipe.errors import HetpipeError


def refuse_ranks(environment: Mapping[str, str] = os.environ) -> None:
    """Raises `HetpipeError` in one of several processes that a launcher like torchrun started.

    Each of them would train the whole model by itself.
    """
    ranks = environment.get("WORLD_SIZE", "")
    rank = environment.get("RANK", environment.get("LOCAL_RANK"))
    if rank is None or not ranks.isdigit() or int(ranks) < 2:
        return
    raise HetpipeError(
        f"this is process {rank} of {ranks} (RANK and WORLD_SIZE, as torchrun sets them), and each "
        "would train the whole model: hetpipe starts its own workers, one per device; run it once, "
        "without torchrun"
    )
