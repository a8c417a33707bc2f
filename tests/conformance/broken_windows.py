"""Devices that are sound except for their windows."""

from __future__ import annotations

import time

import numpy as np
from sound import DONE, Array, SoundDevice, SoundWindow

from hetpipe.sdk import Buffer, Event, Window


class MappedCopy(SoundDevice):
    """A mapped window is a copy of the memory, so that no write arrives."""

    def map_window(self, handle: bytes, nbytes: int) -> Window:
        return self.window(np.memmap(handle.decode(), np.uint8, "c", shape=(nbytes,)))


class RoundedOffsets(SoundDevice):
    """Writes and reads begin at a multiple of 256 bytes."""

    def window(self, memory: Array) -> SoundWindow:
        return _RoundedOffsets(self, memory)


class _RoundedOffsets(SoundWindow):
    def write(self, src: Buffer, offset: int) -> Event:
        return super().write(src, offset // 256 * 256)

    def read(self, offset: int, shape: tuple[int, ...], dtype: str) -> tuple[Buffer, Event]:
        return super().read(offset // 256 * 256, shape, dtype)


class WholeBlocks(SoundDevice):
    """A write clears the rest of its last block of 128 bytes."""

    def window(self, memory: Array) -> SoundWindow:
        return _WholeBlocks(self, memory)


class _WholeBlocks(SoundWindow):
    def write(self, src: Buffer, offset: int) -> Event:
        end = offset + src.nbytes
        self.memory[end : -(-end // 128) * 128] = 0
        return super().write(src, offset)


class EarlyWrites(SoundDevice):
    """The event of a write has happened before the copy begins."""

    def window(self, memory: Array) -> SoundWindow:
        return _EarlyWrites(self, memory)


class _EarlyWrites(SoundWindow):
    def write(self, src: Buffer, offset: int) -> Event:
        self.device.copies.submit(lambda: time.sleep(0.05))
        super().write(src, offset)
        return DONE


class ReusedWindows(SoundDevice):
    """The next tensor of a dropped window's size takes its memory."""

    def window(self, memory: Array) -> SoundWindow:
        return _Reused(self, memory)

    def upload(self, src: Array) -> tuple[Buffer, Event]:
        free: dict[int, Array] = self.__dict__.get("free", {})
        if src.nbytes not in free:
            return super().upload(src)
        array = free.pop(src.nbytes).view(src.dtype).reshape(src.shape)
        return self.buffer(array), self.copies.submit(lambda: np.copyto(array, src))


class _Reused(SoundWindow):
    def __del__(self) -> None:
        self.device.__dict__.setdefault("free", {})[self.memory.nbytes] = self.memory
