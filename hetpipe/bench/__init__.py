"""Benchmarks of commands: `hetpipe bench`, `matmul`, `zoo` and `kernels bench`."""
