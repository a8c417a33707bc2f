"""The backends that ship with hetpipe. Import them as `hetpipe.backends`."""

if __name__ != "hetpipe.backends":
    raise ImportError("import hetpipe.backends instead: the folder is mapped there when installed")
