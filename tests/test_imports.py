"""Packages import each other without cycles, and only from lower layers."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"
# The lowest layer comes first. The packages of a layer may import each other and those of lower
# layers.
FLOORS = (
    {"utils"},
    {"participation"},
    {"data", "models", "tasks"},
    {"optim", "federated"},
    {"folders"},
    {"plots"},
    {"aggregators", "methods"},
    {"attacks", "metrics"},
    {"callbacks", "checkpoints", "loggers"},
    {"assemble", "check", "wire"},
    {"reporting"},
    {"run"},
    {"jobs", "project", "search"},
    {"tables"},
    {"api", "commands"},
)
MODULES = {
    ".".join(path.relative_to(SRC).with_suffix("").parts): path
    for path in (SRC / "gcfed").rglob("*.py")
}


def imports(module, *, late):
    """Our modules that a module imports, also only for types.

    ``late`` adds imports within functions.
    """
    tree = ast.parse(MODULES[module].read_text())
    conditional = [
        inner for node in tree.body if isinstance(node, ast.If | ast.Try) for inner in node.body
    ]
    nodes = list(ast.walk(tree)) if late else tree.body + conditional
    names = [
        f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {m for name in names for m in (name, name.rpartition(".")[0]) if m in MODULES}


def test_imports_have_no_cycle():
    TopologicalSorter({module: imports(module, late=False) for module in MODULES}).prepare()


@pytest.mark.parametrize(
    "floor", range(len(FLOORS)), ids=[" ".join(sorted(names)) for names in FLOORS]
)
def test_nothing_imports_upwards(floor):
    below = set.union(*FLOORS[: floor + 1])
    for module in MODULES:
        if module.split(".")[1] in FLOORS[floor]:
            assert {m.split(".")[1] for m in imports(module, late=True) if "." in m} <= below, (
                module
            )


def test_a_test_file_imports_only_test_files_that_pytest_finds_for_it_alone():
    """pytest finds modules in the folder of the file, of conftest.py, and in ``pythonpath``."""
    tests = SRC.parent / "tests"
    lost = []
    for path in tests.rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("test_"):
                continue
            folders = (path.parent, tests, tests / "methods")
            if not any((folder / f"{node.module}.py").is_file() for folder in folders):
                lost.append(f"{path.relative_to(tests)}: {node.module}")
    assert not lost


def sources(file: Path, function: str) -> list[str]:
    """The source of each function of this name in a file."""
    text = file.read_text()
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            found.append(ast.get_source_segment(text, node))
    return found


def test_each_equivalent_mutant_is_of_code_that_exists():
    """An entry of ``equivalent_mutants.txt`` counts for a mutant of exactly this name."""
    text = (SRC.parent / "tests" / "equivalent_mutants.txt").read_text()
    entries = [line for line in text.splitlines() if not line.startswith(" ")]
    assert entries
    for entry in entries:
        file, function, change = entry.split(":", 2)
        before, _ = change.strip().split(" → ")
        assert any(before in code for code in sources(SRC / "gcfed" / file, function)), entry
