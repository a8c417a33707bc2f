"""Tells for which devices torch has a kernel of an operator."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

BY_OTHERS = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
"""Keys of kernels that call other operators, on any device."""
BY_OUT = "CompositeExplicitAutogradNonFunctional"
"""Key of kernels that call the operator's variant that writes into `out`, if there is one."""
CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")
"""Operators that call `<name>_overrideable` on devices without a key in `CONVOLVING`; its kernel
for any device only raises an error."""
CONVOLVING = ("CPU", "CUDA", "MPS")


@cache
def has_kernel(target: OpOverload, device_type: str) -> bool:
    """Return whether a device of this type, such as `cuda`, runs an operator.

    A fallback does not count: torch has fallbacks of all operators, which compute on the CPU or
    only raise an error.
    """
    key = torch._C._dispatch_key_for_device(device_type)
    if target._schema.name in CONVOLUTIONS and key not in CONVOLVING:
        names = (target._schema.name, f"{target._schema.name}_overrideable")
        return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for name in names)
    if _registered(target, key, *BY_OTHERS):
        return True
    if not _registered(target, BY_OUT):
        return False
    variants = list(_out_variants(target))
    return not variants or any(_registered(variant, key, *BY_OTHERS) for variant in variants)


def _registered(target: OpOverload, *keys: str) -> bool:
    name = f"{target._schema.name}.{target._schema.overload_name}".rstrip(".")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


def _out_variants(target: OpOverload) -> Iterator[OpOverload]:
    """Yield the overloads with the same arguments, and arguments `out`."""
    arguments = [(each.name, str(each.type)) for each in target._schema.arguments]
    packet: Any = target._overloadpacket
    for name in packet.overloads():
        other: OpOverload = getattr(packet, name)
        others = other._schema.arguments
        given = [(each.name, str(each.type)) for each in others if not each.is_out]
        if given == arguments and len(others) > len(given):
            yield other
