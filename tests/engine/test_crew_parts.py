"""The engine's small parts: channels, links, scripts, and transfers that run ahead."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crews import ALIKE, TRANSPORTS, Crews
from engine_stages import LR, WIDTH, make_stages, make_values

from hetpipe.capture.program import CUT, Slot
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.cluster.topology import Link
from hetpipe.crew import control as control_module
from hetpipe.crew.control import Control
from hetpipe.crew.crew import Crew
from hetpipe.crew.request import StepRequest
from hetpipe.crew.routing import wires
from hetpipe.errors import HetpipeError, WorkerError
from hetpipe.papers.overhead import measure_empty_action
from hetpipe.schedule.action import Action, Message, Op
from hetpipe.schedule.complete import closing
from hetpipe.schedule.generators import generate
from hetpipe.wire.channel import INLINE_NBYTES, KEPT_FILES, KEPT_NBYTES, Channel
from hetpipe.wire.messages import Beat, Failure, Losses, Reply
from hetpipe.wire.shares import Shares
from hetpipe.wire.wire import arrays_in, packed_nbytes
from hetpipe.worker.runner import Script


def pair() -> tuple[Channel, Channel]:
    left, right = socket.socketpair()
    return Channel(left), Channel(right)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    left, right = pair()
    yield left, right
    left.close()
    right.close()


@pytest.mark.parametrize("count", [0, 1, 7, INLINE_NBYTES // 8, 1 << 20, KEPT_NBYTES // 8])
def test_channel_carries_arrays_of_any_size(count: int) -> None:
    left, right = pair()
    sent = {"a": np.arange(count, dtype=np.float64), "b": np.float32(1.5), "c": np.array(True)}
    before = len(os.listdir("/proc/self/fd"))
    thread = threading.Thread(target=left.send, args=(sent,))
    thread.start()
    found, fds = right.receive()
    thread.join()
    assert fds == []
    np.testing.assert_array_equal(found["a"], sent["a"])
    assert found["b"] == 1.5
    assert found["c"].shape == ()
    del found  # the arrays own the memory
    left.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    with pytest.raises(EOFError):
        right.receive()
    right.close()


def test_a_message_stays_valid_while_its_file_carries_others(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    found = []
    for number in range(2 * KEPT_FILES):
        left.send(np.full(INLINE_NBYTES, number))
        found.append(right.receive()[0])
    assert [set(array.tolist()) for array in found] == [{n} for n in range(2 * KEPT_FILES)]


def test_messages_that_nobody_has_read_yet_have_files_for_themselves(
    ends: tuple[Channel, Channel],
) -> None:
    left, right = ends
    count = 2 * KEPT_FILES
    for number in range(count):
        left.send(np.full(INLINE_NBYTES * (1 + number % 3), number))
    assert [set(right.receive()[0].tolist()) for _ in range(count)] == [{n} for n in range(count)]


def test_a_channel_writes_messages_of_like_size_in_one_file(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    before = memory_files()
    for nbytes in range(4 * INLINE_NBYTES, 2 * INLINE_NBYTES, -1024):
        left.send(np.zeros(nbytes, np.uint8))
        right.receive()
    assert memory_files() == before + 1


def memory_files() -> int:
    """Return the number of anonymous files that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:hetpipe")


def test_channel_passes_descriptors() -> None:
    left, right = pair()
    reader, writer = os.pipe()
    left.send("one", [writer])
    message, (copy,) = right.receive()
    os.close(writer)
    os.write(copy, b"x")
    assert (message, os.read(reader, 1)) == ("one", b"x")
    for fd in (reader, copy):
        os.close(fd)
    left.close()
    right.close()


def test_tensors_of_a_message_do_not_overlap() -> None:
    layout = tuple(Slot(CUT, f"t{n}", (n, 3), "float32") for n in range(4))
    memory = bytearray(2 * packed_nbytes(layout))
    for base in (0, packed_nbytes(layout)):
        for number, array in enumerate(arrays_in(memory, layout, base)):
            array[...] = base + number
    for base in (0, packed_nbytes(layout)):
        for number, array in enumerate(arrays_in(memory, layout, base)):
            assert (array == base + number).all()


def alone(stages: int) -> Shares:
    return Shares(((1.0,),) * stages)


def test_a_relayed_tensor_travels_on_both_wires() -> None:
    stages = [[stage] for stage in make_stages(3, [2], skip=True)]
    found = {(w.source[0], w.target[0]): w.layouts for w in wires(stages, alone(3), [2])}
    names = {ends: [s.name for s in lay["F", 2]] for ends, lay in found.items() if ("F", 2) in lay}
    assert names == {(0, 1): ["h0"], (1, 2): ["h1", "h0"]}
    assert [slot.name for slot in found[2, 1]["B", 2]] == ["h1", "h0"]


def test_a_bfloat16_cut_is_refused() -> None:
    left, right = make_stages(2, [2])
    for program in (left.passes[2].forward, right.passes[2].forward):
        for side in ("inputs", "outputs"):
            slots = [
                Slot(s.role, s.name, s.shape, "bfloat16") if s.role == CUT else s
                for s in getattr(program, side)
            ]
            object.__setattr__(program, side, tuple(slots))
    object.__setattr__(right.passes[2], "backward", None)
    with pytest.raises(HetpipeError, match="cast to float32"):
        wires([[left], [right]], alone(2), [2])


def test_stages_of_different_captures_are_refused() -> None:
    left, right = make_stages(2, [2])[0], make_stages(2, [2])[1]
    slots = tuple(
        Slot(s.role, s.name, (9, 9), s.dtype) if s.role == CUT else s
        for s in left.passes[2].forward.outputs
    )
    object.__setattr__(left.passes[2].forward, "outputs", slots)
    with pytest.raises(HetpipeError, match=r"float64\[9, 9\].*float64\[2, 4\]"):
        wires([[left], [right]], alone(2), [2])


def parse(*rows: str) -> Any:
    return tuple(tuple(map(Action.parse, row.split())) for row in rows)


def test_script_expects_messages_in_the_senders_order() -> None:
    schedule = parse("0F0 0SF0 0F1 0SF1", "1RF1 1F1 1RF0 1F0")
    ends = closing(schedule)
    assert ends == {(0, Op.SEND_FORWARD), (1, Op.FORWARD)}
    script = Script.of(schedule, 1, [1], ends)
    assert script.arrivals == (Message(0, 1, "F", 0), Message(0, 1, "F", 1))
    assert script.actions == schedule[1]


def test_control_keeps_the_first_failure() -> None:
    control = Control(["worker 'a'", "worker 'b'"])
    control.arrived(0, Reply(1))
    control.arrived(1, Failure("1F0", "KeyError: 'x'", "trace of it"))
    control.arrived(0, Failure("idle", "late", ""))
    with pytest.raises(WorkerError, match="worker 'b' failed at 1F0: KeyError: 'x'") as caught:
        control.gather([0])
    assert "trace of it" in str(caught.value.__cause__)


def test_control_keeps_news_until_asked() -> None:
    """News of the next request may come with the last reply; gather keeps it without `on_news`."""
    control, found = Control(["worker 'a'"]), list[Any]()
    for number in range(3):
        control.arrived(0, Reply(number))
    control.arrived(0, Losses(7, True, (1.0,)))
    assert control.gather([0]) == [0]
    assert control.gather([0], on_news=found.append) == [1]
    assert found == [Losses(7, True, (1.0,))]
    assert control.gather([0], on_news=found.append) == [2]
    assert len(found) == 1


@pytest.mark.slow
def test_control_waits_while_a_worker_makes_progress() -> None:
    control = Control(["worker 'a'"])

    def beats() -> None:
        for number in range(6):
            control.arrived(0, Beat(f"0F{number}"))
            time.sleep(0.5)
        control.arrived(0, Reply("done"))

    thread = threading.Thread(target=beats)
    thread.start()
    assert control.gather([0], patience_s=2.5) == ["done"]
    thread.join()


@pytest.mark.parametrize(
    ("doing", "pass_limit_s", "fails"),
    [
        (["0RB1", "1RF1"], None, True),
        (["0RB1", "idle"], None, True),
        (["0RB1", "1RF1 and 1RK0"], None, True),
        (["0RB1", "1F1"], None, False),
        (["0RB1", "1RF1 and 1W0"], None, False),
        (["0RB1", "1U"], None, False),
        (["0RB1", "1F1"], 0.1, True),
        (["0RB1", "1RF1"], 100.0, True),
    ],
)
def test_control_waits_for_a_pass(
    monkeypatch: pytest.MonkeyPatch, doing: list[str], pass_limit_s: float | None, fails: bool
) -> None:
    """A pass may take any time unless limited; a circle of waiting workers may not."""
    monkeypatch.setattr(control_module, "TICK_S", 0.05)
    control = Control(["worker 'a'", "worker 'b'"])
    for worker, text in enumerate(doing):
        control.arrived(worker, Beat(text))
    end = threading.Timer(1.0, lambda: [control.arrived(n, Reply(n)) for n in (0, 1)])
    end.start()
    if fails:
        with pytest.raises(WorkerError, match=f"nothing has moved .* {doing[1].split()[-1]}"):
            control.gather([0, 1], 0.1, pass_limit_s=pass_limit_s)
        end.cancel()
    else:
        assert control.gather([0, 1], 0.1, pass_limit_s=pass_limit_s) == [0, 1]
    end.join()


def test_a_long_pass_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The notice names the devices, the stage and the option; a second notice comes much later."""
    monkeypatch.setattr(control_module, "TICK_S", 0.05)
    monkeypatch.setattr(control_module, "NOTICE_S", 0.2)
    control = Control(["worker 'a' (npu:0)", "worker 'b' (npu:1)"])
    for worker, text in enumerate(("0RB1", "1F0")):
        control.arrived(worker, Beat(text))

    def end() -> None:
        begin_s = time.monotonic()
        while not caplog.records and time.monotonic() - begin_s < 30.0:
            time.sleep(0.02)
        time.sleep(0.5)
        for worker in (0, 1):
            control.arrived(worker, Reply(worker))

    thread = threading.Thread(target=end)
    thread.start()
    assert control.gather([0, 1]) == [0, 1]
    thread.join()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.partition(" s: ")[2] == (
        "worker 'a' (npu:0) waits in 0RB1, worker 'b' (npu:1) is at 1F0 (the forward of stage 1); "
        "a pass may take any time, unless pass_limit_s limits it"
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_out_of_order_and_far_ahead(crews: Crews, transport: str) -> None:
    """The receiver first asks for the last message, which is beyond the number it may keep."""
    count = 12
    sends = " ".join(f"0F{m} 0SF{m}" for m in range(count))
    takes = " ".join(f"1RF{m} 1F{m}" for m in reversed(range(count)))
    x = np.random.default_rng(0).normal(size=(count, 2, WIDTH))
    feeds = [{"x": x[m], "y": np.zeros((2, WIDTH))} for m in range(count)]
    crew, values = crews(ALIKE, transport), make_values(2)
    crew.load(make_stages(2, [2]), ["m0", "m1"], values)
    request = StepRequest(parse(sends, takes), (2,) * count, feeds, (1.0,) * count, {"lr": LR}, 1)
    losses = crew.step(request).losses
    wanted = ((x @ values["w0"] @ values["w1"]) ** 2).sum(axis=(1, 2))
    np.testing.assert_allclose(losses, wanted, rtol=1e-12)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_emulated_links_and_speeds_only_slow_down(transport: str) -> None:
    """Emulation only delays.

    A message occupies its link and arrives after that time plus the latency at the earliest.
    Compute is stretched, transfers are not.
    """
    nbytes, latency_s, speed = 2 * WIDTH * 8, 0.03, 0.25
    link = Link(latency_s, nbytes / 0.02)
    members = (Member("m0", "numpy:cpu:0"), Member("m1", "numpy:cpu:0", speed=speed))
    cluster = Cluster(members, {frozenset(("m1", "m0")): link}, transport)
    feeds = [{"x": np.ones((2, WIDTH)), "y": np.zeros((2, WIDTH))}] * 3
    with Crew.start(cluster) as crew:
        crew.load(make_stages(2, [2]), ["m0", "m1"], make_values(2))
        schedule = generate("gpipe", 2, 3)
        result = crew.step(StepRequest(schedule, (2,) * 3, feeds, (1.0,) * 3, {"lr": LR}, 1))
    at = {str(span.action): span for span in result.timeline.spans}
    for m in range(3):
        for sent, came in ((f"0SF{m}", f"1RF{m}"), (f"1SB{m}", f"0RB{m}")):
            assert at[sent].end_s - at[sent].start_s >= 0.02
            assert at[came].start_s - at[sent].start_s >= 0.02 + latency_s
    for m in range(2):  # one message at a time
        assert at[f"0SF{m + 1}"].start_s >= at[f"0SF{m}"].end_s


def test_a_big_feed_arrives(crews: Crews) -> None:
    rows = 4096  # 128 KiB per leaf, so it goes through shared memory
    x = np.random.default_rng(0).normal(size=(rows, WIDTH))
    crew, values = crews(ALIKE, "shared-memory"), make_values(2)
    crew.load(make_stages(2, [rows]), ["m0", "m1"], values)
    schedule = generate("gpipe", 2, 1)
    request = StepRequest(schedule, (rows,), [{"x": x, "y": x}], (1.0,), {"lr": LR}, 1)
    for _ in range(2):
        (loss,) = crew.step(request).losses
        crew.write("param", values)
    error = x @ values["w0"] @ values["w1"] - x
    assert loss == pytest.approx((error**2).sum(), rel=1e-10)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_empty_action_can_be_measured(transport: str) -> None:
    assert measure_empty_action(transport, microbatches=4) > 0.0
