"""Folders that are damaged, or made to harm, cost a report nothing but themselves: wrong values at every key."""

import copy
import json
import math
import os
import random
import re
from datetime import datetime
from pathlib import Path

import pandas as pd
import pytest
import yaml
from run_folders import curve, write_run

from gcfed.report import write_report
from gcfed.report.build import Incomplete

DEEP = "[" * 5000 + "]" * 5000
BOMB = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
NOWHERE = [10**19, -(10**400), {1: 2, "a": 3}, [{1: 2, "a": 3}]]  # in no YAML
VALUES = [
    *NOWHERE, 3, -1, 1.5, 1e308, math.inf, -math.inf, math.nan, True, "", "abc", ".", "1e5", "a\nb", "$x^{$",
    "x" * 5000, [], [1, "a"], ["abc"], [math.nan], [[]], [0.25, 2], [0.5] * 5000, {}, {"a": {"b": [1]}}, None,
]  # fmt: skip


def whole(value, low=0, high=10**7):
    return type(value) is int and low <= value <= high


def finite(value):
    return abs(value) < (2**63 if type(value) is int else 1e200) if type(value) in (int, float) else False


def line(value):
    return value is None or (isinstance(value, str) and len(value) <= 100 and "\n" not in value)


def moment(value):
    try:
        return value is None or isinstance(datetime.fromisoformat(value), datetime)
    except (TypeError, ValueError):
        return False


def mapping_of(is_right):
    return lambda v: v is None or (isinstance(v, dict) and all(map(is_right, v.values())))


def figure(value):
    return value is None or finite(value)


#: What a report computes with, and whether a value is right there. Any other key may have any value.
CONFIG = {
    ("seed",): lambda v: whole(v, high=2**63 - 1),
    ("rounds",): whole,
    ("eval_every",): lambda v: v is None or whole(v, 1, 2**63 - 1),
    ("targets",): lambda v: isinstance(v, list) and len(v) <= 100 and all(map(finite, v)),
    ("targets", 0): lambda v: finite(v) and abs(v) <= 1e9,
    ("metrics",): mapping_of(mapping_of(lambda v: True)),
    ("metrics", "drift"): mapping_of(lambda v: True),
    ("tags",): mapping_of(line),
    ("tags", "data"): line,
    ("labels", "gc"): line,
    ("precision",): line,
}
SUMMARY = {
    ("rounds",): whole,
    ("test/acc",): figure,
    ("comm/down_bytes",): figure,
    ("rounds_to_target",): mapping_of(figure),
    ("rounds_to_target", "0.5"): figure,
    ("classes",): line,
    ("ended",): moment,
}


def with_value(tree, path, value):
    node = tree = tree | {path[0]: copy.deepcopy(tree[path[0]])}
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return tree


def paths(tree, above=()):
    for key, value in tree.items():
        yield (*above, key)
        yield from paths(value, (*above, key)) if isinstance(value, dict) else ()


def as_yaml(tree):
    return yaml.dump(tree, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False)


def rows(*cells):
    """``metrics.csv`` of four rounds, the last of which has these cells."""
    return "\n".join(["round,test/acc,test/loss", *(f"{i},0.5,1" for i in (1, 2, 3)), ",".join(cells), ""])


TRIALS = "number,state,value,lr\n0,complete,{},0.1\n1,fail,,0.2\n"
#: Whole files, and links, in place of a file of each kind.
FILES = {
    "config.yaml": [DEEP, BOMB, MERGES, "a: &a [*a]", "a: [", "- 1", "x", "", b"\xff\xfe", "x: 1\n" * 300_000],
    "summary.json": [DEEP, '{"a": ' * 5000 + "1" + "}" * 5000, "{", "[1]", "3", '{"rounds": NaN}', b"\xff"],
    "metrics.csv": [
        "a,b\n1,2\n", "round,a\n1,x\n", "round,a[0]\n1,2\n", f"round,{'a' * 300}\n1,2\n", f"round{',' * 20_000}\n1\n",
        *(rows(r, "0.5", "1") for r in ("3", "1", "3.5", "inf", "1e12", "-1", "")), b"\xff\nround\n",
    ],
    "trials.csv": [
        "", "number,state\n1,fail\n", "value\n0.5\n", *(TRIALS.format(v) for v in ("x", "inf", "1e308")),
        "number,value\n1.5e300,1\n", "number,value\n,1\n", b"\xff",
    ],
    "optimization_results.yaml": [
        DEEP, BOMB, "- 1", "metric: [1]", "metric: median:x", "metric: ''\n", "metric: .inf", "x: {",
        "metric: a\ndirection: [1]",
    ],
}  # fmt: skip
LINKS = ("/dev/zero", "/dev/full", "/proc/self/mem")


class Hostile:
    """Copies of a run's folder and of a search's, each with something wrong."""

    def __init__(self, root):
        self.folder, self.expected = root / "hostile", {}
        write_run(root / "hostile" / "base", curve(0.6, 4), "data=digits gc=gcfed rounds=4 metrics=drift", seed=7)
        names = ("config.yaml", "summary.json", "metrics.csv")
        self.run = {name: (self.folder / "base" / name).read_text() for name in names}
        self.search = {"trials.csv": TRIALS.format(0.5), "optimization_results.yaml": "metric: max:test/acc\n"}
        self.config, self.summary = yaml.safe_load(self.run["config.yaml"]), json.loads(self.run["summary.json"])
        about = dict.fromkeys(("identity", "setting", "data", "classes", "another"), "abc")
        self.summary |= about | {"ended": "2026-05-02T08:00:00+09:00"}

    def add(self, file, content, wrong=True):
        """A folder with this content, or a link to a path, in place of a file; wrong None: nothing is expected."""
        folder = self.folder / f"bad_{len(self.expected)}_"
        folder.mkdir()
        for name, text in (self.search if file in self.search else self.run).items():
            (folder / name).write_text(text)
        (folder / file).unlink(missing_ok=True)
        if isinstance(content, Path):
            (folder / file).symlink_to(content)
        else:
            (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        self.expected[folder.name] = file, wrong
        return folder / file


def fill(made, rng):
    """Every value at every key of the schema, some at any other key, every file of FILES, links and pipes."""
    nowhere, blocks = [*map(as_yaml, NOWHERE)], {key: as_yaml({key: value}) for key, value in made.config.items()}

    def config(path, value):
        return "".join((blocks | {path[0]: as_yaml({path[0]: with_value(made.config, path, value)[path[0]]})}).values())

    for path, is_right in CONFIG.items():
        for value in VALUES:
            wrong = as_yaml(value) in nowhere or not is_right(value)
            made.add("config.yaml", config(path, value), wrong)
    for path, is_right in SUMMARY.items():
        for value in VALUES:
            made.add("summary.json", json.dumps(with_value(made.summary, path, value)), not is_right(value))
    free = [path for path in paths(made.config) if not any(path[:1] == known[:1] for known in CONFIG)]
    for path, value in zip(rng.sample(free, 20), rng.choices(VALUES, k=20), strict=True):
        made.add("config.yaml", config(path, value), as_yaml(value) in nowhere)
    for file, contents in FILES.items():
        for content in (*contents, *map(Path, LINKS)):
            made.add(file, content)
        made.add(file, Path("/proc/kmsg"), wrong=None)  # without an end, or empty
        pipe = made.add(file, "")
        pipe.unlink()
        os.mkfifo(pipe)
    for file in ("failure.txt", "label_counts.npz", "updates.csv"):
        for content in (Path("/dev/zero"), b"PK\xff\n\x00" * 99):
            made.add(file, content, wrong=None)
    odd = made.folder / os.fsdecode(b"an\xffodd\n<b>name")
    made.add("config.yaml", "x").parent.rename(odd)
    made.expected.popitem()
    for name, target in (("system", "/proc"), ("root", "/"), ("self", made.folder), ("up", made.folder.parent.parent)):
        (made.folder / name).symlink_to(target)


def test_one_folder_does_not_cost_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr("gcfed.report.figures.FEDERATIONS", 1)  # that of the good runs, and of most others
    logs = tmp_path / "logs"
    for seed in (1, 2):
        write_run(logs / f"good_{seed}", curve(0.4, 4, seed), "data=digits gc=none rounds=4", seed=seed)
    write_report(logs, out=tmp_path / "out", figures=False)
    tables = tmp_path / "out" / "tables"
    before = pd.read_csv(tables / "singles.csv")
    made = Hostile(logs)
    fill(made, random.Random(1))
    with pytest.raises(Incomplete, match="bad_1_ cannot be read"):
        write_report(logs, out=tmp_path / "out", formats="png")
    said = (tmp_path / "out" / "report.md").read_text()
    lacks = [text.removeprefix("- Not in this report: ") for text in said.splitlines() if text.startswith("- Not in")]
    assert (tmp_path / "out" / "index.html").read_text().count('class="lack"') == len(lacks)
    assert [text for text in lacks if " cannot be read: " not in text] == []  # no figure is lost
    named = {re.search(r"bad_\d+_|odd", text)[0]: text.partition(" cannot be read: ")[2] for text in lacks}
    assert named.pop("odd")
    for name, (file, wrong) in made.expected.items():
        assert wrong is None or named.get(name, "").startswith(file) == wrong, (name, file, named.get(name))
    assert sum(bool(wrong) for _, wrong in made.expected.values()) > 400
    after = pd.concat(map(pd.read_csv, [*tables.glob("federation_*.csv"), tables / "singles.csv"]))
    for row in before.itertuples():
        assert ((after["measure"] == row.measure) & (after["values"] == row.values)).any(), row
