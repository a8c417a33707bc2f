"""Checks of windows: another process of the device writes, and this process reads."""

from __future__ import annotations

from hetpipe.conformance.check import NotAsked, check
from hetpipe.conformance.copies import random_array, same
from hetpipe.conformance.peer import Other, Piece
from hetpipe.conformance.rig import Rig
from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Window
from hetpipe.sdk.info import DTYPE_NBYTES

ALIGN_NBYTES = 64
SHAPES = ((), (1,), (3, 5), (0,), (1023,), (2, 3, 4, 5))
LARGE = 1 << 21
"""Number of float32 elements: a copy of 8 MiB."""


def _open(rig: Rig, nbytes: int) -> tuple[Window, bytes]:
    """Open a window. Raises `NotAsked` if the device opens none."""
    try:
        opened = rig.device.open_window(nbytes)
    except BackendError as error:
        raise NotAsked(f"the device opens no window: {error}") from error
    if opened is None:
        raise NotAsked("the device opens no window: messages pass through the host")
    return opened


def _pieces(rig: Rig) -> tuple[list[Piece], int]:
    """Return tensors of all dtypes and shapes side by side in a window, and its bytes."""
    pieces: list[Piece] = []
    offset = 0
    for dtype in rig.info.dtypes:
        if dtype == "bfloat16":  # bfloat16 arrays are never uploaded
            continue
        for shape in SHAPES:
            piece = Piece(dtype, shape, offset, len(pieces))
            pieces.append(piece)
            nbytes = random_array(dtype, shape).nbytes
            offset += -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES
    return pieces, offset


@check(
    "windows/bits",
    "a tensor that another process writes to a window is read bit for bit, at any offset",
    "a copy to a wrong offset or of a wrong size, or a mapping of other memory",
)
def _(rig: Rig) -> None:
    pieces, nbytes = _pieces(rig)
    window, handle = _open(rig, nbytes)
    with Other(rig) as other:
        other.write(other.map(handle, nbytes), pieces)
        for piece in pieces:
            piece.check(rig, window)


@check(
    "windows/other offsets",
    "a write changes no bytes of the window but those of its tensor",
    "a copy of too many bytes, such as whole blocks",
)
def _(rig: Rig) -> None:
    pieces, nbytes = _pieces(rig)
    window, handle = _open(rig, nbytes)
    with Other(rig) as other:
        other.write(other.map(handle, nbytes), pieces[::-1])  # each before its right neighbour
        for piece in pieces:
            piece.check(rig, window)


@check(
    "windows/events",
    "the event of a write happens when its bytes are in the window",
    "a racy event, which happens before the copy has ended",
)
def _(rig: Rig) -> None:
    nbytes = LARGE * DTYPE_NBYTES["float32"]
    window, handle = _open(rig, nbytes)
    with Other(rig) as other:
        number = other.map(handle, nbytes)
        for turn in range(4):
            piece = Piece("float32", (LARGE,), 0, turn)
            other.write(number, [piece])
            piece.check(rig, window)


@check(
    "windows/both ways",
    "two processes of a device write to each other's windows",
    "a device that cannot map a window after it has opened one",
)
def _(rig: Rig) -> None:
    pieces, nbytes = _pieces(rig)
    window, handle = _open(rig, nbytes)
    with Other(rig) as other:
        inward = other.map(handle, nbytes)
        number, handle_there = other.ask("open", nbytes=nbytes)
        outward = rig.device.map_window(bytes.fromhex(handle_there), nbytes)
        for piece in pieces:
            piece.write(rig, outward)
        other.write(inward, pieces)
        other.check(number, pieces)
        for piece in pieces:
            piece.check(rig, window)


@check(
    "windows/ends",
    "a window's memory stays as long as its object, in both processes",
    "memory of a dropped window that becomes a tensor while another process can still write to it",
)
def _(rig: Rig) -> None:
    count = 16_384
    nbytes = count * DTYPE_NBYTES["float32"]
    kept, kept_handle = _open(rig, nbytes)
    dropped, dropped_handle = _open(rig, nbytes)
    piece = Piece("float32", (count,), 0, 1)
    with Other(rig) as other:
        number, still = other.map(dropped_handle, nbytes), other.map(kept_handle, nbytes)
        del dropped
        array = random_array("float32", (count,), 2)
        buffers = [rig.put(array) for _ in range(8)]
        other.write(number, [piece])
        other.check(number, [piece])
        for buffer in buffers:
            same(
                rig.get(buffer),
                array,
                "a tensor that was made between the drop of a window and a write to it",
            )
        other.write(still, [piece])
    piece.check(rig, kept)  # the other process has ended
