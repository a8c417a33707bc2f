"""The cost and the gain of surviving the loss of devices.

    python -m benchmarks.survived cost MODEL [--minutes 5]
    python -m benchmarks.survived recovery MODEL [--losses 20] [--seed 0]
    python -m benchmarks.survived trace [--minutes 30] [--seed 0]

MODEL is `digits`, `gpt` or `large`, which has about 100 million parameters. `cost` compares steps
and memory with survive="auto" and without. `recovery` kills workers at random moments, and gives
the seconds of each phase until the next result; then it compares the steps with steps of a new
pipeline on the remaining devices. `trace` lets paced devices fail and come back at random, compares
the weights with an undisturbed training, and the mini-batches per second with its rate and with a
modelled training that restarts from checkpoints. Run it with PYTHONPATH=tests.
"""

from __future__ import annotations

import argparse
from importlib import import_module


def main() -> None:
    """Run the command that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.survived", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    models = ("digits", "gpt", "large")
    cost = commands.add_parser("cost")
    cost.add_argument("model", choices=models)
    cost.add_argument("--minutes", type=float, default=5.0)
    recovery = commands.add_parser("recovery")
    recovery.add_argument("model", choices=models)
    recovery.add_argument("--losses", type=int, default=20)
    recovery.add_argument("--seed", type=int, default=0)
    trace = commands.add_parser("trace")
    trace.add_argument("--minutes", type=float, default=30.0)
    trace.add_argument("--seed", type=int, default=0)
    trace.add_argument("--between-s", type=float, default=180.0, help="mean time between losses")
    trace.add_argument("--repair-s", type=float, default=60.0, help="mean time of a repair")
    chosen = vars(parser.parse_args())
    # Workers import the module of a command by its name, which `__main__` does not have.
    module = import_module(f"benchmarks.survival{chosen.pop('command')}")
    module.main(**chosen)


if __name__ == "__main__":
    main()
