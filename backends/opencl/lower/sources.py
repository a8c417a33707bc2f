"""Texts of kernel files, and the functions that generated code calls."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from hetpipe.entries import key_of
from hetpipe.errors import BackendError

HELPERS = {
    "exact_erf(": "erf.cl", "exp_minus_square(": "erf.cl", "erf_plus_one(": "erf.cl",
    "exact_sin(": "exact.cl", "exact_cos(": "exact.cl", "exact_tan(": "exact.cl",
    "exact_pow(": "exact.cl", "exact_fmod(": "exact.cl", "exact_exp(": "exp.cl", "gelu(": "gelu.cl",
    "vstore16_at_once(": "store.cl",
}  # fmt: skip
"""The file that defines each function that generated code may call; callers come before the
functions that they call."""


@cache
def kernel_source(path: str) -> str:
    """Return the text of a file of `hetpipe.kernels`. Raises `BackendError` if it is missing."""
    try:
        return files("hetpipe.kernels").joinpath(path).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise BackendError(f"there is no kernel source {path!r} in hetpipe.kernels") from error


def with_helpers(text: str) -> str:
    """Return generated code, preceded by the functions of HELPERS that it calls and lacks."""
    for call, file in HELPERS.items():
        if call in text and kernel_source(file) not in text:
            text = f"{kernel_source(file)}\n{text}"
    return text


@cache
def helpers_identity() -> str:
    """Return a hash of all functions that generated code may call."""
    return key_of({call: kernel_source(file) for call, file in HELPERS.items()})
