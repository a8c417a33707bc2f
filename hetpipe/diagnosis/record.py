"""Records of a diagnosis: the result of comparing a pipeline's programs with torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hetpipe.html import lines_html

Verdict = Literal[
    "healthy", "operator", "combination", "program", "unsteady", "failed", "between", "numbers",
    "capture",
]  # fmt: skip

_MEANING: Mapping[str, str] = {
    "operator": "computes this operator wrong, for the same inputs that torch had",
    "combination": "computes these operators right one by one, but wrong in one graph",
    "program": "computes this program wrong, although each of its operators is right by itself",
    "unsteady": "gives different results when it runs again on the same inputs",
    "failed": "raises an error here",
}


@dataclass(frozen=True)
class Culprit:
    """The place where a device's results differ from torch's, or where a value is first not finite.

    `program` is the forward, backward or update of a stage. `output` is dtype and shape of the
    wrong tensor; `inputs` are dtypes and shapes of the operator's inputs. `operators` has several
    names if the operators are wrong only together. `error` is the largest error, `allowed` the
    error that rounding explains.
    """

    stage: int
    member: str
    device: str
    program: str
    microbatch: int | None
    layer: str
    operators: tuple[str, ...]
    output: str
    inputs: tuple[str, ...] = ()
    error: float = 0.0
    allowed: float = 0.0
    not_finite: str = ""
    """The first value that is not finite, and whether the operator's inputs were finite."""
    reason: str = ""
    """The error that the device raised."""

    @property
    def place(self) -> str:
        """Stage, device, program, layer and operators."""
        run = self.program if self.microbatch is None else (
            f"{self.program} of micro-batch {self.microbatch}"
        )  # fmt: skip
        operators = " with ".join(self.operators) or "no operator by itself"
        return (
            f"stage {self.stage} on {self.member} ({self.device}), {run}, layer {self.layer}: "
            f"{operators}"
        )


@dataclass(frozen=True)
class Diagnosis:
    """The result of `Pipeline.diagnose`.

    `verdict` is one of:

    - `healthy`: all results agree with torch.
    - `operator`, `combination`, `program`: a device computes an operator, several operators in one
      graph, or a whole program wrong.
    - `unsteady`: a device's results change from run to run.
    - `failed`: a device raises an error.
    - `between`: each program alone is right, but the pipeline's run by its schedule is wrong.
    - `capture`: all stages run their programs right, but the programs differ from the module.
    - `numbers`: a value is not finite, in torch as well.

    `runs` counts the compared runs of programs; `notes` lists the omitted comparisons.
    """

    verdict: Verdict
    loss: float
    runs: int
    culprit: Culprit | None = None
    detail: str = ""
    notes: tuple[str, ...] = ()

    @property
    def blames_device(self) -> bool:
        """Whether a device or the transfers are at fault, not the numbers or the capture."""
        return self.verdict not in ("healthy", "numbers", "capture")

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON; numbers that are not finite become None."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain

    def __str__(self) -> str:
        lines = [*self._lines(), *(f"not compared: {note}" for note in self.notes)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return lines_html([f"verdict: {self.verdict}", *str(self).splitlines()])

    def _lines(self) -> list[str]:
        compared = f"{self.runs} runs of its programs"
        if self.verdict == "healthy":
            return [f"every stage agrees with torch: {compared}, loss {self.loss:.6g}"]
        if self.verdict == "between":
            return [
                f"every stage agrees with torch ({compared}), but the pipeline's own pass does "
                f"not: {self.detail}. Memory that is used again too early, an event that happens "
                "before the end of its work, or a transfer may be the cause"
            ]
        if self.verdict == "capture":
            place = "" if self.culprit is None else f"; first not finite at {self.culprit.place}"
            return [
                f"the captured program differs from the module itself in eager torch: {self.detail}"
                f"{place}",
                f"every stage runs that program as torch does ({compared}), so no device is at "
                "fault. Report this, or look for state that the module keeps between calls",
            ]
        culprit = self.culprit
        if culprit is None:
            return [
                f"every stage agrees with torch ({compared}), but the loss of the mini-batch is "
                f"{self.loss:.6g}: look at loss_fn, and at y"
            ]
        if self.verdict == "numbers":
            return [
                f"every stage agrees with torch, but a value is not finite, in torch as well: "
                f"{culprit.place}",
                culprit.not_finite,
                "lower the learning rate or the loss scale, clip gradients (clip_norm), or look at "
                "the data",
            ]
        lines = [f"{culprit.place}", f"{culprit.device} {_MEANING[self.verdict]}"]
        if culprit.inputs:
            lines.append(f"{', '.join(culprit.inputs)} -> {culprit.output}")
        if culprit.reason:
            lines.append(culprit.reason)
        elif culprit.not_finite:
            lines.append(culprit.not_finite)
        else:
            lines.append(f"largest error {culprit.error:.3g}, allowed {culprit.allowed:.3g}")
        return lines


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
