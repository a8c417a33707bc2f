"""The conformance suite, `hetpipe.conformance`, for authors of backends.

The suite trains pipelines, so its code is not in `hetpipe.sdk`, which trains nothing.
"""

from hetpipe.conformance.suite import BackendSuite

__all__ = ["BackendSuite"]
