"""The OpenCL runtimes of this machine, and what is known about them."""
