"""The conformance suite of hetpipe, for this backend: run `pytest`."""

from hetpipe.sdk.conformance import BackendSuite


class TestSkeleton(BackendSuite):
    backend = "skeleton"
    level = "training"
