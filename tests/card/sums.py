"""Sums of gradients over two cards: by NCCL, and on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetpipe.backends.pytorch import PyTorchBackend

from card.setting import Setting, Skipped
from card.ways import compare_ways, opened, pair_of, run_checks
from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Group


class SummingCards(PyTorchBackend):  # type: ignore[misc] # mypy sees no `hetpipe.backends`
    """torch's devices with sums by NCCL, for the conformance suite, which sets no options."""

    name = "summing-cards"

    def __init__(self) -> None:
        super().__init__()
        self.configure({"nccl": True}, Path())


def groups(setting: Setting) -> None:
    """Run the checks of groups in the conformance suite, with NCCL."""
    _require_two_cards(setting)
    run_checks(setting, SummingCards, "groups")


def replicas(setting: Setting) -> None:
    """Train a replica on each of two cards, with sums by NCCL and on the host: `compare_ways`."""
    _require_two_cards(setting)
    compare_ways(setting, "nccl", "NCCL", "card.sums:forbid_host_sums", 1, "data-parallel")


def forbid_host_sums(device: Any) -> None:
    """Make it an error if the device joins no group; in a worker."""
    join = device.join_group

    def join_group(folder: Path, rank: int, size: int) -> Group:
        group: Group | None = join(folder, rank, size)
        if group is None:
            raise BackendError(f"{device.info.id} joins no group, so the host sums")
        return group

    device.join_group = join_group


def _require_two_cards(setting: Setting) -> None:
    """Raise `Skipped` if there is only one card, or no NCCL."""
    with opened(setting, "nccl"):
        pass
    first, second = pair_of(setting)
    if first == second:
        raise Skipped(f"{first} is the only card, and NCCL sums over several")
