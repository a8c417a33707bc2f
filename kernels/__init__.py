"""OpenCL sources, by family. Read them with `importlib.resources.files("hetpipe.kernels")`.

In a checkout's root, Python also finds this folder as `kernels`. The library transformers imports a
package of this name if there is one; this package has no code, so the import does no harm.
"""
