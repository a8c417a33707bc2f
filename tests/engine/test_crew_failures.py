"""A failed worker or controller causes a clear error soon, and no process or memory remains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crews import eventually, has_ended
from engine_backends import FaultyBackend
from engine_stages import LR, WIDTH, make_stages, make_values

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.crew.control import Patience
from hetpipe.crew.crew import Crew
from hetpipe.crew.request import StepRequest, StepResult
from hetpipe.errors import BackendError, HetpipeError, WorkerError
from hetpipe.schedule.generators import generate
from hetpipe.sdk.host import registry

HERE = Path(__file__).parent
PROCESSES = ["shared-memory", "distributed"]


@pytest.fixture(autouse=True)
def faulty() -> Iterator[None]:
    registry.register_backend(FaultyBackend)
    shared = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) <= shared


def start(kinds: list[str], transport: str, **options: Any) -> Crew:
    devices = [kind if ":" in kind else f"faulty:{kind}:0" for kind in kinds]
    members = tuple(Member(f"m{n}", device) for n, device in enumerate(devices))
    crew = Crew.start(Cluster(members, transport=transport), **options)
    stages = make_stages(len(kinds), [2])
    crew.load(stages, [m.id for m in members], make_values(len(kinds)))
    return crew


def step(crew: Crew, stages: int, timeout_s: float | None = None) -> StepResult:
    feed = {"x": np.ones((2, WIDTH)), "y": np.zeros((2, WIDTH))}
    schedule = generate("1f1b", stages, 4)
    request = StepRequest(schedule, (2,) * 4, [feed] * 4, (1.0,) * 4, {"lr": LR}, 1)
    return crew.step(request, timeout_s)


def pids(crew: Crew) -> list[int]:
    return crew.call(list(crew.infos), "engine_backends:pid")


def failure_text(crew: Crew, action: Callable[[], Any], limit_s: float, workers: list[int]) -> str:
    """Return the text of the error that `action` raises in time, and check the clean-up."""
    start_s = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        action()
    assert time.monotonic() - start_s < limit_s
    assert all(map(has_ended, workers))
    with pytest.raises(WorkerError) as again:  # every later call raises the same error at once
        crew.call(["m0"], "engine_backends:pid")
    assert str(again.value) == str(caught.value)
    crew.close()
    return str(caught.value)


@pytest.mark.parametrize("transport", ["local", *PROCESSES])
def test_an_exception_names_worker_action_and_place(transport: str) -> None:
    crew = start(["good", "raise", "good"], transport)
    workers = [] if transport == "local" else pids(crew)
    text = failure_text(crew, lambda: step(crew, 3), 5.0, workers)
    assert "worker 'm1' (faulty:raise:0) failed at 1" in text
    assert "ValueError: boom 42 (" in text
    assert "engine_backends.py" in text


@pytest.mark.parametrize("transport", PROCESSES)
def test_a_worker_that_crashes_is_named_with_its_signal(transport: str) -> None:
    crew = start(["good", "good", "die"], transport)
    text = failure_text(crew, lambda: step(crew, 3), 5.0, pids(crew))
    assert "worker 'm2' (faulty:die:0)" in text
    assert "was killed by SIGSEGV" in text


@pytest.mark.parametrize("transport", PROCESSES)
def test_a_killed_worker_is_named_to_distant_waiters(transport: str) -> None:
    """m0 waits for m1, which waits for the hanging m2; m0 has no connection to m2."""
    crew = start(["good", "good", "hang"], transport)
    workers = pids(crew)
    killer = threading.Timer(1.0, os.kill, (workers[2], signal.SIGKILL))
    killer.start()
    text = failure_text(crew, lambda: step(crew, 3), 6.0, workers)
    assert "worker 'm2' (faulty:hang:0)" in text
    assert "SIGKILL" in text
    killer.join()


def test_a_local_crew_that_fails_leaves_no_thread() -> None:
    threads = threading.active_count()
    crew = start(["good", "good", "raise", "good"], "local")
    failure_text(crew, lambda: step(crew, 4), 5.0, [])
    assert eventually(lambda: threading.active_count() == threads)


def test_a_worker_killed_between_steps_is_named() -> None:
    crew = start(["good", "good"], "shared-memory")
    workers = pids(crew)
    os.kill(workers[0], signal.SIGKILL)
    assert "worker 'm0'" in failure_text(crew, lambda: step(crew, 2), 5.0, workers)


def test_a_stopped_worker_is_found_by_its_state() -> None:
    crew = start(["good", "hang"], "shared-memory", heartbeat_s=0.2)
    workers = pids(crew)
    stopper = threading.Timer(0.5, os.kill, (workers[0], signal.SIGSTOP))
    stopper.start()
    text = failure_text(crew, lambda: step(crew, 2), 8.0, workers)
    assert "worker 'm0'" in text
    assert "is stopped" in text
    stopper.join()


def test_a_stopped_fork_server_is_found_by_its_state() -> None:
    with start(["good"], "shared-memory", heartbeat_s=0.2) as crew:
        server = parent_of(pids(crew)[0])
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(WorkerError, match=rf"'m0' .*fork server {server}.* is stopped"):
        start(["good"], "shared-memory", heartbeat_s=0.2)
    assert eventually(lambda: has_ended(server))
    start(["good"], "shared-memory").close()  # by another server


def test_a_stuck_worker_is_found_and_one_that_computes_is_not() -> None:
    """Both keep the interpreter's lock, so that neither sends a sign of life."""
    limits = {"heartbeat_s": 0.1, "silence_s": 0.5}
    with start(["good"], "shared-memory", **limits) as crew:
        count = 100_000_000
        found = crew.call(["m0"], "engine_backends:compute_with_the_lock", count)
        assert found == [count * (count - 1) // 2]
        with pytest.raises(WorkerError, match=r"'m0' .*no sign of life .* it is stuck"):
            crew.call(["m0"], "engine_backends:sleep_with_the_lock", 30)


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["local", "shared-memory"])
def test_a_hang_reports_what_each_worker_does(transport: str) -> None:
    crew = start(["good", "hang"], transport, heartbeat_s=0.2)
    workers = [] if transport == "local" else pids(crew)
    text = failure_text(crew, lambda: step(crew, 2, timeout_s=2.0), 8.0, workers)
    assert "nothing has moved for 2 s" in text
    assert "worker 'm0' (faulty:good:0) waits in 0RB" in text
    assert "worker 'm1' (faulty:hang:0) is at 1F" in text


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["local", "shared-memory"])
def test_a_slow_pass_is_no_failure_without_a_limit(
    monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setattr(Patience, "FIRST_STEP_S", 0.5)
    with start(["good", "slow"], transport, heartbeat_s=0.2) as crew:
        assert len(step(crew, 2).losses) == 4
    with start(["good", "slow"], transport, heartbeat_s=0.2) as crew:
        crew.pass_limit_s = 0.5
        with pytest.raises(WorkerError, match=r"'m1' \(faulty:slow:0\) is at 1F"):
            step(crew, 2)


@pytest.mark.slow
def test_all_processes_may_be_stopped_for_a_while() -> None:
    """The stop is longer than a worker may be silent, as with Ctrl-Z or a sleeping laptop."""
    then = "for n in range(150): step(crew, 2); time.sleep(0.02)"
    limits = "heartbeat_s=0.2, silence_s=1.0"
    process, workers = script("good", "shared-memory", then, limits)
    for _ in range(2):
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.killpg(process.pid, signal.SIGCONT)
    assert process.poll() is None
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert len(workers) == 2


@pytest.mark.parametrize("transport", ["local", "shared-memory"])
def test_a_device_that_cannot_be_opened_is_named(transport: str) -> None:
    with pytest.raises(WorkerError, match=r"'m0' .*at start: the driver is away; bring it back"):
        start(["shut", "good"], transport)


@pytest.mark.parametrize("transport", ["local", "shared-memory"])
def test_a_missing_device_is_refused(transport: str) -> None:
    with pytest.raises(HetpipeError, match=r"faulty:none:0.*known: faulty:good:0"):
        start(["none", "good"], transport)


@pytest.mark.parametrize(
    ("device", "why"),
    [
        (
            "faulty:none:0",
            r"member 'faulty:none:0': no device .*; .*known: faulty:good:0",
        ),
        ("noting:cpu:0", "no backend 'noting'"),
    ],
)
@pytest.mark.parametrize("transport", ["local", "shared-memory"])
def test_a_wrong_device_name_points_at_its_line(
    tmp_path: Path, transport: str, device: str, why: str
) -> None:
    path = tmp_path / "cluster.toml"
    good = f'transport = "{transport}"\n[[device]]\ndevice = "faulty:good:0"\n'
    path.write_text(good + f'[[device]]\nspeed = 0.5\ndevice = "{device}"\n')
    with pytest.raises(BackendError, match=f"^{path}:6: {why}"):
        Crew.start(Cluster.load(path))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(BackendError, match="no backend 'nothing'"):
        start(["nothing:cpu:0"], "shared-memory")


def test_a_class_no_process_can_import_is_refused() -> None:
    class Hidden(FaultyBackend):
        name = "hidden"

    registry.register_backend(Hidden)
    with pytest.raises(HetpipeError, match='at the top of a file, or use transport="local"'):
        start(["hidden:good:0"], "shared-memory")


def test_an_error_in_a_call_is_reported() -> None:
    crew = start(["good"], "shared-memory")
    with pytest.raises(WorkerError, match=r"failed at call: AttributeError: .* 'nowhere'"):
        crew.call(["m0"], "engine_backends:nowhere")


@pytest.mark.slow
def test_calls_run_concurrently_and_outlast_the_silence_limit() -> None:
    with start(["good", "good"], "shared-memory", silence_s=2.0, heartbeat_s=0.5) as crew:
        start_s = time.monotonic()
        found = crew.call(["m1", "m0"], "engine_backends:scale", 2.0, 3.0)
        assert time.monotonic() - start_s < 5.9
        assert found == [("faulty:good:0", 4.0)] * 2


@pytest.mark.slow
def test_workers_are_set_up_before_they_import() -> None:
    member = Member("m0", "faulty:good:0", cores=(0,))
    with Crew.start(Cluster((member,))) as crew:
        assert crew.call(["m0"], "engine_backends:ignored_interrupts") == [True]
        assert crew.call(["m0"], "engine_backends:cores") == [[0]]
        assert crew.call(["m0"], "engine_backends:variable", "OMP_NUM_THREADS") == ["1"]
        assert crew.call(["m0"], "engine_backends:variable", "OMP_WAIT_POLICY") == [None]


def test_idle_threads_sleep_on_cores_that_workers_share() -> None:
    members = Member("m0", "faulty:good:0", cores=(0,)), Member("m1", "faulty:good:0", cores=(0,))
    with Crew.start(Cluster(members)) as crew:
        found = crew.call(["m0", "m1"], "engine_backends:variable", "OMP_WAIT_POLICY")
        assert found == ["PASSIVE", "PASSIVE"]


def test_close_leaves_nothing() -> None:
    threads = threading.active_count()
    files = len(os.listdir("/proc/self/fd"))
    crew = start(["good", "good"], "shared-memory")
    workers = pids(crew)
    step(crew, 2)
    crew.close()
    crew.close()
    assert all(map(has_ended, workers))
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files
    with pytest.raises(WorkerError, match="make another pipeline"):
        step(crew, 2)


SCRIPT = """
import sys, time
sys.path.insert(0, {here!r})
from test_crew_failures import FaultyBackend, pids, registry, start, step
registry.register_backend(FaultyBackend)
crew = start(["good", {kind!r}], {transport!r}, {options})
print(*pids(crew), flush=True)
{then}
"""


def script(
    kind: str, transport: str, then: str, options: str = ""
) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a controller process without a `__main__` guard;

    return it and its workers' process ids.
    """
    text = SCRIPT.format(here=str(HERE), kind=kind, transport=transport, then=then, options=options)
    process = subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, [int(word) for word in process.stdout.readline().split()]


@pytest.mark.slow
@pytest.mark.parametrize("transport", PROCESSES)
def test_workers_die_with_a_controller_that_is_killed(transport: str) -> None:
    process, workers = script("hang", transport, "step(crew, 2)")
    assert len(workers) == 2
    time.sleep(0.5)
    process.kill()
    process.communicate()
    assert eventually(lambda: all(map(has_ended, workers)))


@pytest.mark.slow
def test_an_interrupt_ends_everything_quietly() -> None:
    """Ctrl-C reaches the whole process group, and only the controller prints a traceback."""
    process, workers = script("hang", "shared-memory", "step(crew, 2)")
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert errors.strip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == 1
    assert eventually(lambda: all(map(has_ended, workers)))


@pytest.mark.slow
@pytest.mark.parametrize("then", ["step(crew, 2)", "del crew", "raise SystemExit(0)"])
def test_a_crew_without_references_is_closed(then: str) -> None:
    process, workers = script("good", "shared-memory", then)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    assert len(workers) == 2
    assert eventually(lambda: all(map(has_ended, workers)))


def test_a_crew_outlives_the_thread_that_started_it() -> None:
    """The kernel kills a child if the *thread* that started it ends; the crew keeps one alive."""
    crews: list[Crew] = []
    thread = threading.Thread(target=lambda: crews.append(start(["good", "good"], "auto")))
    thread.start()
    thread.join()
    assert not thread.is_alive()
    with crews[0] as crew, start(["good", "good"], "auto") as other:
        assert not any(map(has_ended, pids(crew)))
        assert step(crew, 2).losses == step(other, 2).losses


def test_a_failure_is_told_at_once_if_nobody_waits(caplog: pytest.LogCaptureFixture) -> None:
    """The user's thread may capture a model for minutes."""
    with start(["good"], "shared-memory") as crew:
        worker = pids(crew)[0]
        assert not caplog.messages
        os.kill(worker, signal.SIGKILL)
        assert eventually(lambda: bool(caplog.messages))
        with pytest.raises(WorkerError, match=r"'m0' .* was killed by SIGKILL"):
            pids(crew)
    assert len(caplog.messages) == 1
    assert "'m0'" in caplog.messages[0]
