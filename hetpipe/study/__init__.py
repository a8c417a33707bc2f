"""Studies: plans for clusters that are attached or only described, and what they would gain.

The functions have the names of the commands: `plan`, `simulate`, `compare`, `whatif`, `capacity`,
`coverage`. None of them needs the devices, unless it is asked to measure.
"""

from hetpipe._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Comparison": "comparison",
        "Subject": "subject",
        "capacity": "largest",
        "compare": "comparison",
        "coverage": "lacking",
        "of_file": "models",
        "of_model": "models",
        "plan": "planning",
        "simulate": "simulation",
        "whatif": "changes",
    },
)
