"""Writes a checkpoint's model, and its optimizer's state, in the formats of other programs."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpipe.capture.program import BUFFER, PARAM, STATE
from hetpipe.checkpoint.tensors import Tensors
from hetpipe.errors import CheckpointError
from hetpipe.files import user_path, write_beside
from hetpipe.pipeline.model_state import as_tensors
from hetpipe.pipeline.resume import Progress, progress_of
from hetpipe.words import choices, words

if TYPE_CHECKING:
    import torch

    from hetpipe.checkpoint.checkpoint import Checkpoint

PT, SAFETENSORS, DCP = FORMATS = ("pt", "safetensors", "dcp")
"""`torch.save` of a `state_dict`, one safetensors file, `torch.distributed.checkpoint`."""
_SUFFIXES = {".pt": PT, ".pth": PT, ".bin": PT, ".safetensors": SAFETENSORS}

_ADAM = {"mean": "exp_avg", "square": "exp_avg_sq", "largest": "max_exp_avg_sq"}
STATES: dict[str, Mapping[str, str]] = {
    "sgd": {"momentum": "momentum_buffer"},
    "adam": _ADAM,
    "adamw": _ADAM,
    "adamax": {"mean": "exp_avg", "largest": "exp_inf"},
    "rmsprop": {"square": "square_avg", "mean": "grad_avg", "momentum": "momentum_buffer"},
    "adagrad": {"sum": "sum"},
    "adadelta": {"square": "square_avg", "moved": "acc_delta"},
}
"""Optimizers whose state torch has too: hetpipe's names of the states, each with torch's name."""


def format_of(target: Path, asked: str | None) -> str:
    """Return the format of a file or folder. Raises `CheckpointError` if it is not clear."""
    if asked is not None and asked not in FORMATS:
        raise CheckpointError(f"format {asked!r} is not known; {choices(asked, FORMATS)}")
    found = asked or _SUFFIXES.get(target.suffix)
    if found is None:
        raise CheckpointError(
            f"{target}: its name ends with none of {', '.join(_SUFFIXES)}; give --format"
        )
    return found


def export(saved: Checkpoint, target: Path, form: str) -> str:
    """Write a checkpoint to `target`; return a text that says what was written, and what was not.

    A file is replaced. Raises `CheckpointError` for a folder that has files, and `HetpipeError` if
    the target cannot be written.
    """
    target, progress = user_path(target, CheckpointError), progress_of(saved)
    model, left_out = model_state(saved, progress)
    if form == DCP:
        states, more = optimizer_state(saved, progress)
        left_out += more
        _write_folder(target, {"model": model, **({"optim": {"state": states}} if states else {})})
        content = "model and optim.state" if states else "model"
    else:
        writers: dict[str, Callable[[Path, Mapping[str, Any]], None]] = {
            PT: _write_pt, SAFETENSORS: _write_safetensors,
        }  # fmt: skip
        writers[form](target, model)
        left_out.append("the optimizer's state")
        content = "the model's state_dict"
    left_out += ["the optimizer's settings", "the loss scale"]
    return (
        f"{target}: {content} of step {progress.steps}, {len(model)} tensors; left out: "
        f"{', '.join(left_out)}"
    )


def model_state(saved: Checkpoint, progress: Progress) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the entries of the model's `state_dict` that the checkpoint has, and a text for the
    tensors that it lacks and for the loss's parameters."""
    tensors = Tensors.joined(Tensors.of(saved.tensors[role]) for role in (PARAM, BUFFER))
    sources = progress.names or {name: name for name in tensors}
    model = {name: tensors[source] for name, source in sources.items() if source in tensors}
    lacking = [name for name in sources if name not in model]
    of_loss = [name for name in saved.tensors[PARAM] if name not in sources.values()]
    left_out = [f"{words(lacking)} (used by no operator)"] if lacking else []
    left_out += [f"{words(of_loss)} (trained by the loss)"] if of_loss else []
    return as_tensors(model), left_out


def optimizer_state(
    saved: Checkpoint, progress: Progress
) -> tuple[dict[str, dict[str, torch.Tensor]], list[str]]:
    """Return the optimizer's state by parameter, as `get_optimizer_state_dict` of torch names it,
    and a text for each state that torch lacks. Leaves out the states of parameters of the loss."""
    import torch

    states, names = saved.tensors[STATE], STATES.get(progress.optimizer, {})
    found: dict[str, dict[str, torch.Tensor]] = {}
    kinds = {key.partition("/")[0]: None for key in states}
    for key in states:
        kind, _, name = key.partition("/")
        if kind in names and (not progress.names or name in progress.names.values()):
            found.setdefault(name, {}).update(as_tensors({names[kind]: states[key]}))
    if progress.optimizer != "sgd":
        for state in found.values():
            state["step"] = torch.tensor(float(max(progress.updates)))
    return found, [f"the state {kind!r}" for kind in kinds if kind not in names]


def _write_pt(target: Path, model: Mapping[str, Any]) -> None:
    import torch

    try:
        write_beside(target, lambda file: torch.save(dict(model), file))
    except RuntimeError as error:  # torch's writer hides the file's error
        raise _refusal(target, error) from error


def _write_safetensors(target: Path, model: Mapping[str, Any]) -> None:
    from safetensors.torch import save

    write_beside(target, save(dict(model)))


def _write_folder(target: Path, state: dict[str, Any]) -> None:
    """Write a folder in torch's distributed format, beside the target at first."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as beside:
            folder = Path(beside) / "new"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that there is one process
                save(state, checkpoint_id=folder, no_dist=True)
            os.rename(folder, target)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {target}: {error.strerror}; give a new folder"
        ) from error
    except CheckpointException as error:
        (failure, _), *_ = error.failures.values()
        raise _refusal(target, failure) from error


def _refusal(target: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"cannot write {target}: {error.__context__ or error}; make room there")
