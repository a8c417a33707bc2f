"""Over several hosts, a mini-batch travels while the one before it computes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from agents import hosts
from crews import Crews
from pipelines import in_one_place, pipeline, user_pipeline
from torch import nn

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError

DEVICE = "numpy:cpu:0"
Pair = tuple[torch.Tensor, torch.Tensor]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def batches(count: int, samples: int = 8) -> list[Pair]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(samples, 6, generator=g), torch.randint(0, 4, (samples,), generator=g))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def two() -> Iterator[Crew]:
    with hosts(f"h0/{DEVICE}", f"h1/{DEVICE}") as cluster, Crew.start(cluster) as crew:
        yield crew


@pytest.fixture
def feeds(two: Crew, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the mini-batches that were sent ahead."""
    numbers: list[int] = []
    feed = two.feed

    def counted(request: Any) -> int:
        numbers.append(feed(request))
        return numbers[-1]

    monkeypatch.setattr(two, "feed", counted)
    return numbers


def opened(crew: Crew, members: Any = "01", **options: Any) -> hp.Pipeline:
    options = {"optimizer": hp.optim.adamw(lr=1e-2), "microbatches": 2, **options}
    return pipeline(
        crew, make_model(), nn.functional.cross_entropy, batches(1)[0], members, "1f1b", **options
    )


def losses(crew: Crew, source: Any, members: Any = "01", **options: Any) -> list[float]:
    with opened(crew, members, **options) as pipe:
        return [result.loss for result in pipe.run(source)]


def test_runs_that_alternate_keep_their_mini_batches(two: Crew, crews: Crews) -> None:
    """Each reads its next mini-batch ahead, and the workers keep the leaves of two."""
    data = batches(9)
    with opened(crews((DEVICE,) * 2, "shared-memory")) as pipe:
        alone = [pipe.step(*data[place]) for place in (0, 3, 6, 1, 4, 7, 2, 5, 8)]
    with opened(two) as pipe:
        runs = [pipe.run(data[begin : begin + 3]) for begin in (0, 3, 6)]
        assert [next(run).loss for _ in range(3) for run in runs] == alone


@pytest.mark.parametrize("members", ["01", "10", [["m0", "m1"]]])
def test_losses_are_those_of_one_host(
    two: Crew, crews: Crews, members: Any, feeds: list[int]
) -> None:
    data = batches(4)
    alone = losses(crews((DEVICE,) * 2, "shared-memory"), data, members)
    assert losses(two, data, members) == alone
    assert len(feeds) == 3
    assert 0 not in feeds


def spread(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output - output.mean(0), y)


def test_a_source_may_use_its_tensors_again(two: Crew) -> None:
    data = batches(4)
    assert losses(two, in_one_place(data)) == losses(two, data)


def test_a_source_may_use_its_tensors_again_before_a_loss_of_the_mini_batch(two: Crew) -> None:
    data = batches(4)
    options: dict[str, Any] = {"loss_over": "mini-batch", "cuts": [1], "microbatches": 2}
    found = []
    for source in (in_one_place(data), data):
        with user_pipeline(two, make_model(), spread, data[0], **options) as pipe:
            found.append([result.loss for result in pipe.run(source)])
    assert found[0] == found[1]


def test_sizes_may_change(two: Crew, crews: Crews) -> None:
    data = [*batches(2), *batches(2, 6), *batches(1)]
    assert losses(two, data) == losses(crews((DEVICE,) * 2, "shared-memory"), data)


def test_an_error_of_the_source_comes_after_the_results_before_it(two: Crew) -> None:
    def source() -> Iterator[Pair]:
        yield from batches(2)
        raise OSError("the disk is gone")

    with opened(two) as pipe:
        results = []
        with pytest.raises(OSError, match="the disk is gone"):
            results += [results.append(result) for result in pipe.run(source())]
        assert len(results) == 2
        assert pipe.steps == 2
        pipe.step(*batches(1)[0])


def test_a_mini_batch_that_is_refused_comes_after_the_results_before_it(two: Crew) -> None:
    good, other = batches(2)
    with opened(two) as pipe:
        run = pipe.run([good, (other[0][:, :2], other[1])])
        next(run)
        with pytest.raises(HetpipeError):
            next(run)
        pipe.step(*good)


def test_an_early_stop_leaves_nothing_behind(two: Crew, crews: Crews) -> None:
    data = batches(4)
    with opened(two) as pipe, opened(crews((DEVICE,) * 2, "shared-memory")) as other:
        for each in (pipe, other):
            assert len([*islice(each.run(iter(data)), 2)]) == 2
        assert pipe.step(*data[3]) == other.step(*data[3])
        assert [r.loss for r in pipe.run(data)] == [r.loss for r in other.run(data)]


def test_one_host_reads_nothing_ahead(crews: Crews) -> None:
    read = []
    source = (read.append(n) or pair for n, pair in enumerate(batches(3)))
    with opened(crews((DEVICE,) * 2, "shared-memory")) as pipe:
        next(pipe.run(source))
    assert read == [0]
