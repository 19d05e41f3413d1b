"""Draws mutants of ``src/gcfed`` with mutmut's operators, and runs the tests that cover their
lines.

    make mutants SEED=1 N=200            # or: python tests/mutants.py 1 200 [part of a mutant's
    name]

The first call after a change records in ``.cache/mutants`` which test runs which line. A mutant is
a fork in which functions have new code. It runs the covering tests, fastest first, until one fails
or ``BUDGET`` seconds are over. ``equivalent_mutants.txt`` lists mutants that no test on a CPU can
detect, with reasons. ``make test`` runs no mutants.
"""

import importlib
import json
import os
import random
import re
import select
import signal
import sys
import time
import types
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import coverage
import libcst as cst
import pytest
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.file_mutation import MutationVisitor, get_ignored_lines
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src/gcfed"
RECORD = ROOT / ".cache/mutants"
EQUIVALENT = ROOT / "tests/equivalent_mutants.txt"
SECONDS = RECORD / "seconds.json"
FOLDERS = (
    "participation",
    "federated",
    "methods",
    "aggregators",
    "attacks",
    "metrics",
    "optim",
    "folders",
    "callbacks",
    "checkpoints",
)
FILES = [p for folder in FOLDERS for p in sorted((SRC / folder).rglob("*.py"))]
FILES += [
    SRC / "tasks.py",
    *(p for p in sorted((SRC / "data").glob("*.py")) if p.stem not in ("base", "datamodule")),
]
TESTS = [
    *FOLDERS,
    "data",
    "gcfed_sites",
    "models",
    "reporting",
    *(
        f"test_{n}.py"
        for n in ("failure", "run", "settings", "tasks", "train_numbers", "transactions")
    ),
]
# Messages, checks of equal lengths, and arguments that matter only on a GPU.
SAID = re.compile(r'(?P<text>f?"[^"]*")|strict=True|device=[\w.]+')
BUDGET = float(os.environ.get("BUDGET", "40"))  # seconds of tests per mutant
code_of = cst.Module([]).code_for_node


def unsaid(code, put):
    """Code with ``put`` instead of the parts that no test on a CPU must detect."""
    return SAID.sub(lambda found: found[0] if found["text"] and " " not in found[0] else put, code)


def without_call(node):
    """An operator that mutmut lacks: removes a call whose value is not used."""
    return [node.with_changes(value=cst.Name("None"))] if isinstance(node.value, cst.Call) else []


class Visitor(MutationVisitor):
    """mutmut's visitor. It also mutates decorated functions, but no messages and no assertions."""

    def _skip_node_and_children(self, node):
        code = (
            code_of(node).strip()
            if isinstance(node, cst.Call | cst.SimpleString | cst.Arg | cst.Expr)
            else ""
        )
        if isinstance(node, cst.Raise | cst.Assert | cst.Decorator) or (
            code and not unsaid(code, "")
        ):
            return True
        decorated = isinstance(node, cst.FunctionDef) and node.decorators
        return code.startswith(("log.", "warnings.")) or (
            not decorated and super()._skip_node_and_children(node)
        )


def mutants_of(path):
    """The mutants of a file: path, name, lines, lines of the enclosing function, a function that
    makes the source.
    """
    wrapper = MetadataWrapper(cst.parse_module(path.read_text()))
    ignored = get_ignored_lines(str(path), path.read_text(), wrapper, None)
    visitor = Visitor([*mutation_operators, (cst.Expr, without_call)], ignored)
    module = wrapper.visit(visitor)
    places = wrapper.resolve(PositionProvider)
    for mutation in visitor.mutations:
        function = mutation.contained_by_top_level_function
        node = mutation.original_node
        new = mutation.mutated_node
        if isinstance(function, cst.FunctionDef) and function in places and node in places:
            before, after = map(module.code_for_node, (node, new))
            if all(
                unsaid(before, put) != after for put in ("", "None", "strict=None", "device=None")
            ):
                name = " ".join(
                    f"{path.relative_to(SRC)}:{function.name.value}: {before} → {after}".split()
                )
                lines = [
                    range(places[n].start.line, places[n].end.line + 1) for n in (node, function)
                ]
                yield (
                    path,
                    name,
                    *lines,
                    partial(lambda *pair: module.deep_replace(*pair).code, node, new),
                )


def functions_of(space, module, inside=""):
    """The functions and methods that a module defines, by qualified name, without
    their decorators.
    """
    for key, value in list(space.items()):
        if isinstance(value, type) and (value.__module__, value.__qualname__) == (
            module,
            f"{inside}{key}",
        ):
            yield from functions_of(vars(value), module, f"{inside}{key}.")
            continue
        for step in ("fget", "func", "__func__", "__wrapped__"):
            value = getattr(value, step, value)
        if isinstance(value, types.FunctionType) and value.__module__ == module:
            yield f"{inside}{key}", value


def become(path, source):
    """Replaces the code of all functions of an imported module by that of this source."""
    name = ".".join(("gcfed", *path.relative_to(SRC).with_suffix("").parts))
    new = types.ModuleType(name)
    old = dict(functions_of(vars(importlib.import_module(name)), name))
    exec(compile(source, path, "exec"), new.__dict__)
    for key, function in functions_of(vars(new), name):
        for part in ("__code__", "__defaults__", "__kwdefaults__"):
            setattr(old[key], part, getattr(function, part))


def forked(work, limit):
    """Runs ``work`` in a child process.

    Returns its result or its error, or "no end" after ``limit`` seconds.
    """
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            said = work() or "passed"
        except BaseException as error:
            said = repr(error)
        os.write(writer, said.encode()[:1000])
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 1000).decode() if select.select([reader], [], [], limit)[0] else "no end"
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    return said or "its process ended"


class Campaign:
    """A pytest plugin that runs mutants instead of the collected tests."""

    def pytest_runtestloop(self, session):
        self.session = session
        self.items = {item.nodeid: item for item in session.items}
        self.cover = coverage.Coverage(
            str(RECORD / "coverage"), include=[f"{SRC}/*"], config_file=False
        )
        newest = max(
            p.stat().st_mtime for folder in (SRC, ROOT / "tests") for p in folder.rglob("*.py")
        )
        if not SECONDS.is_file() or SECONDS.stat().st_mtime < newest:
            print(f"records what {len(self.items)} tests cover", flush=True)
            forked(self.record, 3600)
        self.seconds = {
            test: s for test, s in json.loads(SECONDS.read_text()).items() if test in self.items
        }
        self.cover.load()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a mutant may send a signal to this process
        self.draw(int(sys.argv[1]), int(sys.argv[2]), " ".join(sys.argv[3:]))
        return True

    def passes(self, item, following=None):
        failures = self.session.testsfailed
        self.session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return self.session.testsfailed == failures

    def record(self):
        """Writes the lines that each test covers, and the seconds of the tests that pass."""
        seconds = {}
        self.cover.erase()
        self.cover.start()
        for name, item in self.items.items():
            self.cover.switch_context(name)
            started = time.perf_counter()
            if self.passes(item):
                seconds[name] = time.perf_counter() - started
        self.cover.stop()
        self.cover.save()
        SECONDS.write_text(json.dumps(seconds))

    def outcome(self, path, source, tests):
        """The first test that fails with this source, or an empty string."""
        try:
            become(path, source())
        except ValueError as error:  # a function closes over other variables
            return f"not tried: {error}"
        items = [*(self.items[test] for test in tests), None]
        return next(
            (item.nodeid for item, then in pairwise(items) if not self.passes(item, then)), ""
        )

    def covering(self, path, *scopes):
        """The tests, fastest first, that ran a line of the first scope.

        If there are none, the next scope counts.
        """
        contexts = self.cover.get_data().contexts_by_lineno(str(path))
        found = (
            {test for line in lines for test in contexts.get(line, ())} & self.seconds.keys()
            for lines in scopes
        )
        return sorted(next(filter(None, found), ()), key=self.seconds.get)

    def draw(self, seed, n, part):
        mutants = [m for path in FILES for m in mutants_of(path) if part in m[1]]
        accepted = EQUIVALENT.read_text().splitlines()
        results = Counter()
        survivors = []
        for path, name, lines, around, source in random.Random(seed).sample(
            mutants, min(n, len(mutants))
        ):
            covering = self.covering(path, lines, around)
            spent = accumulate(self.seconds[test] for test in covering)
            tests = [test for test, total in zip(covering, spent, strict=True) if total < BUDGET]
            said = (
                forked(partial(self.outcome, path, source, tests), 2 * BUDGET + 20)
                if tests
                else "passed"
            )
            result = "not tried" if said.startswith("not tried") else "killed"
            if said == "passed":
                result = "equivalent" if name in accepted else "SURVIVED"
            results[result] += 1
            if result == "SURVIVED":
                survivors.append(
                    f"{name}   [line {lines[0]}; {len(tests)} of {len(covering)} tests]"
                )
            print(f"{result:10}  {name}: {said}", flush=True)
        print(
            f"\n{sum(results.values())} of {len(mutants)} mutants: {dict(results)}",
            *sorted(survivors),
            sep="\n",
        )


if __name__ == "__main__":
    RECORD.mkdir(parents=True, exist_ok=True)
    options = [
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "--capture=no",
        f"--basetemp={RECORD}/tmp",
    ]
    sys.exit(
        pytest.main([*options, *(f"{ROOT}/tests/{name}" for name in TESTS)], plugins=[Campaign()])
    )
