"""A docstring names the errors that its function raises."""

import ast
import re
from collections import defaultdict

from gcfed.utils.resolvers import ROOT

#: Errors that a command prints in one line, as :class:`gcfed.utils.refusal.Refusal`.
REFUSALS = {"Refusal", "SettingError", "BuildError", "MissingFile"}


def functions():
    """(file, function) of the whole package."""
    for path in sorted((ROOT / "src/gcfed").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield path.relative_to(ROOT), node


def called_in(node):
    """Names of what a function calls, errors included."""
    names = set()
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            names.add(getattr(call.func, "id", getattr(call.func, "attr", "")))
    return names


def claims(node):
    """The errors of which the docstring says that they are raised."""
    sentence = re.search(r"\b[Rr]aises?\b.*", ast.get_docstring(node) or "", re.DOTALL)
    return set(re.findall(r"\b[A-Z]\w+\b", sentence.group())) if sentence else set()


def reached_from(name, calls):
    """The names of all that runs below the functions of this name."""
    reached = {name}
    waiting = [name]
    while waiting:
        new = calls[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def test_a_docstring_names_the_errors_that_are_raised():
    """A refusal is a ValueError, but not every ValueError is printed in one line."""
    calls = defaultdict(set)
    calls_in_file = defaultdict(lambda: defaultdict(set))
    for path, node in functions():
        calls[node.name] |= called_in(node)
        calls_in_file[path][node.name] |= called_in(node)
    wrong = []
    seen = set()
    for path, node in functions():
        errors = claims(node)
        seen |= errors
        place = f"{path}:{node.lineno}: {node.name}"
        if "ValueError" in errors and "ValueError" not in reached_from(
            node.name, calls_in_file[path]
        ):
            wrong.append(f"{place} raises no ValueError")
        if errors & REFUSALS and not reached_from(node.name, calls) & REFUSALS:
            wrong.append(f"{place} raises no refusal")
    assert not wrong, "\n".join(wrong)
    assert {"ValueError", "Refusal", "SettingError"} <= seen
