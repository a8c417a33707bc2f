"""The zoo's models: their sizes, and fitting data for every name."""

from __future__ import annotations

import pytest
import torch

from hetpipe.capture.export.example import call
from hetpipe.zoo.inception import GoogLeNet, InceptionV3
from hetpipe.zoo.load import FAMILIES, SMALL, ZOO, load_workload, zoo_names
from hetpipe.zoo.resnet import ResNet

PARAMETERS = {
    # Models as in torchvision and transformers.
    "alexnet": 61_100_840, "vgg11": 132_863_336, "vgg16": 138_357_544, "vgg19": 143_667_240,
    "resnet18": 11_689_512, "resnet50": 25_557_032, "densenet121": 7_978_856,
    "mobilenet-v3": 5_483_032, "vit": 86_567_656, "swin": 28_288_354, "convnext": 28_589_128,
    "gpt2": 124_439_808, "llama": 1_100_048_384, "t5": 222_903_552,
}  # fmt: skip
MILLIONS = {"gnmt16": (291, 0.06), "bert48": (640, 0.01), "xlnet36": (500, 0.05),
            "amoebanet36": (933, 0.01)}  # fmt: skip
"""DAPPLE's table 1, with the allowed difference: its vocabularies are unknown."""


def size(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_sizes(name: str) -> None:
    with torch.device("meta"):
        assert size(load_workload(name).model) == PARAMETERS[name]


@pytest.mark.parametrize("name", MILLIONS)
def test_sizes_in_papers(name: str) -> None:
    millions, share = MILLIONS[name]
    with torch.device("meta"):
        assert size(load_workload(name).model) == pytest.approx(1e6 * millions, rel=share)


def test_published_sizes_of_a_thousand_classes() -> None:
    with torch.device("meta"):
        assert size(InceptionV3(1000)) == 27_161_264
        assert size(GoogLeNet(1000)) == 13_004_888
        assert size(ResNet((3, 4, 23, 3))) == 44_549_160


def test_every_published_model_has_a_small_one() -> None:
    published, small = zoo_names(published=True), zoo_names(published=False)
    assert published == [name for names in FAMILIES.values() for name in names]
    assert {*published, *small} == set(ZOO)
    assert {name + SMALL for name in published} <= set(small)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name + SMALL for names in FAMILIES.values() for name in names])
def test_small_models_run_on_their_data(name: str) -> None:
    workload = load_workload(name)
    assert workload.name == name
    assert size(workload.model) < 2e6
    x, y = next(workload.batches(2, 0))
    again, _ = next(workload.batches(2, 0))
    torch.testing.assert_close(x, again, rtol=0, atol=0)
    loss = workload.loss_fn(call(workload.model, x), y)
    assert loss.ndim == 0
    assert loss.isfinite()
