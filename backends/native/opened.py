"""An opened device of a library, with the owners of its buffers and of its events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import DONE, Buffer, Device, Event
from hetpipe.sdk.info import DeviceInfo
from hetpipe.sdk.inputs import Form

from .events import NativeEvent, keep_for_ever
from .library import Handle, Library, interface


class NativeBuffer(Buffer):
    """A tensor on a device. `memory` is None after a run has used it for an output."""

    def __init__(self, device: OpenedDevice, form: Form, memory: Handle) -> None:
        self.device = device
        self.shape, self.dtype = form
        self.memory: Handle | None = memory


class OpenedDevice(Device):
    """An opened device of a library; `handle` closes it."""

    def __init__(self, info: DeviceInfo, library: Library, index: int) -> None:
        self.info, self.library = info, library
        out = interface().new("hetpipe_device **")
        library.call(f"{info.id} cannot be opened", "open", index, out)
        self.handle = Handle(self.given("open", out), library.function("close"), library)

    def memory(self, pointer: Any) -> Handle:
        """Return the handle of a library's buffer; the buffer is freed with the handle."""
        return Handle(pointer, self.library.function("free"), self.handle)

    def memory_of(self, buffer: Buffer) -> Handle:
        """Return a buffer's memory. Raises `BackendError` if it was donated or is elsewhere."""
        if not isinstance(buffer, NativeBuffer) or buffer.device is not self:
            raise BackendError(f"{self.info.id} was given a buffer of {buffer.device.info.id}")
        if buffer.memory is None:
            raise BackendError(f"{self.info.id}: a buffer is used after it was donated")
        return buffer.memory

    def event(self, pointer: Any, keeps: Sequence[object]) -> Event:
        """Return the event of work that uses `keeps`; the event holds these objects until the end.

        If `pointer` is NULL, the work has ended already.
        """
        if pointer == interface().NULL:
            return DONE
        give_back = self.library.function("release_event")
        if give_back is None:
            path = self.library.path
            keep_for_ever(keeps)
            raise BackendError(
                f"{path} returns events but lacks the functions wait and release_event; add them"
            )
        handle = Handle(pointer, give_back, self.handle)
        return NativeEvent(self, self.library, handle, keeps)

    def given(self, name: str, out: Any) -> Any:
        """Return the result of a successful call. Raises `BackendError` if it is NULL."""
        if out[0] == interface().NULL:
            raise BackendError(f"{self.library.path}: {name} succeeds, and gives NULL")
        return out[0]
