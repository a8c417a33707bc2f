"""Files of boards: errors name file and line, and a board that is read can price a layer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from damage import changed, spoilt
from fuzzing import ACCEPTED, REFUSED, check_both_ends, outcomes, result_of
from hypothesis import strategies as st
from invented import toml, values

from hetpipe.cost import board, gpu
from hetpipe.cost import fpga as fpga_model
from hetpipe.cost.board import read_board
from hetpipe.cost.work import Kernel
from hetpipe.errors import CostError

OWN = sorted((Path(board.__file__).parents[2] / "boards").glob("*.toml"))
KERNEL = Kernel(operations=1e6, nbytes=10**6)


def attempt(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    read = result_of(lambda: read_board(path), (CostError,))
    if isinstance(read, str):
        assert re.match(r":\d+: ", read.removeprefix(str(path))), read
        return REFUSED
    model = gpu if read.fabric is None else fpga_model
    result_of(lambda: model.kernels_s(read, (KERNEL,), dtype="float32"), (CostError,))
    return ACCEPTED


@pytest.mark.slow
def test_damaged(tmp_path: Path) -> None:
    files = spoilt(st.sampled_from([path.read_bytes() for path in OWN]))
    check_both_ends(outcomes(files, lambda content: attempt(tmp_path / "b.toml", content)))


@pytest.mark.slow
def test_invented(tmp_path: Path) -> None:
    kinds = [(board._Processor, ("gpu", "cpu")), (board._Fpga, ("fpga",))]
    whole = st.one_of(
        *(
            st.tuples(values(record, strict=True), st.sampled_from(names)).map(fitted)
            for record, names in kinds
        )
    )
    loose = st.one_of(*(values(record) for record, _ in kinds))
    files = (whole | changed(whole) | loose).map(toml)
    check_both_ends(outcomes(files, lambda content: attempt(tmp_path / "b.toml", content)))


def fitted(both: tuple[dict, str]) -> dict:
    """Give the tables this kind and numbers for the known dtypes."""
    tables, kind = both
    holder, key = (tables, "peak_flops") if kind != "fpga" else (tables["fabric"], "dsp_per_mac")
    holder[key] = dict(zip(board.PEAK_DTYPES, holder[key].values(), strict=False))
    return tables | {"kind": kind}
