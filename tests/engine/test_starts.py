"""Workers, self-tests and the bench's processes import the real modules from any working folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_stages import LR, WIDTH, make_stages, make_values

from hetpipe import process
from hetpipe.bench.plain import PlainTorch
from hetpipe.check.selftest_process import run_selftests
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.crew.crew import Crew
from hetpipe.crew.launcher import Timing, launch
from hetpipe.crew.request import StepRequest
from hetpipe.errors import HetpipeError, WorkerError
from hetpipe.profile.links import small_stages
from hetpipe.schedule.generators import generate
from hetpipe.sdk.host import registry
from hetpipe.sdk.host.registry import devices_of

TRAP = "raise RuntimeError('the file in the working folder was imported: ' + __file__)\n"
BACKEND = """
from dataclasses import replace
from hetpipe.backends.numpy import NumpyBackend

class MineBackend(NumpyBackend):
    name = "mine"

    def discover(self):
        return [replace(info, id="mine:cpu:0", backend="mine") for info in super().discover()]

def variable(device, name):
    import os
    return os.environ.get(name)

def path(device):
    import sys
    return sys.path
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, first on the path, with files named like modules of Python and hetpipe."""
    for name in ("queue.py", "ctypes.py", "runpy.py", "hetpipe/__init__.py", "numpy/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(TRAP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def mine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a user's module in the working folder, whose backend is registered."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_instances", dict(registry._instances))
    (folder / "my_backend.py").write_text(BACKEND)
    module = __import__("my_backend")
    registry.register_backend(module.MineBackend)
    yield "my_backend"
    del sys.modules["my_backend"]


@pytest.mark.slow
def test_a_crew_trains_beside_files_named_like_modules(folder: Path, mine: str) -> None:
    members = (Member("m0", "mine:cpu:0"), Member("m1", "numpy:cpu:0"))
    with Crew.start(Cluster(members, transport="shared-memory")) as crew:
        crew.load(make_stages(2, [2]), ["m0", "m1"], make_values(2))
        feed: dict[str, Any] = {"x": np.ones((2, WIDTH)), "y": np.zeros((2, WIDTH))}
        schedule = generate("1f1b", 2, 2)
        result = crew.step(StepRequest(schedule, (2,) * 2, [feed] * 2, (1.0,) * 2, {"lr": LR}, 1))
        assert np.isfinite(result.losses).all()
        assert crew.call(["m0"], f"{mine}:variable", "PYTHONPATH") == [str(folder)]
        assert crew.call(["m0"], f"{mine}:variable", "HETPIPE_PATH") == [None]
        (path,) = crew.call(["m0"], f"{mine}:path")
        assert sorted(path) == sorted(sys.path)  # no entry is lost; only the order differs


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_a_selftest_runs_beside_files_named_like_modules() -> None:
    ((device_id, result),) = run_selftests(devices_of("numpy"))
    assert device_id == "numpy:cpu:0"
    assert result["ok"], result["message"]


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_a_bench_process_runs_beside_files_named_like_modules() -> None:
    plain = PlainTorch("mlp", 8, 0, [min(os.sched_getaffinity(0))])
    try:
        assert plain.step_s(1, 1, 0) > 0
    finally:
        plain.close()


def test_the_users_folders_come_after_pythons_and_packages() -> None:
    library = [entry for entry in sys.path if Path(entry).name in ("lib-dynload", "site-packages")]
    assert len(library) >= 2
    entries = ["", "/home/me/project", library[1], "src", library[0]]
    right = [library[1], library[0], "", "/home/me/project", "src"]
    assert process.ordered(entries) == right


def test_a_users_module_with_the_name_of_a_library_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process imported the user's module, but a worker would silently import Python's."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_instances", dict(registry._instances))
    monkeypatch.delitem(sys.modules, "this", raising=False)
    (folder / "this.py").write_text(BACKEND)
    registry.register_backend(__import__("this").MineBackend)
    with pytest.raises(HetpipeError, match=r"module 'this'.* import .*this\.py .*rename"):
        Crew.start(Cluster((Member("m0", "mine:cpu:0"),)))
    del sys.modules["this"]


def _pids(crew: Crew) -> list[int]:
    return crew.call(list(crew.infos), "engine_backends:pid")


def _server_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("PPid:")[2].split()[0])


def _pair(*devices: str) -> Cluster:
    members = tuple(Member(f"m{n}", device) for n, device in enumerate(devices))
    return Cluster(members, transport="shared-memory")


def test_workers_come_from_one_server_with_one_thread() -> None:
    servers = set()
    for _ in range(2):
        with Crew.start(_pair("numpy:cpu:0", "numpy:cpu:0")) as crew:
            servers |= {_server_of(pid) for pid in _pids(crew)}
    assert len(servers) == 1
    assert len(os.listdir(f"/proc/{servers.pop()}/task")) == 1


def test_a_worker_has_the_folder_and_the_variables_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Crew.start(_pair("numpy:cpu:0")) as crew:
        (before,) = _pids(crew)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_VARIABLE", "mine")
    with Crew.start(_pair("numpy:cpu:0")) as crew:
        assert crew.call(["m0"], "engine_backends:folder") == [str(tmp_path)]
        assert crew.call(["m0"], "engine_backends:variable", "MY_VARIABLE") == ["mine"]
        (after,) = _pids(crew)
    assert before != after


@pytest.mark.slow
def test_a_changed_library_variable_needs_another_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = []
    for threads in ("1", "2"):
        monkeypatch.setenv("BLIS_NUM_THREADS", threads)
        with Crew.start(_pair("numpy:cpu:0")) as crew:
            assert crew.call(["m0"], "engine_backends:variable", "BLIS_NUM_THREADS") == [threads]
            servers += [_server_of(pid) for pid in _pids(crew)]
    assert servers[0] != servers[1]


@pytest.mark.slow
def test_a_server_that_was_killed_is_replaced() -> None:
    with Crew.start(_pair("numpy:cpu:0", "numpy:cpu:0")) as crew:
        server = _server_of(_pids(crew)[0])
        os.kill(server, signal.SIGKILL)
        with pytest.raises(WorkerError, match="was killed by SIGKILL"):
            crew.call(["m0"], "engine_backends:nap", 60.0)
    with Crew.start(_pair("numpy:cpu:0")) as crew:
        assert _server_of(_pids(crew)[0]) != server


@pytest.mark.slow
def test_a_crew_closes_while_torch_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server then starts none of its workers, and serves the next crew."""
    may_load, command = tmp_path / "may load", process.command
    wait = (
        "import os, sys, time\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "os.execv(sys.argv[2], sys.argv[2:])"
    )
    monkeypatch.setattr(
        process,
        "command",
        lambda *words: [sys.executable, "-c", wait, str(may_load), *command(*words)],
    )
    monkeypatch.setenv("BLIS_ARCH", "generic")  # another server
    launch(_pair("numpy:cpu:0", "numpy:cpu:0"), Timing(1.0, 8.0, 60.0)).fleet.close()
    monkeypatch.delattr(process, "command")  # so no further server can start
    may_load.touch()
    with Crew.start(_pair("numpy:cpu:0")) as crew:
        assert len(_pids(crew)) == 1


def test_stages_of_a_measurement_import_no_torch_compilers() -> None:
    """A start with known costs would import the compilers for these stages only."""
    code = """
import sys
from hetpipe.profile.links import small_stages

small_stages()
sys.exit(", ".join({"sympy", "torch._dynamo", "torch._inductor"} & set(sys.modules)) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_workers_import_no_torch_compilers() -> None:
    """The compilers take seconds to import, and torch's shape functions would import them."""
    cluster = Cluster((Member("m0", "pytorch:cpu:0"),), transport="shared-memory")
    with Crew.start(cluster) as crew:
        crew.call(["m0"], "hetpipe.profile.warm:warm_up", small_stages())
        (names,) = crew.call(["m0"], "engine_backends:imported")
    assert "torch" in names
    assert not names & {"sympy", "torch._dynamo", "torch._inductor"}
