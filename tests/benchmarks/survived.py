"""What surviving the loss of devices costs, and what it gives.

    python -m benchmarks.survived cost MODEL [--minutes 5]
    python -m benchmarks.survived recovery MODEL [--losses 20] [--seed 0]

MODEL is `digits`, `gpt` or `large`, which has about 100 million parameters. `cost` compares steps
and memory with survive="auto" and without. `recovery` kills workers at random moments, and gives
the seconds of each phase until the next result; then it compares the steps with steps of a new
pipeline on the remaining devices. Run it with PYTHONPATH=tests.
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
    chosen = vars(parser.parse_args())
    # Workers import the module of a command by its name, which `__main__` does not have.
    module = import_module(f"benchmarks.survival{chosen.pop('command')}")
    module.main(**chosen)


if __name__ == "__main__":
    main()
