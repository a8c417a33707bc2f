"""Options of the command line: lists, numbers, and files for several devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from hetpipe.backends.numpy import NumpyBackend

from hetpipe.cli.capacity import parse_block
from hetpipe.cli.conform import LevelName, conform
from hetpipe.cli.kernels.bench import _sets
from hetpipe.cli.options import split_numbers
from hetpipe.environment import refuse_ranks
from hetpipe.errors import HetpipeError, PlanError


def test_digits_that_are_no_numbers_are_refused() -> None:
    """A superscript is a digit to `str.isdigit`, but `int` refuses it."""
    with pytest.raises(PlanError, match="separate the numbers by commas"):
        split_numbers("²", "--cuts")
    with pytest.raises(PlanError, match="write the first and last layer"):
        parse_block("1:²")
    refuse_ranks({"WORLD_SIZE": "²", "RANK": "0"})


def test_spaces_in_a_list_do_not_count() -> None:
    assert split_numbers("2, 1", "--cuts") == [2, 1]
    assert _sets("products, memory") == ["products", "memory"]
    for sets in ("", "producs"):
        with pytest.raises(HetpipeError, match=f"no set of kernels '{sets}'"):
            _sets(sets)


def test_one_file_cannot_have_the_results_of_two_devices() -> None:
    (info,) = NumpyBackend().discover()
    with pytest.raises(HetpipeError, match=r"--junit out.xml is 1 file for 2 devices: name a fol"):
        conform([info, info], LevelName.core, (), Path("out.xml"), None, several=True)
