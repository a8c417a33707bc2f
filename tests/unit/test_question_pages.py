"""The contents answer questions with links that exist; the tables about environment variables,
caches and schedules equal the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetpipe.caches import KINDS
from hetpipe.schedule import generate
from hetpipe.schedule.action import Op
from hetpipe.schedule.rule import rule_of
from hetpipe.simulate import StageTimes, simulate

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
THROUGH_LIBRARIES = {"XDG_CACHE_HOME", "TMPDIR"}  # platformdirs and tempfile read them
FIRST_ARGUMENT = {"path", "paths", "seconds", "_user_set", "getenv"}
CACHES = {"cache_folder", "optional_folder", "Entries"}
PASSES_ON = {  # functions that read the variable that their caller names
    "hetpipe/environment.py": {"seconds", "paths", "path"},
    "hetpipe/caches.py": {"warn_once"},
    "backends/opencl/platform/runtimes.py": {"_user_set", "_set"},
}


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def anchors(name: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page(name), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def first_cells(text: str) -> list[str]:
    """Return the names in backticks in the first column of the tables of a text."""
    cells = re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in ("hetpipe", "backends"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            place = str(path.relative_to(ROOT))
            yield place, ast.parse(path.read_text(encoding="utf-8"))


def constants_of(tree: ast.Module) -> dict[str, set[str]]:
    """Return the texts that a file assigns to names, except those that no variable can have."""
    return {
        _name(node.targets[0]): {str(node.value.value)}
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and re.fullmatch("[A-Z][A-Z0-9_]+", str(node.value.value))
    }


class Reads(ast.NodeVisitor):
    """Collects the variables that a file reads, and the first arguments of its caches."""

    def __init__(self, place: str, constants: dict[str, set[str]]) -> None:
        self.place, self.constants = place, constants
        self.found: set[str] = set()
        self.caches: set[str] = set()
        self._function = ""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self._function = self._function, node.name
        self.generic_visit(node)
        self._function = outer

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else _name(node.func)
        owner = _name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        arguments = node.args
        owners = {"environ", "environment"} if name in {"get", "pop"} else {"", "environment", "os"}
        if name in {"get", "pop", *FIRST_ARGUMENT} and owner in owners and arguments:
            self._note(arguments[0])
        kind = getattr(arguments[0], "value", None) if arguments else None
        if name in CACHES and isinstance(kind, str):
            self.caches.add(kind.partition("/")[0])

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        if _name(node.value) == "environ" and isinstance(node.ctx, ast.Load):
            self._note(node.slice)

    def visit_Compare(self, node: ast.Compare) -> None:
        self.generic_visit(node)
        if _name(node.comparators[0]) == "environ":
            self._note(node.left)

    def _note(self, node: ast.expr) -> None:
        """Add the variable that an expression names; fail if no constant of the code names it."""
        if isinstance(node, ast.Constant):
            self.found.add(str(node.value))
        elif values := self.constants.get(_name(node)):
            self.found |= values
        elif self._function not in PASSES_ON.get(self.place, ()):
            pytest.fail(f"{self.place}:{node.lineno} reads {ast.unparse(node)}: which variable?")


def _name(node: ast.expr) -> str:
    return getattr(node, "id", "") or getattr(node, "attr", "")


@pytest.fixture(scope="module")
def reads() -> list[Reads]:
    trees = list(sources())
    everywhere: dict[str, set[str]] = {}
    for _, tree in trees:
        for name, values in constants_of(tree).items():
            everywhere.setdefault(name, set()).update(values)
    found = [Reads(place, everywhere | constants_of(tree)) for place, tree in trees]
    for each, (_, tree) in zip(found, trees, strict=True):
        each.visit(tree)
    return found


def test_the_table_has_every_environment_variable(reads: list[Reads]) -> None:
    in_code = set().union(*(each.found for each in reads)) - {""}
    assert len(in_code) > 20
    named = first_cells(page("environment.md").split("## Environment variables")[1])
    assert len(named) == len(set(named))
    assert set(named) == in_code | THROUGH_LIBRARIES | {"HETPIPE_SET_*"}


def test_the_table_has_every_cache(reads: list[Reads]) -> None:
    table = page("environment.md").split("## Environment variables")[0]
    in_code = set().union(*(each.caches for each in reads))
    assert set(first_cells(table)) == in_code == set(KINDS)


def test_every_link_of_the_contents_exists() -> None:
    links = re.findall(r"\]\(([\w.-]+)(?:#([\w-]+))?\)", page("index.md"))
    assert len(links) > 40
    for name, anchor in links:
        assert (DOCS / name).is_file(), name
        assert not anchor or anchor in anchors(name), f"{name} has no #{anchor}"


def test_the_contents_answer_questions() -> None:
    section = page("index.md").split("## Questions\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line]
    assert len(lines) >= 12
    for line in lines:
        assert re.fullmatch(r"- \[[A-Z].*\?\]\([\w-]+\.md#[\w-]+\)", line), line


def figures() -> list[tuple[str, int, float]]:
    """Return name, idle percent and saved micro-batches of the rows that have figures."""
    row = re.compile(r"^\| `([\w-]+)` .*\| (\d+) % \| ([\d.]+) \|$", re.MULTILINE)
    found = row.findall(page("schedules.md"))
    return [(name, int(idle), float(saved)) for name, idle, saved in found]


@pytest.mark.parametrize(("name", "idle", "saved"), figures())
def test_the_figures_of_a_schedule(name: str, idle: int, saved: float) -> None:
    """Four devices, 8 micro-batches, and a backward as long as two forwards."""
    part = 1 / rule_of(name).stages_per_worker
    stages = round(4 / part)
    schedule = generate(name, stages, 8, workers=4)
    timeline = simulate(schedule, StageTimes((part,) * stages, (2 * part,) * stages))
    assert round(100 * (1 - 8 * 3 / timeline.step_s)) == idle
    changes = []
    for span in timeline.spans:
        own = {0, stages - 1} if name == "zb-v" else {0, 4} if name == "interleaved" else {0}
        if span.action.stage in own and span.action.op is Op.FORWARD:
            changes.append((span.start_s, part))
        elif span.action.stage in own and span.action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            changes.append((span.end_s, -part))
    kept = [sum(change for _, change in sorted(changes)[: n + 1]) for n in range(len(changes))]
    assert max(kept) == saved


def test_most_schedules_have_figures() -> None:
    assert len(figures()) == 10
