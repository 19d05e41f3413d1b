"""Do the tests notice? Draws mutants of ``src/gcfed`` by mutmut's operators and runs the tests that cover their lines.

    make mutants SEED=1 N=200            # or: python tests/mutants.py 1 200 [part of a mutant's name]

Tests are collected once; what each covers is recorded, in ``.cache/mutants``: of all where ``src`` has changed, else of
those that are new or in a changed file. A mutant is a fork in which functions get their new code; it runs the covering
tests until one fails: those first that noticed others in its file, then those of its name, then the fastest, one of all
that take the same way through the file before the others; ``BUDGET`` seconds of them. ``equivalent_mutants.txt`` says
which survivors may live, and why. Not a part of ``make test``.
"""

import hashlib
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
from itertools import pairwise
from pathlib import Path

import coverage
import libcst as cst
import pytest
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.file_mutation import MutationVisitor, get_ignored_lines
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).parents[1]
SRC, RECORD, EQUIVALENT = ROOT / "src/gcfed", ROOT / ".cache/mutants", ROOT / "tests/equivalent_mutants.txt"
FOLDERS = ("federated", "methods", "aggregators", "attacks", "metrics", "optim", "runs", "callbacks", "checkpoints")
FILES = [p for folder in FOLDERS for p in sorted((SRC / folder).rglob("*.py"))]
FILES += [SRC / "tasks.py", *(p for p in sorted((SRC / "data").glob("*.py")) if p.stem not in ("base", "datamodule"))]
TESTS = [*FOLDERS, "data", "federation", "models", "report", *(f"test_{n}.py" for n in ("failure", "run",
         "settings", "tasks", "train_numbers", "transactions"))]  # fmt: skip
# Sentences, what asserts that lengths agree, and what only a GPU shows.
SAID = re.compile(r'(?P<text>f?"[^"]*")|strict=True|device=[\w.]+')
BUDGET = float(os.environ.get("BUDGET", "40"))  # seconds of tests a mutant
code_of = cst.Module([]).code_for_node


def unsaid(code, put):
    """Code with ``put`` in the place of what no test on a CPU has to notice."""
    return SAID.sub(lambda found: found[0] if found["text"] and " " not in found[0] else put, code)


def without_call(node):
    """An operator that mutmut lacks: a call that is made for what it does is left out."""
    return [node.with_changes(value=cst.Name("None"))] if isinstance(node.value, cst.Call) else []


class Visitor(MutationVisitor):
    """mutmut's, which would leave out decorated functions; left out is what is said to users, and assertions."""

    def _skip_node_and_children(self, node):
        code = code_of(node).strip() if isinstance(node, cst.Call | cst.SimpleString | cst.Arg | cst.Expr) else ""
        if isinstance(node, cst.Raise | cst.Assert | cst.Decorator) or (code and not unsaid(code, "")):
            return True
        decorated = isinstance(node, cst.FunctionDef) and node.decorators
        return code.startswith(("log.", "warnings.")) or (not decorated and super()._skip_node_and_children(node))


def mutants_of(path):
    """Of a file: (path, name, lines, lines of the function around, what makes the source) of each."""
    wrapper = MetadataWrapper(cst.parse_module(path.read_text()))
    ignored = get_ignored_lines(str(path), path.read_text(), wrapper, None)
    visitor = Visitor([*mutation_operators, (cst.Expr, without_call)], ignored)
    module, places = wrapper.visit(visitor), wrapper.resolve(PositionProvider)
    for mutation in visitor.mutations:
        function, node, new = mutation.contained_by_top_level_function, mutation.original_node, mutation.mutated_node
        if isinstance(function, cst.FunctionDef) and function in places and node in places:
            before, after = map(module.code_for_node, (node, new))
            if all(unsaid(before, put) != after for put in ("", "None", "strict=None", "device=None")):
                name = " ".join(f"{path.relative_to(SRC)}:{function.name.value}: {before} → {after}".split())
                lines = [range(places[n].start.line, places[n].end.line + 1) for n in (node, function)]
                yield path, name, *lines, partial(lambda *pair: module.deep_replace(*pair).code, node, new)


def functions_of(space, module, inside=""):
    """The functions and methods that a module defines, by their path in it; decorated ones without decoration."""
    for key, value in list(space.items()):
        if isinstance(value, type) and (value.__module__, value.__qualname__) == (module, f"{inside}{key}"):
            yield from functions_of(vars(value), module, f"{inside}{key}.")
            continue
        for step in ("fget", "func", "__func__", "__wrapped__"):
            value = getattr(value, step, value)
        if isinstance(value, types.FunctionType) and value.__module__ == module:
            yield f"{inside}{key}", value


def become(path, source):
    """Gives all functions of an imported module the code that they have in this source."""
    name = ".".join(("gcfed", *path.relative_to(SRC).with_suffix("").parts))
    new, old = types.ModuleType(name), dict(functions_of(vars(importlib.import_module(name)), name))
    exec(compile(source, path, "exec"), new.__dict__)
    for key, function in functions_of(vars(new), name):
        for part in ("__code__", "__defaults__", "__kwdefaults__"):
            setattr(old[key], part, getattr(function, part))


def forked(work, limit):
    """What ``work`` says, in a child process; an error too; "no end" where it takes more than so many seconds."""
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
    """The plugin that has all tests collected when it begins."""

    def pytest_runtestloop(self, session):
        self.session, self.items = session, {item.nodeid: item for item in session.items}
        path = RECORD / "seconds.json"
        digest = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(SRC.rglob("*.py")))).hexdigest()
        self.seconds = (json.loads(path.read_text()) if path.is_file() else {}).get(digest, {})
        self.cover = coverage.Coverage(str(RECORD / "coverage"), include=[f"{SRC}/*"], config_file=False)
        if not self.seconds:
            self.cover.erase()
        since = path.stat().st_mtime if path.is_file() else 0
        changed = {p for p in (ROOT / "tests").rglob("*.py") if p.stat().st_mtime > since}
        if new := [item for item in session.items if item.nodeid not in self.seconds or item.path in changed]:
            print(f"records what {len(new)} tests cover", flush=True)
            forked(partial(self.record, new, path, digest), 3600)
            self.seconds = json.loads(path.read_text())[digest]
        self.cover.load()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a mutant of what ends processes may mean this one
        self.draw(int(sys.argv[1]), int(sys.argv[2]), " ".join(sys.argv[3:]))
        return True

    def passes(self, item, following=None):
        failures = self.session.testsfailed
        self.session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return self.session.testsfailed == failures

    def record(self, items, path, digest):
        """What these tests cover, and how long they take; −1 where one fails."""
        self.cover.load()
        self.cover.start()
        for item in items:
            self.cover.switch_context(item.nodeid)
            started = time.perf_counter()
            self.seconds[item.nodeid] = time.perf_counter() - started if self.passes(item) else -1
        self.cover.stop()
        self.cover.save()
        path.write_text(json.dumps({digest: self.seconds}))

    def outcome(self, path, source, tests):
        try:
            become(path, source())
        except ValueError as error:  # a function closes over other variables
            return f"not tried: {error}"
        items = [*(self.items[test] for test in tests), None]
        return next((item.nodeid for item, then in pairwise(items) if not self.passes(item, then)), "")

    def covering(self, path, *scopes):
        """The tests that ran one of these lines; of what runs at the import, those that ran the function."""
        contexts = self.contexts[path]
        for lines in scopes:
            if found := {t for line in lines for t in contexts.get(line, ()) if self.seconds.get(t, -1) >= 0}:
                return sorted(found & self.items.keys(), key=self.seconds.get)
        return []

    def draw(self, seed, n, part):
        mutants = [m for path in FILES for m in mutants_of(path) if part in m[1]]
        self.contexts = {path: self.cover.get_data().contexts_by_lineno(str(path)) for path in FILES}
        accepted = {line for line in EQUIVALENT.read_text().splitlines() if not line.startswith(" ")}
        if lost := accepted - {name for _, name, *_ in mutants} if not part else ():
            print(f"{EQUIVALENT.name} has what can be drawn no more:", *sorted(lost), sep="\n")
        noticed, results, survivors = Counter(), Counter(), []
        for path, name, lines, around, source in random.Random(seed).sample(mutants, min(n, len(mutants))):
            there, variants, keys, spent = self.covering(path, lines, around), Counter(), {}, 0.0
            if ":__init__:" in name:  # a default may be looked at by who calls nothing
                there += [t for t in self.items if "test_settings" in t and t in self.seconds and t not in there]
            for test in there:
                variants[way := tuple(line for line, tests in self.contexts[path].items() if test in tests)] += 1
                keys[test] = (-noticed[path, test], path.stem not in test, variants[way])
            chosen = [t for t in sorted(there, key=keys.get) if (spent := spent + self.seconds[t]) < BUDGET]
            said, started = "passed", time.perf_counter()
            if chosen:
                said = forked(partial(self.outcome, path, source, chosen), 2 * BUDGET + 20)
            noticed[path, said] += 1
            result = "not tried" if said.startswith("not tried") else "killed"
            if said == "passed":
                result = "equivalent" if name in accepted else "SURVIVED"
            results[result] += 1
            if result == "SURVIVED":
                survivors.append(f"{name}   [line {lines[0]}; {len(chosen)} of {len(there)} tests]")
            print(f"{result:10} {time.perf_counter() - started:4.1f} s  {name}: {said}", flush=True)
        print(f"\n{sum(results.values())} of {len(mutants)} mutants: {dict(results)}", *sorted(survivors), sep="\n")


if __name__ == "__main__":
    RECORD.mkdir(parents=True, exist_ok=True)
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", "--capture=no", f"--basetemp={RECORD}/tmp"]
    sys.exit(pytest.main([*options, *(f"{ROOT}/tests/{name}" for name in TESTS)], plugins=[Campaign()]))
