"""The cost of feeding: steps whose mini-batches cross the network, against steps that read theirs.

    python -m benchmarks.fed [ROUNDS]

Two hosts are network namespaces of this machine, and each sends at most 1 Gb/s. The controller's
mini-batches have 50 MB, and the first stage is on the other host. In turns, `run` gets them from
the controller, and from an `hp.Remote` on the stage's host, which sends nothing. Paced devices take
about 600 ms for a step. Needs root. Run it with PYTHONPATH=tests:tests/engine:tests/support.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import torch
from torch import nn

import hetpipe as hp
from benchmarks.accuracy import TORCH
from benchmarks.paced import PacedTorch
from hetpipe.cluster.member import available_cores
from hetpipe.hosts.meeting import parse_address
from hetpipe.sdk.host.registry import register_backend
from hetpipe.train.training import one_thread

SAMPLES, WIDTH, DEPTH = 32, 390_625, 11
"""A mini-batch has 32 rows of 390,625 floats, which are 50 MB."""
HIDDEN = 1024
STEPS = 8
"""Steps of a run. The first two do not count: nothing has been read ahead for the first one."""


def main(rounds: str = "5") -> None:
    """Start the hosts, and print what the first of them prints."""
    networks = import_module("networks")  # of tests/support, where checks of types do not look
    with (
        TemporaryDirectory() as folder,
        networks.network(2, Path(folder), networks.Shape("1gbit")) as net,
    ):
        meeting = f"{net.address('h0')}:29400"
        started = {
            host: net.start(
                host, sys.executable, "-m", "benchmarks.fed", host, meeting, rounds,
                HETPIPE_SECRET="a secret of the tests alone",
            )
            for host in net.hosts
        }  # fmt: skip
        for line in started["h0"].stdout:
            print(line, end="", flush=True)
        for host, end in net.wait(started, 60.0).items():
            print(f"--- {host}: {end.status}\n{end.words}", flush=True)


@cache
def _kept() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(SAMPLES, WIDTH, generator=generator), torch.zeros(SAMPLES, dtype=torch.int64))
        for _ in range(2)
    ]


def batches(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield two mini-batches in turn, `count` in all."""
    return islice(cycle(_kept()), count)


def run_host(host: str, meeting: str, rounds: str) -> None:
    """Serve as an agent, or on the first host compare the ways of feeding."""
    register_backend(PacedTorch)
    if host != "h0":
        sys.exit(import_module("hetpipe.crew.agent").serve_once(parse_address(meeting), host, 120))
    devices = [f"{each}/paced-pytorch:even:{TORCH}" for each in ("h1", "h0")]
    cluster = hp.Cluster.hosts(meeting, 2, devices=devices, name=host)
    cores = available_cores()
    far_first = reversed(cluster.members)
    pairs = zip(far_first, cores, strict=False)
    cluster = replace(cluster, members=tuple(replace(m, cores=(core,)) for m, core in pairs))
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU()) for _ in range(DEPTH)]
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN // 128), nn.Linear(HIDDEN // 128, HIDDEN))
    model.extend(blocks)
    with (
        one_thread(),
        hp.Pipeline(
            model, nn.functional.cross_entropy, _kept()[0], cluster=cluster,
            optimizer=hp.optim.sgd(lr=1e-3), microbatches=4, cuts=[4],
        ) as pipe,
    ):  # fmt: skip
        print(pipe.plan, flush=True)
        remote = hp.Remote("benchmarks.fed:batches", count=STEPS)
        medians_s: dict[str, list[float]] = {"fed": [], "read": []}
        for _ in range(int(rounds)):
            for name, source in (("fed", batches(STEPS)), ("read", remote)):
                steps_s, last_s = [], monotonic()
                for _ in pipe.run(source):
                    now_s = monotonic()
                    steps_s.append(now_s - last_s)
                    last_s = now_s
                medians_s[name].append(statistics.median(steps_s[2:]))
                print(name, " ".join(f"{1e3 * each:.0f}" for each in steps_s), flush=True)
    fed, read = (sorted(medians_s[name]) for name in ("fed", "read"))
    ratios = sorted(one / other for one, other in zip(*medians_s.values(), strict=True))
    print(
        f"fed {1e3 * statistics.median(fed):.0f} ms, read {1e3 * statistics.median(read):.0f} ms "
        f"(paced); ratio {statistics.median(ratios):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f}"
    )


if __name__ == "__main__":
    run = run_host if sys.argv[1:] and sys.argv[1].startswith("h") else main
    run(*sys.argv[1:])
