"""The OpenCL runtimes of this machine, their devices, and what drivers and tables say of them."""
