"""Execution models on the FPGA emulator: two passes at once, and results that leave early."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plans import unpriced
from reference import Parameters, check_close, train
from torch import nn

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member

WIDTH, SAMPLES, MICROBATCHES = 512, 1024, 8
LIMIT_S = 90.0  # on a busy host, two passes that may overlap do not do so in every mini-batch


def sgd(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def emulator() -> str:
    """Return the FPGA emulator's id; skip the test if there is none."""
    found, _ = hp.discover_devices(["opencl"])
    emulators = [i.id for i in found if i.kind == "fpga" and i.capabilities.emulated]
    if not emulators:
        pytest.skip("no FPGA emulator: install the extra `emulators`")
    return emulators[0]


@pytest.mark.slow
def test_kernels_of_a_forward_and_a_backward_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's timestamps of both queues show the overlap, and training equals torch's."""
    device = emulator()
    import pyopencl as cl

    commands: list[tuple[Any, Any]] = []
    enqueue = cl.enqueue_nd_range_kernel

    def recording(queue: Any, *args: Any) -> Any:
        commands.append((queue, enqueue(queue, *args)))
        return commands[-1][1]

    monkeypatch.setattr(cl, "enqueue_nd_range_kernel", recording)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
    data = [(torch.randn(SAMPLES, WIDTH), torch.randint(0, 8, (SAMPLES,))) for _ in range(2)]
    expected = train(model, F.cross_entropy, data, MICROBATCHES, sgd)
    captured = Captured(model, F.cross_entropy, data[0])
    plan, costs = unpriced(captured, ["m0"], "fbp", SAMPLES, MICROBATCHES)
    with hp.Pipeline(
        model, F.cross_entropy, data[0], captured=captured, plan=plan, costs=costs,
        cluster=Cluster((Member("m0", device),), transport="local"),
        optimizer=hp.optim.sgd(lr=0.05),
    ) as pipe:  # fmt: skip
        losses = [pipe.step(x, y) for x, y in data]
        state = pipe.state_dict()
        found = overlap(commands)
        end_s = time.monotonic() + LIMIT_S
        while found <= 0 and time.monotonic() < end_s:
            commands.clear()
            pipe.step(*data[0])
            pipe.state_dict()  # wait until all has been computed
            found = overlap(commands)
        commands.clear()
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    check_close(state, expected.state)
    assert found > 0


def overlap(commands: list[tuple[Any, Any]]) -> int:
    """Return the longest time, in ns, during which a kernel of each queue ran."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for queue, event in commands:
        spans.setdefault(queue.int_ptr, []).append((event.profile.start, event.profile.end))
    ahead, back = spans.values()
    return max(min(f[1], b[1]) - max(f[0], b[0]) for f in ahead for b in back)


@pytest.mark.slow
def test_results_are_sent_while_the_pass_runs() -> None:
    """The emulator sends early, its neighbours send whole messages, and training equals torch's."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)), nn.Linear(WIDTH, 8)
    )
    microbatches, samples = 4, 2048
    data = [(torch.randn(samples, WIDTH), torch.randint(0, 8, (samples,))) for _ in range(2)]
    expected = train(model, F.cross_entropy, data, microbatches, sgd)
    captured = Captured(model, F.cross_entropy, data[0])
    names = ["m0", "m1", "m2"]
    plan, costs = unpriced(captured, names, "1f1b-as", samples, microbatches)
    devices = ("pytorch:cpu:0", emulator(), "numpy:cpu:0")
    members = tuple(Member(*each) for each in zip(names, devices, strict=True))
    with hp.Pipeline(
        model, F.cross_entropy, data[0], captured=captured, plan=plan, costs=costs,
        cluster=Cluster(members, transport="local"), optimizer=hp.optim.sgd(lr=0.05),
    ) as pipe:  # fmt: skip
        losses = [pipe.step(x, y) for x, y in data]
        state = pipe.state_dict()
        found = streamed(pipe, microbatches)
        end_s = time.monotonic() + LIMIT_S
        while not all(found.values()) and time.monotonic() < end_s:
            pipe.step(*data[0])
            now = streamed(pipe, microbatches)
            found = {name: early or now[name] for name, early in found.items()}
        spans = {str(span.action): span for span in pipe.timeline.spans}
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    check_close(state, expected.state)
    assert all(found.values()), found
    assert all(spans[f"0SF{m}"].start_s >= spans[f"0F{m}"].end_s for m in range(microbatches))


def streamed(pipe: hp.Pipeline, microbatches: int) -> dict[str, bool]:
    """Return, for forwards and backwards, whether stage 1 sent before a pass was complete."""
    spans = {str(span.action): span for span in pipe.timeline.spans}
    return {
        made: any(
            spans[f"1S{made}{m}"].start_s < spans[f"1{made}{m}"].end_s for m in range(microbatches)
        )
        for made in "FB"
    }
