"""The conformance suite, `hetpipe.conformance`, for authors of backends.

The suite trains pipelines, so it is a layer above them; no lower layer imports this file.
"""

from hetpipe.conformance.suite import BackendSuite

__all__ = ["BackendSuite"]
