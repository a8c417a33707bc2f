"""Replicas on cards that sum their gradients without the host, on simulated cards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from as_card import AsSummed, CardDevice
from hetpipe.backends.pytorch.options import Options
from models import MLP, batches
from pipelines import pipeline
from reference import check_close, train

import hetpipe as hp
from hetpipe.cluster import Cluster, Link, Member
from hetpipe.crew.crew import Crew
from hetpipe.crew.groups import meeting_places
from hetpipe.errors import BackendError, WorkerError
from hetpipe.profile.links import measure_links
from hetpipe.schedule.action import Action, Op
from hetpipe.sdk import DONE, Device, DeviceInfo, Group
from hetpipe.sdk.host.validation import check_summed, join_group
from hetpipe.worker.group_sums import GroupSums, _sum


class WrongCard(CardDevice):
    """A card that spoils its sum number `wrong`."""

    wrong = 0
    sums = 0

    def all_reduce(self, folder: Path, rank: int, size: int) -> Callable[[torch.Tensor], None]:
        right = super().all_reduce(folder, rank, size)

        def all_reduce(tensor: torch.Tensor) -> None:
            right(tensor)
            tensor.mul_(1.001 if self.sums == self.wrong else 1.0)
            self.sums += 1

        return all_reduce


class WrongLaterCard(WrongCard):
    wrong = 1


class FirstWrong(AsSummed):
    name = "first-wrong"
    device: type[CardDevice] = WrongCard

    def open(self, info: DeviceInfo) -> Any:
        opened: Any = super().open(info)
        opened.__class__ = self.device
        return opened


class LaterWrong(FirstWrong):
    name = "later-wrong"
    device = WrongLaterCard


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def trained(
    backend: type[AsSummed], shares: tuple[float, ...], cuts: tuple[int, ...], steps: int = 3
) -> tuple[list[float], dict[str, torch.Tensor], hp.Pipeline]:
    """Return losses and weights of a training on replicas, each on a card of the backend."""
    hp.register_backend(backend)
    devices = [info.id for info in backend().discover()[: len(shares)]]
    members = tuple(Member(f"m{n}", device) for n, device in enumerate(devices))
    torch.manual_seed(0)
    stages = len(cuts) + 1
    data = batches(steps)
    with (
        Crew.start(Cluster(members, transport="shared-memory")) as crew,
        pipeline(
            crew, MLP(), F.cross_entropy, data[0], [tuple(crew.infos)] * stages,
            "data-parallel" if cuts else "gpipe", 2, shares=[shares] * stages, cuts=cuts,
            in_flight=[2] * stages, optimizer=hp.optim.adam(lr=1e-2),
        ) as pipe,
    ):  # fmt: skip
        return [float(pipe.step(x, y)) for x, y in data], pipe.state_dict(), pipe


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shares", "cuts"), [((1, 1), ()), ((2, 1), (1, 3)), ((3, 2, 1), (2,))], ids=str
)
def test_training_equals_torch(shares: tuple[float, ...], cuts: tuple[int, ...]) -> None:
    losses, state, pipe = trained(AsSummed, shares, cuts)
    torch.manual_seed(0)
    expected = train(MLP(), F.cross_entropy, batches(3), 2, adam)
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    check_close(state, expected.state)
    sums = {f"{n}A" for n in range(len(cuts) + 1)}
    assert sums <= {str(span.action) for span in pipe.timeline.spans}


@pytest.mark.slow
def test_a_wrong_first_sum_is_refused() -> None:
    with pytest.raises(
        WorkerError, match=r"the sum of gradient '.*' over 2 devices is wrong: elem"
    ):
        trained(FirstWrong, (1, 1), ())


@pytest.mark.slow
def test_later_sums_do_not_pass_through_the_host() -> None:
    """The host would not make the error of this device."""
    losses, _, _ = trained(LaterWrong, (1, 1), (), steps=4)
    right, _, _ = trained(AsSummed, (1, 1), (), steps=4)
    assert losses[:2] == pytest.approx(right[:2], rel=1e-6)
    assert losses[2:] != pytest.approx(right[2:], rel=1e-6)


@pytest.mark.slow
def test_sums_between_cards_are_measured() -> None:
    """The simulated cards sum by gloo, so the speeds say nothing about cards."""
    hp.register_backend(AsSummed)
    devices = [info.id for info in AsSummed().discover()[:2]] + ["numpy:cpu:0"]
    members = tuple(Member(f"m{n}", device) for n, device in enumerate(devices))
    with Crew.start(Cluster(members, transport="shared-memory")) as crew:
        links, _ = measure_links(crew)
    speeds = {ends: cost.sum_speed for ends, cost in links.items()}
    cards = {("m0", "m1"), ("m1", "m0")}
    assert all(speeds.pop(ends) not in (0.0, 1.0) for ends in cards)
    assert set(speeds.values()) == {1.0}
    assert links["m0", "m1"].sum_Bps == pytest.approx(links["m1", "m0"].sum_Bps)


def card(number: int, **facts: Any) -> DeviceInfo:
    return replace(AsSummed().discover()[number], **facts)


CARDS = {"m0": card(0), "m1": card(1)}


@pytest.mark.parametrize(
    ("infos", "transport", "links", "meets"),
    [
        (CARDS, "shared-memory", {}, True),
        (CARDS, "local", {}, False),
        (CARDS, "shared-memory", {frozenset(CARDS): Link(1e-3, None)}, False),
        ({**CARDS, "m1": card(1, backend="other")}, "shared-memory", {}, False),
        ({**CARDS, "m1": card(1, memory_domain="card:0")}, "shared-memory", {}, False),
        ({**CARDS, "m1": card(1, kind="cpu")}, "shared-memory", {}, False),
    ],
)
def test_who_may_meet(
    infos: dict[str, DeviceInfo], transport: str, links: Any, meets: bool
) -> None:
    members = tuple(Member(name, info.id) for name, info in infos.items())
    cluster = Cluster(members, links, transport=transport)
    with meeting_places(cluster, [("m0",), ("m0", "m1")], infos) as places:
        folders = [Path(folder) for folder in places.values()]
        assert list(places) == [1] * meets
        assert all(folder.is_dir() and not any(folder.iterdir()) for folder in folders)
    assert not any(folder.exists() for folder in folders)


def test_another_order_of_additions_is_allowed() -> None:
    generator = np.random.default_rng(1)
    terms = [generator.normal(size=4000).astype(np.float32) * 10.0**n for n in range(4)]
    total, allowed = _sum(terms)
    backwards, _ = _sum(terms[::-1])
    assert np.any(total != backwards)
    assert np.all(np.abs(total - backwards) <= allowed)
    assert np.all(allowed < 1e-2)


def test_sums_that_are_not_finite_are_equal_if_their_terms_are() -> None:
    found = [np.array([np.inf, np.nan, 3e38, 1.0], np.float32)] * 2
    total, allowed = _sum(found)
    assert np.isinf(total[2])
    assert np.isinf(allowed[2])


def test_the_first_sum_of_each_part_until_it_is_compared() -> None:
    sums = GroupSums({1: _Silent()})
    first, second = (Action(1, Op.ALL_REDUCE, number) for number in range(2))
    assert sums.is_on_host(Action(0, Op.ALL_REDUCE, 0))
    assert [sums.is_on_host(action) for action in (first, second, first)] == [True, False, True]
    stage: Any = SimpleNamespace(store=SimpleNamespace(sum_gradients=lambda *_: None))
    sums.sum(first, stage, (), 1.0, ())
    assert not sums.is_on_host(first)


class _Silent(Group):
    def sum(self, terms: Any, scale: float) -> Any:
        return terms, DONE


def test_wrong_answers_are_named(tmp_path: Path) -> None:
    device = SimpleNamespace(info=CARDS["m0"], join_group=lambda folder, rank, size: 7)
    wrong: Device = device  # type: ignore[assignment]
    with pytest.raises(
        BackendError, match=r"join_group of device .* returns 7, not a Group or None"
    ):
        join_group(wrong, tmp_path, 0, 2)
    with pytest.raises(BackendError, match=r"the group's sum of .* 0 outputs, not 1"):
        check_summed(wrong, ([], DONE), 1)
    with pytest.raises(BackendError, match=r"returns 3, not \(outputs, event\)"):
        check_summed(wrong, 3, 1)


def test_only_cuda_and_rocm_sum_by_nccl() -> None:
    with pytest.raises(BackendError, match="nccl needs CUDA or ROCm"):
        Options(nccl=True).check("pytorch:xpu:0", "xpu")
    if not hasattr(torch._C, "_nccl_all_reduce"):
        with pytest.raises(BackendError, match="built without NCCL"):
            Options(nccl=True).check("pytorch:cuda:0", "cuda")
