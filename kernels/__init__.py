"""OpenCL sources, by family. Read them with `importlib.resources.files("hetpipe.kernels")`."""

if __name__ != "hetpipe.kernels":
    raise ImportError("import hetpipe.kernels instead: the folder is mapped there when installed")
