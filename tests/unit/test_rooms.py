"""Imports go downwards, no files or folders form a circle, and files, classes and functions stay
small.

Imports for type checkers count too: readers of a file must also read the modules it imports.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

import networkx
import pytest

from hetpipe._lazy import index_of

ROOT = Path(__file__).parents[2]

FLOORS = (
    "cli", "workbench", "conformance", "papers", "study", "bench", "train", "hf", "pipeline",
    "diagnosis", "profile", "crew", "worker", "wire",
)  # fmt: skip
"""From top to bottom; each room may import all rooms below it, and everything in GROUND.

Commands show the results of papers, studies and benchmarks on pipelines as users make them; the
conformance suite trains with a backend as users would. A pipeline profiles, plans and then
drives a crew; a diagnosis and a profile ask a crew's workers; the crew's controller starts
workers and shares their vocabulary; workers talk over wires, which know neither.
"""
GROUND = {
    "callbacks": {"report"},  # the console of reports
    "capture": {"check", "optim", "sdk"},  # graphs in a backend's operators, and of its updates
    "checkpoint": {"capture"},  # the roles of the stored tensors
    "check": {"sdk"},  # graphs and devices whose numbers it checks
    "cluster": {"check", "cost", "hosts", "sdk"},  # devices are found and tested; boards have costs
    "cost": set(),
    "explain": {"cluster", "cost", "plan", "report", "schedule", "sdk", "simulate"},
    "hosts": set(),
    "loop": {"callbacks", "checkpoint", "report"},  # it knows a pipeline by a protocol
    "optim": set(),
    "plan": {"cluster", "cost", "schedule", "sdk", "simulate"},  # neither torch nor a driver
    "report": {"cost", "schedule", "sdk", "simulate"},
    "schedule": set(),
    "sdk": set(),
    "simulate": {"schedule"},
    "zoo": {"optim"},
}
"""Rooms side by side, each with the rooms among them that it may import."""

DOORS = {
    "hetpipe/__main__.py": "`python -m hetpipe` is the command line",
    "hetpipe/sdk/conformance.py": "authors of backends inherit the suite where all else is",
}
"""Files that import a room above them, and why; no file in their room imports them."""

USERS = {"hetpipe/sdk/skeleton/backend.py": "an author's backend, as an author writes it"}
"""Files that import from packages as users do, and why. Other files import from modules."""

WALLS = (("capture/export", "capture/passes"),)
"""Two folders of a room that must not import each other."""

HOST = "hetpipe.sdk.host."
"""The package that runs backends; it is above the rest of `hetpipe/sdk`, the contract of
backends."""
ABOVE_HOST = ("hetpipe/sdk/__init__.py", "hetpipe/sdk/skeleton/__init__.py")
"""Files of `hetpipe/sdk` that import it: the index, and the writer of new backends."""

SOURCES = ("hetpipe", "backends", "kernels", "boards")
"""Folders of all packages."""

OPENCL_FLOORS = ("user", "bundle", "run", "ops", "gpu", "fpga", "lower", "platform")
"""Rooms of `backends/opencl` from top to bottom; files beside them may import all rooms."""

FILE_LINES, CLASS_LINES, PARAMETERS = 350, 250, 8  # maxima; self is no parameter

EXEMPT = {
    "hetpipe/pipeline/pipeline.py:Pipeline.__init__": "the public constructor",
    "hetpipe/cli/*.py:command": "an option of a command is a parameter of its function",
    "hetpipe/capture/export/decompositions.py:lstm": "aten.lstm's own parameters",
    "hetpipe/sdk/operators/recurrent.py:layer_backward": "an operator's, as its schema has them",
    "backends/pytorch/recurrent.py:*_lstm_backward": "the same operator's",
    "backends/pytorch/norms.py:cudnn_norm_backward": "aten.native_batch_norm_backward's own",
    "backends/pytorch/mask_kernel.py:keep_mask_kernel": "a kernel for Triton, which has no records",
    "hetpipe/sdk/decompositions/convolution.py:convolution*": "aten.convolution's own parameters",
    "hetpipe/sdk/decompositions/images.py:avg_pool_backward": "aten.avg_pool2d_backward's own",
}
"""Functions that may have more parameters, and why."""

PENDING: dict[str, set[str]] = {
    "imports": set(), "indexes": set(), "walls": set(), "host": set(), "circles": set(),
    "folders": set(), "opencl imports": set(), "files": set(), "classes": set(), "functions": set(),
}  # fmt: skip
"""Known violations. The sets may only shrink: the test also fails for an entry that breaks no
rule."""


def sources(root: Path, *folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield each file's path from the root, and its syntax tree."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root).as_posix(), parse_file(path)


@cache
def parse_file(path: Path) -> ast.Module:
    """Return the syntax tree of a file, cached since several rules read it."""
    return ast.parse(path.read_text())


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Yield the modules of hetpipe that a file imports, anywhere in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("hetpipe."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "import absolutely, so that a reader sees the room"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name.startswith("hetpipe.") and not alias.name.startswith("__"):
                    yield name


def allowed_rooms(room: str) -> set[str]:
    """Return the rooms that a room's files may import."""
    if room in GROUND:
        return {room} | GROUND[room]
    return {*FLOORS[FLOORS.index(room) :], *GROUND}


def upward_imports(root: Path) -> Iterator[str]:
    """Yield the imports of rooms above a file's room.

    Files directly in hetpipe/ serve all rooms, so they must import none; `__init__` is the
    index.
    """
    common = {path.stem for path in (root / "hetpipe").glob("*.py")}
    for path, tree in sources(root, "hetpipe"):
        _, *rooms, _ = path.split("/")
        if path != "hetpipe/__init__.py" and path not in DOORS:
            below = allowed_rooms(rooms[0]) if rooms else set()
            reached = {name.split(".")[1] for name in imports_of(tree)}
            yield from (f"{path} imports {room}" for room in sorted(reached - below - common))


def wall_imports(root: Path) -> Iterator[str]:
    """Yield the files of one folder that import the folder behind a wall."""
    for pair in WALLS:
        for here, there in (pair, pair[::-1]):
            package = f"hetpipe.{there.replace('/', '.')}."
            for path, tree in sources(root, f"hetpipe/{here}"):
                if any(f"{name}.".startswith(package) for name in imports_of(tree)):
                    yield f"{path} imports {there}"


def host_imports(root: Path) -> Iterator[str]:
    """Yield the imports of the host in the files of the contract of backends."""
    for path, tree in sources(root, "hetpipe/sdk"):
        if "/host/" not in path and path not in ABOVE_HOST:
            yield from (f"{path} imports {name}" for name in imports_of(tree) if HOST in f"{name}.")


@cache
def import_graph(root: Path) -> networkx.DiGraph[str]:
    """Return the files of all packages, with an edge from each file to every file that it
    imports.

    Lazy indexes are excluded: they import a name only at its first use.
    """
    graph: networkx.DiGraph[str] = networkx.DiGraph()
    for path, tree in sources(root, *SOURCES):
        package = ".".join(Path(path).parent.parts)
        if not index_of(tree, package):
            files = (file_of(root, name) for name in absolute_imports(tree, package))
            graph.add_edges_from((path, file) for file in files if file not in (None, path))
    return graph


def absolute_imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the modules, or names in them, that a file of a package imports; relative imports
    too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def circles(root: Path) -> Iterator[str]:
    """Yield the groups of files that import each other, directly or not."""
    for files in networkx.strongly_connected_components(import_graph(root)):
        if len(files) > 1:
            yield ", ".join(sorted(files))


def folder_circles(root: Path) -> Iterator[str]:
    """Yield the groups of neighbouring folders whose files import each other, directly or not."""
    graph: networkx.DiGraph[str] = networkx.DiGraph()
    for file, imported_file in import_graph(root).edges:
        importer, other = Path(file).parent, Path(imported_file).parent
        common = Path(os.path.commonpath([importer, other]))
        if common not in (importer, other) and file not in DOORS:
            depth = len(common.parts) + 1
            graph.add_edge("/".join(importer.parts[:depth]), "/".join(other.parts[:depth]))
    for folders in networkx.strongly_connected_components(graph):
        if len(folders) > 1:
            yield ", ".join(sorted(folders))


def upward_imports_in_opencl(root: Path) -> Iterator[str]:
    """Yield the OpenCL backend's files that import a higher room, or a file beside the rooms."""
    for pair in import_graph(root).edges:
        if all(file.startswith("backends/opencl/") for file in pair):
            here, there = (file.split("/")[2] for file in pair)
            if here in OPENCL_FLOORS and there not in OPENCL_FLOORS[OPENCL_FLOORS.index(here) :]:
                yield f"{pair[0]} imports {there}"


def imports_through_an_index(root: Path) -> Iterator[str]:
    """Yield the imports within hetpipe from a lazy package instead of the defining module."""
    indexes = {
        (package := ".".join(Path(path).parent.parts)): index_of(tree, package)
        for path, tree in sources(root, "hetpipe")
        if path.endswith("__init__.py")
    }
    for path, tree in sources(root, "hetpipe"):
        if path not in USERS:
            for name in imports_of(tree):
                package, _, last = name.rpartition(".")
                is_module = (root / name.replace(".", "/")).with_suffix(".py").exists()
                if last in indexes.get(package, ()) and not is_module and name not in indexes:
                    yield f"{path} imports {name}"


def file_of(root: Path, name: str) -> str | None:
    """Return the file of a module, of a package, or of a name in one of them."""
    parts = name.split(".")
    if parts[:1] == ["hetpipe"] and parts[1:2] and parts[1] in SOURCES:
        parts = parts[1:]  # the wheel has backends, kernels and boards in hetpipe
    for end in (len(parts), len(parts) - 1):
        for file in ("/".join(parts[:end]) + ".py", "/".join(parts[:end]) + "/__init__.py"):
            if (root / file).exists():
                return file
    return None


def long_files(root: Path) -> Iterator[str]:
    for path, _ in sources(root, "hetpipe", "backends"):
        if len((root / path).read_text().splitlines()) > FILE_LINES:
            yield path


def long_classes(root: Path) -> Iterator[str]:
    for path, tree in sources(root, "hetpipe", "backends"):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and lines(node) > CLASS_LINES:
                yield f"{path}:{node.name}"


def lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def wide_functions(root: Path) -> Iterator[str]:
    for path, tree in sources(root, "hetpipe", "backends"):
        for name, function in functions(tree):
            arguments = function.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            every += [arg for arg in (arguments.vararg, arguments.kwarg) if arg is not None]
            if len([arg for arg in every if arg.arg not in ("self", "cls")]) > PARAMETERS:
                yield f"{path}:{name}"


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield functions and methods with their names, such as `Class.method`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        within = f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix
        yield from functions(node, within)


def is_exempt(function: str) -> bool:
    return any(fnmatch(function, pattern) for pattern in EXEMPT)


RULES: dict[str, Callable[[Path], Iterator[str]]] = {
    "imports": upward_imports,
    "indexes": imports_through_an_index,
    "walls": wall_imports,
    "host": host_imports,
    "circles": circles,
    "folders": folder_circles,
    "opencl imports": upward_imports_in_opencl,
    "files": long_files,
    "classes": long_classes,
    "functions": lambda root: (name for name in wide_functions(root) if not is_exempt(name)),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_rooms_keep_their_rules(rule: str) -> None:
    broken = set(RULES[rule](ROOT))
    assert not broken - PENDING[rule], "breaks the rule: mend it"
    assert not PENDING[rule] - broken, "breaks it no more: take it out of PENDING"


def test_every_room_is_listed() -> None:
    rooms = {path.parent.name for path in (ROOT / "hetpipe").glob("*/__init__.py")}
    assert rooms == {*FLOORS, *GROUND}


@pytest.mark.parametrize("pattern", EXEMPT)
def test_an_exemption_is_needed(pattern: str) -> None:
    assert any(fnmatch(name, pattern) for name in wide_functions(ROOT))


def test_every_violation_is_found(tmp_path: Path) -> None:
    files = {
        "hetpipe/wire/low.py": "if TYPE_CHECKING:\n    from hetpipe.crew.high import Crew\n",
        "hetpipe/crew/high.py": "from hetpipe.wire.low import x\nfrom hetpipe.crew import near\n",
        "hetpipe/crew/near.py": "def late():\n    import hetpipe.crew.high\n",
        "hetpipe/capture/export/deep.py": "from hetpipe.capture.passes.two import x\n",
        "hetpipe/capture/one.py": "from hetpipe.capture.passes.two import x\n",
        "hetpipe/capture/passes/two.py": "from hetpipe.capture import one\n",
        "hetpipe/plan/side.py": "from hetpipe import capture\n",
        "hetpipe/sdk/info.py": "from hetpipe.sdk.host.registry import x\n",
        "hetpipe/sdk/host/registry.py": "from hetpipe.sdk.host import isolation\n",
        "hetpipe/plan/__init__.py": "if TYPE_CHECKING:\n"
        "    from hetpipe.plan.plan import Plan as Plan\n",
        "hetpipe/plan/plan.py": "",
        "hetpipe/plan/user.py": "from hetpipe.plan import Plan, plan\n",
        "hetpipe/errors.py": "from hetpipe.sdk import info\n",
        "hetpipe/cost/long.py": "class Long:\n" + "    x = 1\n" * 350,
        "hetpipe/study/deep/a.py": "from hetpipe.study.flat.b import x\n",
        "hetpipe/study/deep/c.py": "",
        "hetpipe/study/flat/b.py": "",
        "hetpipe/study/flat/d.py": "from hetpipe.study.deep import c\n",
        "backends/native/__init__.py": "",
        "backends/native/device.py": "from .events import Event\nfrom . import library\n",
        "backends/native/events.py": "from hetpipe.backends.native import device\n",
        "backends/native/library.py": "from hetpipe.sdk.info import x\n",
        "backends/wide.py": "class A:\n    def f(self, a, b, c, d, e, f, *g, h, i=0): ...\n",
        "backends/opencl/lower/low.py": "from ..run.high import x\nfrom ..backend import y\n",
        "backends/opencl/run/high.py": "from ..lower import low\n",
        "backends/opencl/backend.py": "from .run.high import x\n",
        "backends/fits.py": "class A:\n    def f(self, a, b, c, d, e, f, *g, h): ...\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert {rule: set(find(tmp_path)) for rule, find in RULES.items()} == {
        "imports": {
            "hetpipe/wire/low.py imports crew",
            "hetpipe/plan/side.py imports capture",
            "hetpipe/errors.py imports sdk",
        },
        "indexes": {"hetpipe/plan/user.py imports hetpipe.plan.Plan"},
        "walls": {"hetpipe/capture/export/deep.py imports capture/passes"},
        "host": {"hetpipe/sdk/info.py imports hetpipe.sdk.host.registry.x"},
        "circles": {
            "hetpipe/crew/high.py, hetpipe/crew/near.py, hetpipe/wire/low.py",
            "hetpipe/capture/one.py, hetpipe/capture/passes/two.py",
            "backends/native/device.py, backends/native/events.py",
            "backends/opencl/backend.py, backends/opencl/lower/low.py, backends/opencl/run/high.py",
        },
        "folders": {
            "hetpipe/crew, hetpipe/wire",
            "hetpipe/study/deep, hetpipe/study/flat",
            "backends/opencl/lower, backends/opencl/run",
        },
        "opencl imports": {
            "backends/opencl/lower/low.py imports run",
            "backends/opencl/lower/low.py imports backend.py",
        },
        "files": {"hetpipe/cost/long.py"},
        "classes": {"hetpipe/cost/long.py:Long"},
        "functions": {"backends/wide.py:A.f"},
    }
