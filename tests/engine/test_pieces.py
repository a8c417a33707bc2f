"""Messages sent in pieces while the pass runs arrive complete on every transport."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from crews import Crews
from models import MLP
from pipelines import pipeline
from reference import check_close, train
from slept import SleptBackend
from streamed import StreamedBackend

import hetpipe as hp
from hetpipe.capture.program import CUT, Slot
from hetpipe.cluster import Cluster, Link, Member
from hetpipe.crew.crew import Crew
from hetpipe.crew.request import StepRequest
from hetpipe.errors import BackendError
from hetpipe.papers.overhead import empty_stage
from hetpipe.schedule.generators import generate
from hetpipe.sdk.backend import DONE, Buffer, DoneEvent
from hetpipe.sdk.host.registry import get_backend, register_backend
from hetpipe.wire.gloo import LEAST_PART_NBYTES, _Staging
from hetpipe.wire.wire import Wire, packed_nbytes, pieces_of

register_backend(StreamedBackend)
register_backend(SleptBackend)
MICROBATCHES, SAMPLES = 4, 4096
SGD = hp.optim.sgd(lr=0.1)
MIXED = ("numpy:cpu:0", "streamed:cpu:0", "streamed:backwards:1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "schedule"),
    [("local", "zb-h1"), ("shared-memory", "1f1b-as"), ("distributed", "fbp")],
)
def test_mixed_devices_equal_unpartitioned_training(
    crews: Crews, transport: str, schedule: str
) -> None:
    """The three stages send whole messages, pieces in order, and pieces in reverse with gaps."""
    torch.manual_seed(0)
    model = MLP()
    data = [(torch.randn(SAMPLES, 20), torch.randint(0, 5, (SAMPLES,))) for _ in range(2)]
    expected = train(
        model, F.cross_entropy, data, MICROBATCHES, lambda p: torch.optim.SGD(p, lr=0.1)
    )
    with pipeline(
        crews(MIXED, transport), model, F.cross_entropy, data[0], "012", schedule, MICROBATCHES,
        optimizer=SGD,
    ) as pipe:  # fmt: skip
        losses = [pipe.step(x, y) for x, y in data]
        state = pipe.state_dict()
        evaluated = pipe.evaluate([data[0]]).loss
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    assert math.isfinite(evaluated)
    check_close(state, expected.state)


@pytest.mark.parametrize("speed", [1.0, 0.5])
def test_a_send_begins_with_the_first_chunk(speed: float) -> None:
    """The send begins during the pass or, at an emulated speed, after it."""
    width, count = 16, 3
    members = (Member("m0", "slept:8,8,16:0", speed=speed), Member("m1", "slept:2,4:1"))
    link = Link(0.0, 4 * width / 4e-3)
    cluster = Cluster(members, {frozenset(("m0", "m1")): link}, "local")
    feed = {"x": np.zeros((1, width), np.float32)}
    ones = (1,) * count
    schedule = generate("1f1b-as", 2, count)
    request = StepRequest(schedule, ones, [feed] * count, ones, {}, 1, grad_scale=1.0)
    with Crew.start(cluster) as crew:
        stages = [empty_stage(n, 2, width) for n in range(2)]
        crew.load(stages, ["m0", "m1"], {f"w{n}": np.zeros((), np.float32) for n in range(2)})
        timeline = crew.step(request).timeline
    at = {str(span.action): span for span in timeline.spans}
    # Three threads stamp these spans, and each may wake late. The bounds therefore count from the
    # start of the pass, which takes 8 ms (twice that at half speed).
    pass_s = 8e-3 / speed
    during = 0
    for m in range(count):
        made, sent, came = at[f"0F{m}"], at[f"0SF{m}"], at[f"1RF{m}"]
        during += made.start_s < sent.start_s < made.end_s
        if speed != 1.0:
            assert sent.start_s >= made.start_s + pass_s
        assert sent.end_s >= made.start_s + pass_s
        assert sent.end_s - sent.start_s >= 4e-3
        assert came.end_s >= made.start_s + pass_s
        back = at[f"1SB{m}"]  # from a device that sends whole messages
        assert back.start_s >= at[f"1B{m}"].start_s + 4e-3
    if speed == 1.0:
        assert during >= 1


class Bare(Buffer):
    shape, dtype = (6,), "float32"


def test_pieces_follow_the_order_of_the_message() -> None:
    """The second tensor of the message is output 0, and its chunks have any order and a gap."""
    one, two, end = DoneEvent(), DoneEvent(), DONE
    slots = [Slot(CUT, name, (6,), "float32") for name in ("b", "unsent", "a")]
    outputs = [Bare(), Bare(), Bare()]
    chunks = [(0, 4, 6, two), (0, 0, 2, one), (1, 0, 6, one)]
    found = pieces_of((slots[2], slots[0]), slots, outputs, end, chunks)
    assert found == [
        (0, outputs[2], 0, 6, end),
        (1, outputs[0], 0, 2, one),
        (1, outputs[0], 2, 4, end),
        (1, outputs[0], 4, 6, two),
    ]
    assert pieces_of((Slot(CUT, "c", (6,), "float32"),), slots, outputs, end, chunks) is None


@pytest.mark.parametrize("elements", [0, 1, 5000, 1_000_003])
@pytest.mark.parametrize("parts", [1, 16])
def test_parts_between_hosts_cover_a_message_once(elements: int, parts: int) -> None:
    layout = (Slot(CUT, "t", (elements,), "float32"),)
    staging = _Staging(Wire((0, 0), (1, 0), {("F", 1): layout}), parts)
    pieces = staging.parts["F", 1]
    assert sum(len(piece) for piece in pieces) == packed_nbytes(layout)
    for piece in pieces:
        piece += 1
    assert all((piece == 1).all() for piece in pieces)
    assert len(pieces) <= parts + 1
    assert all(len(piece) >= LEAST_PART_NBYTES for piece in pieces[:-2])


def test_a_device_with_chunks_must_hand_out_parts() -> None:
    """The default method raises an error that names the missing method."""
    (info,) = get_backend("numpy").discover()
    device = get_backend("numpy").open(info)
    buffer, _ = device.upload(np.zeros(4, np.float32))
    with pytest.raises(BackendError, match="declares chunks, so it needs download_part"):
        device.download_part(buffer, 0, 2, np.zeros(2, np.float32))
