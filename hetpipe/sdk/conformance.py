"""The conformance suite, `hetpipe.conformance`, for authors of backends.

The suite trains pipelines, so it belongs to a higher room; no lower room imports this file.
"""

from hetpipe.conformance.suite import BackendSuite

__all__ = ["BackendSuite"]
