"""Pipelines with the card: losses against unpartitioned torch, and predicted against measured."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from card.setting import HOST, Setting, Wrong

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.pipeline.pipeline import Pipeline
    from hetpipe.zoo.workload import Workload

MINI_BATCH, MICROBATCHES = 16, 4
SAMPLES = MINI_BATCH // MICROBATCHES
PACE_MODEL = "gpt"


def parity(setting: Setting, model: str) -> None:
    """Compare losses and gradients with unpartitioned torch's on the CPU, in float32.

    The card trains alone, then as the second stage of a pipeline whose first stage is on the CPU.
    """
    import torch

    from hetpipe.zoo.load import load_workload

    torch.set_num_threads(1)  # as in hetpipe's commands: idle threads would spin on workers' cores
    workload = load_workload(model)
    captured = captured_of(workload)
    found = {
        "alone": _compared(setting, workload, captured, [setting.device]),
        "pipeline": _compared(setting, workload, captured, [HOST, setting.device]),
    }
    unequal = [f"{name} {each}" for name, each in found.items() if not each.equal]
    if unequal:
        raise Wrong("; ".join(unequal))


def captured_of(workload: Workload) -> Captured:
    """Return the workload's model, captured for `SAMPLES` in a micro-batch."""
    from hetpipe.capture.captured import Captured

    example = next(workload.batches(MINI_BATCH, 0))
    return Captured(workload.model, workload.loss_fn, example, samples=SAMPLES)


def _compared(setting: Setting, workload: Workload, captured: Captured, devices: list[str]) -> Any:
    """Train on one stage per device, keep the losses, and return the `Comparison` with torch."""
    from hetpipe.bench.inturn import even_cuts
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.train.training import open_pipeline

    cuts = even_cuts(captured, SAMPLES, len(devices)) if len(devices) > 1 else ()
    with open_pipeline(
        workload, Cluster.local(devices=devices), mini_batch=MINI_BATCH,
        captured=captured, cuts=cuts, microbatches=MICROBATCHES, schedule="1f1b",
    ) as pipe:  # fmt: skip
        return compared(setting, "pipeline" if cuts else "alone", workload, pipe)


def compared(setting: Setting, name: str, workload: Workload, pipe: Pipeline) -> Any:
    """Train a new pipeline, keep the losses, and return the `Comparison` with torch."""
    from hetpipe.train.eager import compared_sizes
    from hetpipe.train.training import compare, compare_gradients, torch_losses, train

    steps = 3 if setting.quick else 10
    gradient = compare_gradients(workload, pipe, 0)
    sizes = compared_sizes(workload.model, pipe.plan.mini_batch, pipe.plan.microbatches)
    expected = torch_losses(workload, sizes, steps, 0)
    taken = list(train(workload, pipe, steps, seed=0, expected=expected))
    result = compare(workload, pipe.plan, taken, 0, gradient)
    assert result is not None
    setting.keep(
        **{
            name: {
                "devices": [*pipe.plan.all_devices],
                "losses": [step.loss for step in taken],
                "torch_losses": list(expected),
                "difference": result.difference,
                "allowed": result.rounding,
                "gradient_error": gradient.error,
                "gradient_allowed": gradient.allowed,
                "step_s": median(step.time_s for step in taken),
            }
        }
    )
    return result


def pace(setting: Setting, beside: str) -> None:
    """Compare predicted and measured steps of two workers, on CPU and card or both on the card.

    Both a pipeline with a given cut and the planner's own plan run.
    """
    from hetpipe.bench.inturn import even_cuts
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.profile.cache import fresh_costs
    from hetpipe.zoo.load import load_workload

    workload = load_workload("gpt2-small" if setting.quick else PACE_MODEL)
    captured = captured_of(workload)
    first = HOST if beside == "host" else setting.device
    cluster = Cluster.local(devices=[first, setting.device])
    cuts = even_cuts(captured, SAMPLES, 2)
    with fresh_costs():
        _keep_pace(setting, "cut", workload, cluster, captured, cuts=cuts, schedule="1f1b")
        _keep_pace(setting, "planned", workload, cluster, captured)


def _keep_pace(
    setting: Setting,
    name: str,
    workload: Workload,
    cluster: Any,
    captured: Captured,
    **options: Any,
) -> None:
    from hetpipe.cli.pace import pace_of
    from hetpipe.profile.clock import spread_of
    from hetpipe.train.training import open_pipeline, train

    steps = 10 if setting.quick else 40
    options |= {"mini_batch": MINI_BATCH, "captured": captured}
    with open_pipeline(workload, cluster, **options) as pipe:
        taken = list(train(workload, pipe, steps, seed=0))
        times_s = [step.time_s for step in taken[steps // 2 :]]
        pace = pace_of(pipe, median(times_s)).to_json()
        setting.keep(
            **{
                name: {
                    "plan": str(pipe.plan),
                    "step_s": pace["step_s"],
                    "spread": spread_of(times_s),
                    "predicted_step_s": pace["predicted_step_s"],
                    "corrected_step_s": pace["corrected_step_s"],
                    "peak_nbytes": [*pipe.peak_nbytes],
                    "device_nbytes": dict(pipe.device_nbytes),
                }
            }
        )
