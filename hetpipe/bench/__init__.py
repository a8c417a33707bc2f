"""Benchmarks: the rows of `hetpipe bench`, kernels, training steps, planners and predictions."""
