"""A pipeline trains exactly as torch does without one.

The losses of 20 steps agree to 1e-4 relative, every gradient of the first step to 1e-4 of its norm,
and every weight after the last step to 1e-3 of its norm. Gradients whose true value is zero (a bias
before batch norm) are compared with an absolute floor. The models are smooth except for one ReLU:
if the last bit of a sum decides which gradients flow, no two correct trainings agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from models import CASES
from parity import find_opencl
from plans import unpriced
from reference import train

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member
from hetpipe.crew.crew import Crew

pytestmark = pytest.mark.slow

STEPS = 20
MICROBATCHES = 4
TOLERANCE = 1e-4
WEIGHT_TOLERANCE = 1e-3
LEARNING_RATE = 0.05
GRADIENT_FLOOR = 1e-6  # absolute limit, for gradients whose true value is zero

# Every pair of (first stage's backend, schedule, transport) occurs; later stages mix the others in.
ROWS = [
    ("pytorch:cpu:0", "numpy:cpu:0", "opencl:", "gpipe", "local"),
    ("pytorch:cpu:0", "opencl:", "numpy:cpu:0", "1f1b", "shared-memory"),
    ("pytorch:cpu:0", "pytorch:cpu:0", "opencl:", "gpipe", "distributed"),
    ("opencl:", "pytorch:cpu:0", "numpy:cpu:0", "1f1b", "local"),
    ("opencl:", "opencl:", "pytorch:cpu:0", "gpipe", "shared-memory"),
    ("opencl:", "numpy:cpu:0", "pytorch:cpu:0", "1f1b", "distributed"),
    ("numpy:cpu:0", "pytorch:cpu:0", "opencl:", "gpipe", "local"),
    ("numpy:cpu:0", "opencl:", "pytorch:cpu:0", "1f1b", "shared-memory"),
    ("numpy:cpu:0", "numpy:cpu:0", "numpy:cpu:0", "gpipe", "distributed"),
]


@pytest.fixture(scope="module", params=ROWS, ids=lambda row: "-".join(row).replace(":cpu:0", ""))
def crew(request: pytest.FixtureRequest) -> Iterator[tuple[Crew, str]]:
    *devices, schedule, transport = request.param
    opencl = find_opencl()
    if opencl is None and "opencl:" in devices:
        pytest.skip("no OpenCL device: install the extra `emulators` or pocl-opencl-icd")
    members = tuple(
        Member(f"{'abc'[index]}", opencl if device == "opencl:" and opencl else device)
        for index, device in enumerate(devices)
    )
    with Crew.start(Cluster(members=members, transport=transport)) as started:
        yield started, schedule


def make_model(name: str) -> torch.nn.Module:
    """Return the model with the same initial weights every time."""
    torch.manual_seed(1)
    return CASES[name].model()


@cache
def capture(name: str) -> Captured:
    """Return the capture, which is made once for all rows."""
    case = CASES[name]
    return Captured(make_model(name), case.loss_fn, case.batch(torch.Generator().manual_seed(2)))


@pytest.mark.wide
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", list(CASES))
def test_pipeline_equals_unpartitioned(crew: tuple[Crew, str], name: str, stages: int) -> None:
    started, schedule = crew
    case = CASES[name]
    model = make_model(name)
    generator = torch.Generator().manual_seed(2)
    batches = [case.batch(generator) for _ in range(STEPS)]

    expected, gradients, weights, _ = train(
        model, case.loss_fn, batches, MICROBATCHES,
        lambda p: torch.optim.SGD(p, lr=LEARNING_RATE, momentum=0.9),
    )  # fmt: skip

    captured = capture(name)
    plan, costs = unpriced(
        captured, list(started.infos)[:stages], schedule, case.mini_batch, MICROBATCHES
    )
    with hp.Pipeline(
        model,
        case.loss_fn,
        batches[0],
        cluster=started.cluster,
        crew=started,
        optimizer=hp.optim.sgd(lr=LEARNING_RATE, momentum=0.9),
        captured=captured,
        plan=plan,
        costs=costs,
    ) as pipe:
        _, found = pipe.gradients(*batches[0])
        assert found.keys() == gradients.keys()
        for key, gradient in gradients.items():
            error = (found[key] - gradient).norm().item()
            assert error <= TOLERANCE * gradient.norm().item() + GRADIENT_FLOOR, (key, error)
        losses = [pipe.step(x, y) for x, y in batches]
        assert losses == pytest.approx(expected, rel=TOLERANCE)
        state = pipe.state_dict()
    assert state.keys() == weights.keys()
    for key, value in weights.items():
        error = (state[key] - value).double().norm().item()
        assert error <= WEIGHT_TOLERANCE * value.double().norm().item() + GRADIENT_FLOOR, (
            key,
            error,
        )
