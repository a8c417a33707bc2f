"""Trainings for tests on several hosts: the same script as on one host, by torchrun.

    torchrun ... hosted.py TASK RESULT

The task names cases; the result has the losses of each case.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from captures import shared
from plans import unpriced

import hetpipe as hp
from hetpipe.cluster import Cluster, Member
from hetpipe.crew.crew import Crew
from hetpipe.zoo.load import load_workload

DEVICE = "pytorch:cpu:0"
STEPS = 3


def tiny_bert() -> torch.nn.Module:
    """Return a BERT of Hugging Face with dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=4, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=8, num_labels=2,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def mean_logits(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.logits, labels)


def problem(name: str, samples: int) -> tuple[Any, Any, list[tuple[Any, Any]]]:
    """Return a model, a loss and a few mini-batches, the same at each call."""
    torch.manual_seed(0)
    if name == "bert":  # with dropout
        tokens = torch.randint(1, 50, (STEPS, samples, 8))
        labels = torch.randint(2, (STEPS, samples))
        return tiny_bert().train(), mean_logits, list(zip(tokens, labels, strict=True))
    workload = load_workload(name)
    batches = list(islice(workload.batches(samples, 0), STEPS))
    return workload.model, workload.loss_fn, batches


def run_case(crew: Crew, case: Mapping[str, Any]) -> dict[str, Any]:
    """Train, and return the losses and what else the case asks for."""
    names = [[f"m{n}" for n in stage] for stage in case["members"]]
    model, loss_fn, batches = problem(case["model"], case.get("samples", 12))
    schedule = case.get("schedule", "1f1b")
    shares = [tuple(stage) for stage in case["shares"]] if "shares" in case else None
    captured = shared(model, loss_fn, batches[0])
    plan, costs = unpriced(
        captured, names, schedule, case.get("samples", 12), case.get("microbatches", 4),
        shares=shares, weights="stash" if schedule == "pipedream" else "flush",
    )  # fmt: skip
    settings = {
        "cluster": crew.cluster, "crew": crew, "plan": plan, "costs": costs, "captured": captured,
        "optimizer": hp.optim.adamw(lr=1e-3), "clip_norm": case.get("clip_norm"), "seed": 7,
    }  # fmt: skip
    first, last = case.get("steps", (0, STEPS))
    begin_s = time.monotonic()
    resume, save = case.get("resume"), case.get("save")
    opened = (
        hp.Pipeline.load(resume, model, loss_fn, batches[0], **settings)
        if resume
        else hp.Pipeline(model, loss_fn, batches[0], **settings)
    )
    with opened as pipe:
        start_s = time.monotonic()
        losses = [result.loss for result in pipe.run(batches[first:last])]
        run_s = time.monotonic() - start_s
        if save:
            pipe.save(save)
        evaluated = pipe.evaluate(batches[:1]).loss
    return {
        "losses": losses,
        "evaluated": evaluated,
        "open_s": start_s - begin_s,
        "step_s": run_s / max(len(losses), 1),
    }


def run_cases(cluster: Cluster, cases: Mapping[str, Any]) -> dict[str, Any]:
    """Run each case by name, on one crew. The members get the names m0, m1, ..."""
    members = tuple(replace(member, id=f"m{n}") for n, member in enumerate(cluster.members))
    with Crew.start(replace(cluster, members=members)) as crew:
        return {name: run_case(crew, case) for name, case in cases.items()}


def on_one_host(hosts: int, cases: Mapping[str, Any], cores: Sequence[int]) -> dict[str, Any]:
    """Run the cases on this host, with as many members as `hosts` have together."""
    members = tuple(Member(f"m{n}", DEVICE, tuple(cores)) for n in range(hosts))
    return run_cases(Cluster(members), cases)


def main() -> None:
    task, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    cluster = hp.Cluster.hosts(transport=task.get("transport", "auto"), devices=task["devices"])
    result.write_text(json.dumps(run_cases(cluster, task["cases"])))


if __name__ == "__main__":
    main()
