"""Kernels that users write: their specifications, and a runner that tests a single kernel."""
