"""Options of the backend: the table [backend.pytorch] of a cluster file."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated

import torch

from hetpipe.errors import BackendError
from hetpipe.records import OneOf

COMPILE = ("eager", "inductor", "measured")


@dataclass(frozen=True)
class Options:
    """The table [backend.pytorch]. Costs that were measured with other options are not used."""

    tf32: bool = False
    """Whether accelerators may round the operands of float32 products to ten bits (TF32). Products
    are then several times faster on some cards, and a thousand times less exact."""

    peer_copies: bool = False
    """Whether cards of one machine copy messages directly into each other's memory (CUDA IPC,
    HIP IPC), and not through memory of the host. Each wire takes room for up to 3 of its messages
    on the receiving card, 8 if they are small, and plans do not count it. The first message of each
    wire is checked. No card has run this yet."""

    nccl: bool = False
    """Whether replicas on cards of one machine sum their gradients by NCCL (RCCL on AMD's cards),
    and not on the host. NCCL adds in an order that depends on the cards, so losses may differ in
    their last digits from sums on the host. Each stage's first sum is made both ways and compared.
    No card has run this yet."""

    compile: Annotated[str, OneOf(COMPILE)] = "eager"
    """How devices run a graph: `eager` calls an operator at a time, `inductor` calls the kernels
    that torch's Inductor compiles for the graph, and `measured` runs the faster of both."""

    def changed(self, kind: str) -> str:
        """Return the options that change the costs of a type of device, for `DeviceInfo.driver`.

        The text is empty if they have their defaults, or no effect.
        """
        on_card = {"tf32": self.tf32, "peer copies": self.peer_copies, "nccl": self.nccl}
        changed = "".join(f", {name}" for name, on in on_card.items() if on and kind != "cpu")
        is_eager = self.compile == "eager" or (
            self.compile == "measured" and lacks_compiler(kind) is not None
        )
        return changed if is_eager else f"{changed}, compile {self.compile}"

    def check(self, device_id: str, kind: str) -> None:
        """Raise `BackendError` if a device cannot do what an option demands."""
        if self.peer_copies and kind not in ("cpu", "cuda"):
            raise BackendError(
                f"{device_id}: peer_copies needs CUDA or ROCm, and torch has no such copies for "
                f"{kind}: remove it from [backend.pytorch]"
            )
        if self.nccl and kind not in ("cpu", "cuda"):
            raise BackendError(
                f"{device_id}: nccl needs CUDA or ROCm, and sums over several {kind} devices are "
                "made on the host: remove it from [backend.pytorch]"
            )
        if self.nccl and kind == "cuda" and not hasattr(torch._C, "_nccl_all_reduce"):
            raise BackendError(
                f"{device_id}: this torch was built without NCCL: install another torch, or remove "
                "nccl from [backend.pytorch]"
            )
        if self.compile == "inductor" and (lack := lacks_compiler(kind)):
            what, cure = lack
            raise BackendError(
                f'{device_id}: compile = "inductor" needs {what}: {cure}, or set '
                'compile = "measured" or "eager" in [backend.pytorch]'
            )


def lacks_compiler(kind: str) -> tuple[str, str] | None:
    """Return the compiler that Inductor needs for a type of device, and how to install it.

    Return None if the compiler is present.
    """
    if kind == "cpu":
        usual = "clang++" if sys.platform == "darwin" else "g++"
        name = os.environ.get("CXX", usual)
        if shutil.which(name) is None:
            return f"the C++ compiler {name}", f"apt-get install {name}"
        return None
    return None if find_spec("triton") else ("Triton", "pip install triton")
