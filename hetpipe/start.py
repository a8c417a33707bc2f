"""The first file that a process of ours runs: `python start.py MODULE ARGUMENTS...`.

The interpreter puts a folder first on its path, of this file or the current one, where any file may
have the name of a module of Python's. So nothing is imported before the path is the one that
`hetpipe.process` has put in order; only then does MODULE run, as `python -m MODULE` would.
"""

import os  # `os` and `sys` are loaded before any code of ours
import sys

sys.path[:] = os.environ.pop("HETPIPE_PATH").split("\n")
if "HETPIPE_PYTHONPATH" in os.environ:  # for the programs that the module itself starts
    os.environ["PYTHONPATH"] = os.environ.pop("HETPIPE_PYTHONPATH")


def main() -> None:
    """Load the `hetpipe` that lies here, wherever another one lies, and run MODULE."""
    import runpy
    from importlib.util import module_from_spec, spec_from_file_location

    file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__init__.py")
    spec = spec_from_file_location("hetpipe", file)
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules["hetpipe"] = module_from_spec(spec)
    spec.loader.exec_module(package)
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
