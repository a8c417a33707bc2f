"""The first file of a process that hetpipe starts: `python start.py MODULE ARGUMENTS...`.

The interpreter puts the folder of this file, or the current folder, first on its import path; a
file there may have the name of one of Python's modules. So this file first sets the path from
`hetpipe.process`, and imports other modules only afterwards. Then it runs MODULE, like
`python -m MODULE`.
"""

import os  # Python itself loads `os` and `sys` before this file
import sys

sys.path[:] = os.environ.pop("HETPIPE_PATH").split("\n")
if "HETPIPE_PYTHONPATH" in os.environ:  # for programs that MODULE starts
    os.environ["PYTHONPATH"] = os.environ.pop("HETPIPE_PYTHONPATH")


def main() -> None:
    """Load the `hetpipe` beside this file, even if the path has another one, and run MODULE."""
    import runpy
    from importlib.util import module_from_spec, spec_from_file_location

    file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__init__.py")
    spec = spec_from_file_location("hetpipe", file)
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules["hetpipe"] = module_from_spec(spec)
    spec.loader.exec_module(package)
    if parent := os.environ.pop("HETPIPE_PARENT", ""):
        from hetpipe.process import end_with

        end_with(int(parent))
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
