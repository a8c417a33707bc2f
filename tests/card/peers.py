"""Messages between two workers on cards: windows, copies from card to card, and the host's way."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from hetpipe.backends.pytorch import PyTorchBackend

from card.setting import Setting, Skipped
from card.ways import compare_ways, opened, run_checks
from hetpipe.wire.sharedmemory import WindowWarning


class PeerCards(PyTorchBackend):  # type: ignore[misc] # mypy sees no `hetpipe.backends`
    """torch's devices with peer copies, for the conformance suite, which sets no options."""

    name = "peer-cards"

    def __init__(self) -> None:
        super().__init__()
        self.configure({"peer_copies": True}, Path())


def windows(setting: Setting) -> None:
    """Run the checks of windows in the conformance suite, with peer copies."""
    run_checks(setting, PeerCards, "windows")


def peers(setting: Setting) -> None:
    """Train two workers with peer copies and without: compare with torch, and time in turns.

    The workers are on two cards, or both on the only card.
    """
    with opened(setting, "peer_copies") as device:
        if device.open_window(1) is None:
            raise Skipped(f"{setting.device} opens no window for messages of other processes")
    compare_ways(setting, "peer_copies", "peer copies", "card.peers:forbid_detours", 2, "1f1b")


def forbid_detours(device: Any) -> None:
    """Make it an error if messages pass through the host for lack of a window; in a worker."""
    warnings.simplefilter("error", WindowWarning)
