"""Sleeping devices as separate devices `slept:2,4:0`, `slept:2,4:1`, ..., and one that streams."""

from __future__ import annotations

from dataclasses import replace

from hetpipe.papers.sleeping import SleepingBackend
from hetpipe.sdk.info import DeviceInfo


class SleptBackend(SleepingBackend):
    name = "slept"

    def discover(self) -> list[DeviceInfo]:
        whole, *_, streams = super().discover()
        return [
            *(replace(whole, id=f"slept:2,4:{n}", backend="slept") for n in range(4)),
            replace(streams, id="slept:8,8,16:0", backend="slept"),
        ]
