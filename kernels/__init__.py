"""OpenCL sources, by family. Read them with `importlib.resources.files("hetpipe.kernels")`.

From a checkout's root Python finds this folder as `kernels` too, the name of a package that
transformers looks for and imports: it holds no code, so that this does no harm.
"""
