"""The process in which kernels run on one device: it may crash or hang, and its parent looks on.

    python -m hetpipe.workbench.child REFERENCE DEVICE SOURCE SPEC FUNCTION SEED CASE...

writes a line of JSON for each case when it begins, and one with its results when it ends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hetpipe.errors import BackendError
from hetpipe.records import read_text
from hetpipe.sdk.kernels import Array, Flaw, KernelCall, KernelFaultError, KernelRunner
from hetpipe.sdk.kernelspec import KernelSpec, Tolerance, read_spec
from hetpipe.sdk.references import load_reference
from hetpipe.sdk.registry import get_backend
from hetpipe.workbench.case import POISONS, call_of, expected
from hetpipe.workbench.compare import difference


def main(argv: Sequence[str]) -> None:
    """Run the cases, one after the other."""
    reference, device_id, source_path, spec_path, function, seed, *numbers = argv
    load_reference(reference)
    spec, path = read_spec(Path(spec_path)), Path(source_path)
    runner = get_backend(device_id.partition(":")[0]).kernel_runner()
    assert runner is not None, "the parent has asked"
    source = read_text(path, BackendError)
    for number in map(int, numbers):
        _say({"begins": number})
        try:
            calls = [
                call_of(spec, number, path, source, function, int(seed), run) for run in (0, 1)
            ]
            result = _case(runner, device_id, spec, number, calls, Path(spec_path).parent)
        except KernelFaultError as error:
            result = {"flaws": [asdict(error.flaw)], "ulp": {}}
        except BackendError as error:
            result = {"error": str(error)}
        _say({"case": number, **result})


def _say(data: dict[str, Any]) -> None:
    print(json.dumps(data), flush=True)


def _case(
    runner: KernelRunner, device_id: str, spec: KernelSpec, number: int,
    calls: Sequence[KernelCall], folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """The flaws of a case, and by output its largest error in units in the last place."""
    first, flaws = runner.run(device_id, calls[0])
    again = first if runner.checks(device_id) else runner.run(device_id, calls[1])[0]
    flaws = [*flaws, *_unsteady(spec, calls[0], first, again)]
    units = {}
    references = expected(spec, number, calls[0], folder)
    for name, actual in first.items():
        tolerance = spec.tolerance.get(name, Tolerance())
        terms = tolerance.terms.value(spec.case[number])
        found = difference(actual, references[name], tolerance, terms)
        units[name] = found.ulp
        if found.wrong and not any(flaw.kind == "not written" for flaw in flaws):
            line = runner.line_that_writes(calls[0].source, calls[0].function, name)
            flaws.append(Flaw("wrong result", calls[0].function, f"{name}: {found.text}", line))
    return {"flaws": [asdict(flaw) for flaw in flaws], "ulp": units}


def _unsteady(
    spec: KernelSpec, call: KernelCall, first: dict[str, Array], again: dict[str, Array]
) -> list[Flaw]:
    """Outputs that differ from run to run: elements that nobody wrote, or results of chance."""
    flaws = []
    for name, array in first.items():
        one, other = array.reshape(-1).view(np.uint8), again[name].reshape(-1).view(np.uint8)
        differs = (one != other).reshape(array.size, -1).any(1) if array.size else one != other
        if not differs.any():
            continue
        at = int(np.argmax(differs))
        place = [int(i) for i in np.unravel_index(at, array.shape)]
        width = array.dtype.itemsize
        kept = all(
            bool((half[at * width : (at + 1) * width] == poison).all())
            for half, poison in zip((one, other), POISONS, strict=True)
        )
        count = f"{int(differs.sum())} of {array.size} elements"
        if kept and not spec.argument[name].is_input:
            text = f"element {place} of {name} keeps what was there before; {count}"
            flaws.append(Flaw("not written", call.function, text))
        else:
            text = f"element {place} of {name} differs between two runs; {count}"
            flaws.append(Flaw("not deterministic", call.function, text))
    return flaws


if __name__ == "__main__":
    main(sys.argv[1:])
