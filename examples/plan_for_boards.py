"""Plan for a cluster that is only described: two V100 cards and an FPGA board.

All printed figures are modelled from data sheets. No device is opened.
"""

import tempfile
from pathlib import Path

import hetpipe as hp
from hetpipe.study import of_model, plan, simulate

CLUSTER = """
[[device]]
board = "v100-pcie-16"
count = 2
server = "gpus"

[[device]]
board = "vcu129"

[[server]]
name = "gpus"
inside = { shape = "point-to-point", bandwidth = "12 GB/s", latency = "5 us" }

[network]
shape = "switch"
bandwidth = "10 Gb/s"
latency = "20 us"
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lab.toml")
        path.write_text(CLUSTER)
        cluster = hp.Cluster.load(path)
    subject = of_model("alexnet").subject
    chosen, costs = plan(subject, cluster, planner="exact")
    print(chosen)
    waits = simulate(chosen, costs).outcome.bubble
    for member, idle in zip(chosen.all_devices, waits, strict=True):
        print(member, f"waits {idle:.0%} of the step (modelled)")


if __name__ == "__main__":
    main()
