"""Boards, one TOML each. Read them with `importlib.resources.files("hetpipe.boards")`."""

if __name__ != "hetpipe.boards":
    raise ImportError("import hetpipe.boards instead: the folder is mapped there when installed")
