"""The OpenCL runtimes of this machine, and the kernel family and tuning of each device."""
