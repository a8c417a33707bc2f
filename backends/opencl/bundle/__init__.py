"""Kernels as sources for a vendor's compiler, and the binaries that the compiler made."""
