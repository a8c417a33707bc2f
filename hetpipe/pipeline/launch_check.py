"""Launch check: refuses a start per rank, since hetpipe starts its workers itself."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hetpipe.errors import HetpipeError


def refuse_ranks(environment: Mapping[str, str] = os.environ) -> None:
    """Raise `HetpipeError` in one of several processes of a launcher such as torchrun.

    Each process would train the whole model.
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
