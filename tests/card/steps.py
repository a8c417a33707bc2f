"""The steps in order, with their time limits. The sum is longer than the time of a whole run."""

from __future__ import annotations

from dataclasses import dataclass

PARITY_MODELS = ("gpt", "digits", "lstm", "resnet18-small", "llama-small")
RATES = (("gpt2", 8), ("resnet50", 64))
"""Models with the samples of a micro-batch."""
TOTAL_S = 1200.0


@dataclass(frozen=True)
class Step:
    """A function, as `module:function`, that gets a `Setting` and `arguments`."""

    name: str
    function: str
    limit_s: float
    arguments: tuple[str | int | bool, ...] = ()


STEPS = (
    Step("versions", "card.machine:versions", 40),
    Step("devices", "card.machine:devices", 40),
    Step("doctor", "card.machine:doctor", 90),
    Step("links", "card.links:links", 60),
    Step("index", "card.failures:index", 60),
    Step("memory", "card.failures:memory", 40),
    Step("kill", "card.failures:kill", 60),
    *(Step(f"parity-{model}", "card.training:parity", 60, (model,)) for model in PARITY_MODELS),
    Step("pace-two-devices", "card.training:pace", 60, ("host",)),
    Step("pace-one-device", "card.training:pace", 60, ("same",)),
    Step("windows", "card.peers:windows", 60),
    Step("peer-copies", "card.peers:peers", 90),
    Step("groups", "card.sums:groups", 90),
    Step("replicas", "card.sums:replicas", 120),
    *(
        Step(f"rate-{model}-{dtype}", "card.rates:rate", 150, (model, samples, dtype, n == 0))
        for n, (model, samples) in enumerate(RATES)
        for dtype in ("float32", "bfloat16")
    ),
    Step("opencl", "card.opencl:opencl", 90),
    Step("conformance", "card.machine:conformance", 500),
)
