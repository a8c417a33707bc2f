"""A shell's Tab key completes names at once, without torch, and without any error."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hetpipe.cli import complete
from hetpipe.cli.app import app
from hetpipe.cost.board import board_ids, boards


def completed(line: str) -> list[str]:
    """Return the completions of a command line's last word, as bash asks for them."""
    environment = {
        "_HETPIPE_COMPLETE": "complete_bash", "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }  # fmt: skip
    result = CliRunner().invoke(app, [], env=environment, prog_name="hetpipe")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout.split()


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("hetpipe tr", ["train"]),
        ("hetpipe kernels tu", ["tune"]),
        ("hetpipe train vgg1", ["vgg11", "vgg11-small", "vgg16", "vgg16-small", "vgg19",
                                "vgg19-small"]),
        ("hetpipe plan gpt-u", ["gpt-untied"]),
        ("hetpipe zoo mlp dig", ["digits"]),
        ("hetpipe bench --workload lst", ["lstm"]),
        ("hetpipe compare gpt --cluster pipedream-", ["pipedream-a", "pipedream-b", "pipedream-c"]),
        ("hetpipe train gpt --cluster pipedream-", ["pipedream-a", "pipedream-b", "pipedream-c"]),
        ("hetpipe boards u2", ["u200", "u250", "u280"]),
        ("hetpipe train mlp --schedule gp", ["gpipe"]),
        ("hetpipe train mlp --weights ver", ["vertical-sync"]),
        ("hetpipe plan gpt --planner ex", ["exact"]),
        ("hetpipe compare gpt --planners auto,d", ["auto,dapple"]),
        ("hetpipe train mlp --optimizer adamw", ["adamw"]),
        ("hetpipe doctor --backends numpy,op", ["numpy,opencl"]),
        ("hetpipe conform op", ["opencl"]),
        ("hetpipe reproduce bap", ["bapipe"]),
        ("hetpipe train nothing-like-this", []),
        ("hetpipe unknown x", []),
    ],
)  # fmt: skip
def test_names_are_completed(line: str, names: list[str]) -> None:
    assert completed(line) == names


def test_a_command_line_with_an_open_quote_is_no_error() -> None:
    completed('hetpipe train "vgg')


def test_an_error_of_a_source_of_names_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise OSError("no folder")

    assert complete._completion(broken)("x") == []


def test_ids_of_boards_are_their_files() -> None:
    assert board_ids() == list(boards())


def test_a_completion_loads_no_heavy_module() -> None:
    code = (
        "import sys\n"
        "from hetpipe.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(*{'torch', 'numpy', 'pyopencl', 'networkx'} & set(sys.modules))\n"
    )
    environment = {**os.environ, "_HETPIPE_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    for words, found in (("hetpipe boards u28", "u280"), ("hetpipe train vgg19-", "vgg19-small")):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**environment, "COMP_WORDS": words},
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert (done.stdout.split(), done.stderr) == ([found], "")
