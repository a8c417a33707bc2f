"""The conformance suite: by it the author of a backend proves it."""
