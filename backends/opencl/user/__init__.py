"""Kernels of a user's own: specifications, and a runner that tests one kernel."""
