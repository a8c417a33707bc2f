"""A switch between network namespaces, in software: every line has a rate, a delay and a loss.

    python switch.py RATE_BPS DELAY_S LOSS NAMESPACE...

Kernels may lack netem. Each namespace gets the device `eth0`. The switch prints a line when all
exist, and runs until its input ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time
from contextlib import suppress

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x2, 0x1000
LONGEST_NBYTES = 65536  # of a frame
MOST_FRAMES = 1000  # that wait in a line, as in netem


def main() -> None:
    rate_Bps, delay_s, loss = map(float, sys.argv[1:4])
    lines = [open_device(namespace) for namespace in sys.argv[4:]]
    print("ready", flush=True)
    Switch(lines, rate_Bps, delay_s, loss).run()


def open_device(namespace: str) -> int:
    """Return a descriptor with the frames of a new device `eth0` in a namespace."""
    place = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(place, 0):
        raise OSError(ctypes.get_errno(), f"setns {namespace}")
    os.close(place)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TAP | IFF_NO_PI))
    return device


class Switch:
    """Passes frames on to the device with their address, or to all other devices."""

    def __init__(self, lines: list[int], rate_Bps: float, delay_s: float, loss: float) -> None:
        self._lines = lines
        self._rate_Bps, self._delay_s, self._loss = rate_Bps, delay_s, loss
        self._free_s = dict.fromkeys(lines, 0.0)  # when the line of a device is free
        self._waiting = dict.fromkeys(lines, 0)  # frames of a device that are on their way
        self._places: dict[bytes, int] = {}  # devices by address
        self._leaving: list[tuple[float, int, int, bytes]] = []  # time, number, from, frame
        self._count = 0
        self._random = random.Random(0)

    def run(self) -> None:
        sources = [*self._lines, sys.stdin.fileno()]
        while True:
            wait_s = self._leaving[0][0] - time.monotonic() if self._leaving else 1.0
            for source in select.select(sources, [], [], max(wait_s, 0.0))[0]:
                if source == sys.stdin.fileno():
                    return
                self._take(source)
            now_s = time.monotonic()
            while self._leaving and self._leaving[0][0] <= now_s:
                _, _, source, frame = heapq.heappop(self._leaving)
                self._waiting[source] -= 1
                self._give(source, frame)

    def _take(self, source: int) -> None:
        """Put the frames that a device sends on their way."""
        while True:
            try:
                frame = os.read(source, LONGEST_NBYTES)
            except BlockingIOError:
                return
            self._places[frame[6:12]] = source
            full = self._waiting[source] >= MOST_FRAMES
            if full or self._random.random() < self._loss:
                continue
            start_s = max(time.monotonic(), self._free_s[source])
            self._free_s[source] = start_s + len(frame) / self._rate_Bps
            self._count += 1
            item = self._free_s[source] + self._delay_s, self._count, source, frame
            heapq.heappush(self._leaving, item)
            self._waiting[source] += 1

    def _give(self, source: int, frame: bytes) -> None:
        place = self._places.get(frame[:6])
        for target in self._lines if place is None else [place]:
            if target != source:
                with suppress(OSError):  # the receiver's queue is full, or its device is down
                    os.write(target, frame)


if __name__ == "__main__":
    main()
