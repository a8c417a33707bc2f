"""Measures the links of several hosts twice, for tests: `measured.py MEET COUNT RESULT`.

The result has the media of each link, and how often stages were loaded by each of two profiles.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import hetpipe as hp
from hetpipe.capture.captured import Captured
from hetpipe.crew.crew import Crew
from hetpipe.profile.measure import profile


def main(meet: str, count: str, result: str) -> None:
    torch.manual_seed(0)
    example = torch.randn(8, 6), torch.randint(0, 4, (8,))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    captured = Captured(model, nn.functional.cross_entropy, example)
    devices = [f"h{n}/numpy:cpu:0" for n in range(int(count))]
    cluster = hp.Cluster.hosts(meet, int(count), devices=[*devices, devices[0]], name="h0")
    found = []
    with Crew.start(cluster) as crew:
        for _ in range(2):
            before = crew.load_count
            table = profile(captured, crew, hp.optim.sgd(0.1), [4], half_s=0.01)[4]
            links = [[*ends, link.label, link.media] for ends, link in table.links.items()]
            found.append({"links": links, "loads": crew.load_count - before})
            print(table.links)
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
