"""The door to the conformance suite, `hetpipe.conformance`, from where authors of backends work.

The suite trains pipelines, so it stands above them; nothing below imports this file.
"""

from hetpipe.conformance.suite import BackendSuite

__all__ = ["BackendSuite"]
