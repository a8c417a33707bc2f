"""Workers read mini-batches from sources on their own hosts."""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import remote_data
import torch
from agents import hosts
from crews import Crews
from pipelines import pipeline
from plans import unpriced
from torch import nn

import hetpipe as hp
from hetpipe.capture.whole_loss import WholeLossCaptured
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError

DEVICE = "numpy:cpu:0"
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def two() -> Iterator[Crew]:
    """Two hosts; the variable REMOTE_DATA is set on h1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{HERE}:{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("REMOTE_DATA", "there")
        started = hosts(f"h0/{DEVICE}", f"h1/{DEVICE}")
        cluster = started.__enter__()
    try:
        with Crew.start(cluster) as crew:
            yield crew
    finally:
        started.__exit__(None, None, None)


def opened(crew: Crew, members: Any = "01", **options: Any) -> hp.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(remote_data.WIDTH, 8), nn.Tanh(), nn.Linear(8, 4))
    example = remote_data.example()
    options = {"optimizer": hp.optim.adamw(lr=1e-2), "microbatches": 2, **options}
    schedule = options.pop("schedule", "1f1b")
    return pipeline(crew, model, nn.functional.cross_entropy, example, members, schedule, **options)


def remote(name: str, **arguments: Any) -> hp.Remote:
    return hp.Remote(f"remote_data:{name}", **arguments)


@pytest.mark.parametrize(
    ("members", "options"),
    [("01", {}), ("10", {"accumulate": 2}), ([["m0", "m1"]], {"shares": [(3.0, 1.0)]})],
)
def test_losses_are_those_of_batches_from_the_controller(
    two: Crew, crews: Crews, members: Any, options: dict[str, Any]
) -> None:
    source = {"count": 5, "last": 7}
    with opened(crews((DEVICE,) * 2, "shared-memory"), members, **options) as pipe:
        here = [result.loss for result in pipe.run(remote_data.batches(**source))]
        again = [result.loss for result in pipe.run(remote("batches", **source))]
    with opened(two, members, **options) as pipe:
        assert [result.loss for result in pipe.run(remote("batches", **source))] == here
        assert [result.loss for result in pipe.run(remote("batches", **source))] == again


def test_no_leaf_crosses_the_network(two: Crew) -> None:
    assert two.cluster.connections is not None
    sockets = [h.connection._stream.socket for h in two.cluster.connections.others.values()]
    with opened(two, "10") as pipe:  # the other host has the first stage
        sums = []
        for source in (remote("batches", count=22), remote_data.batches(22)):
            run = pipe.run(source)
            next(run)
            before = sum(map(carried_nbytes, sockets))
            assert len([next(run) for _ in range(20)]) == 20
            sums.append((sum(map(carried_nbytes, sockets)) - before) / 20)
            run.close()
    leaves_nbytes = 8 * 4 * remote_data.WIDTH
    assert sums[1] > leaves_nbytes
    assert sums[0] < sums[1] - 0.8 * leaves_nbytes


def carried_nbytes(sock: socket.socket) -> int:
    """Return the bytes that a connection has sent and received."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    return sum(struct.unpack_from("QQ", info, 120))  # bytes acknowledged, bytes received


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (remote("uneven", here=3, there=2), r"mini-batch 2 .* no samples on m1 of host 'h1'"),
        (remote("unlike"), "8 samples on m0 of host 'h0' and 6 samples on m1 of host 'h1'"),
        (remote("broken"), r"mini-batch 0 of hp.Remote\('remote_data:broken'\) on m1 of host 'h1': "
         "FileNotFoundError: no /data here"),
        (remote("out_of_range"), r"m0 of host 'h0': y\[0\] is 4, but .* has 4 classes"),
        (remote("ignored"), "m0 of host 'h0': y has .* labels -100"),
        (remote("batch"), "m0 of host 'h0': remote_data has no 'batch'.* batches"),
        (remote("number"), "m0 of host 'h0': number returned 3: return an iterable"),
        (remote("batches", samples=8), "m0 of host 'h0': TypeError: .* 'count'"),
        (hp.Remote("no_such_data:batches"), "ModuleNotFoundError: No module named 'no_such_data'"),
    ],
)  # fmt: skip
def test_a_wrong_source_is_an_error_by_name_and_the_pipeline_goes_on(
    two: Crew, source: hp.Remote, match: str
) -> None:
    with opened(two) as pipe:
        with pytest.raises(HetpipeError, match=match):
            list(pipe.run(source))
        assert len(list(pipe.run(remote("batches", count=2)))) == 2


def test_what_a_remote_source_cannot_serve_is_refused(two: Crew) -> None:
    with pytest.raises(HetpipeError, match="name a function of a module"):
        hp.Remote("batches")
    with pytest.raises(HetpipeError, match="cannot be pickled"):
        remote("batches", count=lambda: 3)
    source = remote("batches", count=2)
    with opened(two) as pipe:
        here: list[Any] = list(remote_data.batches(2))
        calls: dict[str, Callable[[], Any]] = {
            "evaluate": lambda: pipe.evaluate(source),  # type: ignore[arg-type]
            "predict": lambda: pipe.predict(source),
            "predict_batches": lambda: next(pipe.predict_batches(source)),
            "fit": lambda: pipe.fit(source, 1, progress=False),
            "fit with a function": lambda: pipe.fit(lambda epoch: source, 1, progress=False),
            "fit with eval_data": lambda: pipe.fit(here, 1, eval_data=source, progress=False),
        }
        for call in calls.values():
            with pytest.raises(HetpipeError, match=rf"^{re.escape(str(source))}: only pipe\.run"):
                call()
        assert pipe.steps == 0
    with (
        opened(two, schedule="pipedream") as pipe,
        pytest.raises(HetpipeError, match="the schedule pipedream, which does not flush"),
    ):
        next(pipe.run(source))
    model, loss, example = nn.Linear(256, 4), nn.functional.cross_entropy, remote_data.example()
    captured = WholeLossCaptured(model, loss, example)
    plan, costs = unpriced(captured, ["m0"], "gpipe", 8, 2)
    with hp.Pipeline(
        model, loss, example, cluster=two.cluster, crew=two, captured=captured, plan=plan,
        costs=costs, optimizer=hp.optim.sgd(lr=0.1), loss_over="mini-batch",
    ) as pipe, pytest.raises(HetpipeError, match="loss_over"):  # fmt: skip
        next(pipe.run(source))
