"""Plan: who does what, when, and what it should cost. Frozen, JSON both ways, prints as a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StagePlan:
    """Layers lo..hi (hi excluded) on the devices of a stage's replicas."""

    lo: int
    hi: int
    devices: tuple[str, ...]
    in_flight: int  # forwards that may be waiting for their backward (K_n)
    forward_s: float  # one micro-batch, predicted
    backward_s: float
    update_s: float
    memory_nbytes: int  # predicted peak
    capacity_nbytes: int


@dataclass(frozen=True)
class Plan:
    """A pipeline. Times are predicted from `label`led costs (measured, emulated or modelled)."""

    model: str
    layers: tuple[str, ...]  # names
    stages: tuple[StagePlan, ...]
    schedule: str
    mini_batch: int
    microbatches: int
    step_s: float  # predicted, one mini-batch
    cut_nbytes: tuple[int, ...]  # one per cut
    label: str
    origin: str  # which planner made it: balanced | even | speed-blind | user
    notes: tuple[str, ...] = ()
