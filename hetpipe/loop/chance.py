"""Chance: the states of the generators that decide the mini-batches of an epoch."""

from __future__ import annotations

import base64
import io
import pickle
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from hetpipe.errors import CheckpointError


def default_states() -> tuple[Any, ...]:
    """Return the states of the default generators of torch, numpy and Python."""
    import torch

    kind, keys, *rest = np.random.get_state()
    of_numpy = kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest
    return torch.get_rng_state(), of_numpy, random.getstate()


def set_default(states: tuple[Any, ...]) -> None:
    """Set the default generators of torch, numpy and Python."""
    import torch

    of_torch, (kind, keys, *rest), of_python = states
    torch.set_rng_state(of_torch)
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(of_python)


def loader_states(loader: object) -> list[Any]:
    """Return the states of the generators that a DataLoader and its samplers have themselves."""
    return [generator.get_state() for generator in _generators(loader)]


def set_loader(loader: object, states: Sequence[Any]) -> None:
    """Set such generators. Raises `CheckpointError` if there is another number of them."""
    generators = _generators(loader)
    if len(generators) != len(states):
        raise CheckpointError(
            f"the loader has {len(generators)} generators and had {len(states)} when the fit was "
            "saved: resume with the same loader, or begin anew with resume=False"
        )
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _generators(loader: object) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", 0)
    found = [getattr(owner, "generator", None) for owner in (loader, *samplers)]
    return list({id(each): each for each in found if hasattr(each, "get_state")}.values())


def to_text(states: object) -> str:
    """Return nested plain values and tensors as text."""
    import torch

    file = io.BytesIO()
    torch.save(states, file)
    return base64.b64encode(file.getvalue()).decode()


def from_text(text: str) -> Any:
    """Return the values in a text; no code in it runs. Raises `CheckpointError`."""
    import torch

    try:
        return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    except (ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"the saved state of the loader cannot be read: {error}") from error
