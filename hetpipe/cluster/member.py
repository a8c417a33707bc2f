"""Member: one device of a cluster, with its cores, speed and server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetpipe.errors import ClusterError


@dataclass(frozen=True)
class Member:
    """One device of a cluster, with an `id` that is unique in the cluster.

    An attached device has `device`, a `DeviceInfo.id`. A board has `board`, a `Board.id`, and may
    have `numerics`, the `DeviceInfo.id` of the device that computes the board's numbers. The times
    of a board are always modelled.
    """

    id: str
    device: str
    cores: tuple[int, ...] = ()  # CPU cores to which its worker is pinned; empty: not pinned
    speed: float = 1.0  # at most 1; 0.5 (emulated) doubles the time of every compute action
    board: str = ""
    server: str = ""  # empty: the device has no server
    numerics: str = ""  # the device that computes a board's numbers in a training
    host: str = ""  # in a cluster of several hosts: the host with the device
    machine: str = ""  # of the host; two hosts may be environments of one machine

    @property
    def opened_device(self) -> str:
        """Id of the device that the member's worker opens; empty for a board without numerics."""
        return self.numerics or self.device


@dataclass(frozen=True)
class BackendOptions:
    """The `[backend.NAME]` table of a cluster file, for `hetpipe.sdk.Backend.configure`."""

    values: Mapping[str, Any]
    folder: Path
    """The folder of the cluster file, where relative paths start."""
    place: str = field(default="", compare=False)
    """file:line of the table."""


def available_cores() -> tuple[int, ...]:
    """Return the numbers of the CPU cores to which this process may pin workers."""
    import os

    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def check_member(member: Member) -> None:
    """Raise `ClusterError` for fields that contradict each other or this machine."""
    if bool(member.device) == bool(member.board):
        both = "both a device and a board" if member.board else "neither a device nor a board"
        raise ClusterError(f"{member.id}: it has {both}; give it one of the two")
    if member.numerics and not member.board:
        raise ClusterError(
            f"{member.id} has numerics, {member.numerics}, but no board; add a board, "
            "or write device instead of numerics"
        )
    if member.board and member.speed != 1.0:
        raise ClusterError(
            f"{member.id} is a board, {member.board}, with modelled times, but only "
            "attached devices have an emulated speed; remove the speed"
        )
    if member.board and member.cores and not member.numerics:
        raise ClusterError(
            f"{member.id} is a board, {member.board}, but only attached devices and "
            "numerics have cores; remove the cores"
        )
    if not 0 < member.speed <= 1:  # emulation can only slow a device down
        raise ClusterError(f"{member.id}: speed is {member.speed}, it must be above 0, at most 1")
    if not member.host:
        check_cores(member)


def check_cores(member: Member) -> None:
    """Raise `ClusterError` if this machine lacks a core of the member."""
    absent = sorted(set(member.cores) - set(available_cores())) if member.cores else []
    if absent:
        present = ", ".join(map(str, available_cores()))
        raise ClusterError(f"{member.id}: cores {absent} are not among its machine's: {present}")
