"""Modelled seconds of a model's kernels on NVIDIA's cards, from their compiled code.

    python tests/support/card_model.py gpt --card h100      a table of the kernels, slowest first

One work-group in the middle of each launch is executed on integers (`ptx_group`), which gives its
instructions, the sectors of memory that it touches and the conflicts of its banks. The most loaded
unit of the card decides the seconds. The model leaves out the latency of memory, the time of a
launch, misses of the second-level cache, and what NVIDIA's assembler changes in the code. So a
share of a card's limits in this table is an upper bound.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, prod

import nvptx
from hetpipe.backends.opencl.lower.arena import nbytes
from hetpipe.backends.opencl.lower.expr import Value
from hetpipe.backends.opencl.lower.launch import Launch
from nvptx import Usage
from ptx_group import SECTOR_NBYTES, WARP, Group

from hetpipe.cost.board import board


@dataclass(frozen=True)
class Card:
    """A card: its architecture, its units, and their multiply-adds in float32 per cycle."""

    arch: str
    board: str
    units: int
    lanes: int

    @property
    def cycle_s(self) -> float:
        """The seconds of a cycle at the clock of the data sheet's peak."""
        return 2 * self.lanes * self.units / board(self.board).peak_flops["float32"]


CARDS = {"a100": Card("sm_80", "a100-80", 108, 64), "h100": Card("sm_90", "h100", 132, 128)}
CACHE_NBYTES = 5120
"""Bytes per cycle of an A100's second-level cache, from its white paper; assumed of an H100."""
SCHEDULERS, INTEGER_LANES, SPECIAL_LANES = 4, 64, 16
"""Instructions that a unit issues per cycle, and its lanes for other instructions."""
STALL = 4
"""Cycles before a warp issues an instruction that depends on the last one."""
REGISTERS, LOCAL_NBYTES, WARPS, GROUPS = 1 << 16, 164 << 10, 64, 32
"""The most that a unit holds at the same time."""


@dataclass
class Row:
    """The launches of a kernel in a model."""

    name: str
    file: str
    launches: int = 0
    limits: Counter[str] = field(default_factory=Counter)
    """Seconds of the launches, by the unit that decides them."""
    memory_s: float = 0.0
    """Seconds to move the operands once at the card's bandwidth."""
    arithmetic_s: float = 0.0
    """Seconds of the operations at the card's peak."""
    operand_nbytes: int = 0
    touched_nbytes: int = 0
    """Bytes of the sectors that warps touch, each as often as a warp touches it."""
    widest_nbytes: int = 0
    floats: int = 0
    issued: int = 0

    @property
    def seconds(self) -> float:
        return sum(self.limits.values())

    @property
    def least_s(self) -> float:
        """Seconds at the card's limits."""
        return max(self.memory_s, self.arithmetic_s)


def add(row: Row, launch: Launch, group: Group, usage: Usage, card: Card) -> None:
    """Add a launch to its row; `group` has been executed."""
    groups, facts, kinds = prod(launch.global_size) // group.size, board(card.board), group.issued
    issued = sum(count for kind, count in kinds.items() if kind != "free")
    busiest = ceil(groups / card.units)  # groups of the busiest unit
    warps = min(WARPS, min(busiest, resident(usage, group.size)) * ceil(group.size / WARP))
    cycles = {
        "issue": busiest * issued / min(SCHEDULERS, warps / STALL),
        "float": busiest * kinds["float"] * WARP / card.lanes,
        "integer": busiest * kinds["integer"] * WARP / INTEGER_LANES,
        "special": busiest * kinds["special"] * WARP / SPECIAL_LANES,
        "local memory": busiest * group.wavefronts,
        "cache": groups * group.sectors * SECTOR_NBYTES / CACHE_NBYTES,
    }
    operands = {arg.id: nbytes(arg) for arg in launch.args if isinstance(arg, Value)}
    seconds = {name: count * card.cycle_s for name, count in cycles.items()}
    seconds["memory"] = sum(operands.values()) / facts.memory_Bps
    limit = max(seconds, key=seconds.__getitem__)
    row.limits[limit] += seconds[limit]
    row.memory_s += seconds["memory"]
    row.arithmetic_s += groups * group.operations / facts.peak_flops["float32"]
    row.operand_nbytes += sum(operands.values())
    row.touched_nbytes += groups * group.sectors * SECTOR_NBYTES
    row.floats += groups * kinds["float"]
    row.issued += groups * issued
    row.launches += 1
    row.widest_nbytes = max(row.widest_nbytes, group.widest_nbytes)


def resident(usage: Usage, items: int) -> int:
    """Return the groups that a unit holds at the same time."""
    return max(1, min(GROUPS, REGISTERS // (usage.registers * max(items, WARP)),
                      LOCAL_NBYTES // max(1, usage.local_nbytes)))  # fmt: skip


def executed(ptx: str, launch: Launch) -> Group:
    """Return a group of the launch, executed. Raises `NotImplementedError`."""
    args = [
        (1 << 40) + (at << 34) if isinstance(arg, Value) else arg
        for at, arg in enumerate(launch.args)
    ]
    local = launch.local_size or (1,) * len(launch.global_size)
    group = Group(ptx, launch.global_size, local, args)
    group.run()
    return group


def modelled(
    launches: Iterable[Launch], card: Card, each: bool = False
) -> tuple[list[Row], dict[str, str]]:
    """Return rows, the slowest first, and why a kernel has none, by name.

    All generated kernels share a row, unless `each` is set.
    """
    launches = list(launches)
    code = {found.kernel: found for found in nvptx.compiled(launches, (card.arch,))}
    rows: dict[object, Row] = {}
    done: dict[object, Group] = {}
    refused: dict[str, str] = {}
    for launch in launches:
        kernel, file = launch.kernel, code[launch.kernel].file
        numbers = [arg for arg in launch.args if not isinstance(arg, Value)]
        key = kernel, launch.global_size, launch.local_size, tuple(numbers)
        try:
            group = done[key] = done.get(key) or executed(code[kernel].ptx, launch)
        except NotImplementedError as error:
            refused[kernel.name] = str(error)
            continue
        name = kernel.name if each or not kernel.generated else "all"
        row = rows.setdefault(kernel if each else (name, file), Row(name, file))
        add(row, launch, group, code[kernel].usage[card.arch], card)
    return sorted(rows.values(), key=lambda row: -row.seconds), refused


HEAD = ("kernel", "file", "launches", "µs", "bandwidth", "peak", "limit", "touched / operands",
        "widest access", "floats of instructions")  # fmt: skip


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the rows as text, with a row for all of them."""
    both = Row("all", "")
    for row in rows:
        both.limits.update(row.limits)
        for name in ("launches", "memory_s", "arithmetic_s", "operand_nbytes", "touched_nbytes",
                     "floats", "issued"):  # fmt: skip
            setattr(both, name, getattr(both, name) + getattr(row, name))
    return [list(HEAD), *map(_cells, (*rows, both))]


def _cells(row: Row) -> list[str]:
    limit, _ = row.limits.most_common(1)[0]
    return [
        row.name, row.file, str(row.launches), f"{row.seconds * 1e6:.1f}",
        f"{row.memory_s / row.seconds:.0%}", f"{row.arithmetic_s / row.seconds:.0%}", limit,
        f"{row.touched_nbytes / row.operand_nbytes:.1f}", f"{row.widest_nbytes or ''}",
        f"{row.floats / row.issued:.0%}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--card", choices=CARDS, default="a100")
    parser.add_argument("--each", action="store_true", help="a row for each generated kernel")
    given = parser.parse_args()
    card = CARDS[given.card]
    programs = nvptx.lowered(given.model, nvptx.card(units=card.units))
    launches = [launch for program in programs.values() for launch in program.launches]
    rows, refused = modelled(launches, card, given.each)
    nvptx.show(table(rows))
    total, least = (sum(getattr(row, name) for row in rows) for name in ("seconds", "least_s"))
    print(f"modelled: {total * 1e6:.0f} µs; {least / total:.0%} of it at the card's limits")
    for name, why in refused.items():
        print(f"not modelled: {name}: {why}")


if __name__ == "__main__":
    main()
