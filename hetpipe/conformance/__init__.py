"""The conformance suite: by it the author of a backend proves it."""

from hetpipe._lazy import lazy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "BackendSuite": "suite",
        "Check": "check",
        "Level": "check",
        "Result": "run",
        "run_suite": "run",
    },
)
