"""A value of another type, in any file of a run, leads to a note about that run."""

import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from datetime import date

import pytest
import yaml
from run_folders import CONFIG, curve, write_run

from gcfed.folders.folder import find_runs
from gcfed.reporting import build, write_report

#: A value of each type that YAML and JSON have.
VALUES = (
    "some text",
    True,
    -1,
    0.5,
    10**30,
    10**400,
    math.nan,
    math.inf,
    [],
    [1, "a", None, [2]],
    {"a": {"b": 1}},
    date(2026, 1, 1),
)
#: Measures of numbers that only the summary has.
OF_THE_SUMMARY = ("best_round", "client_seconds", "test/acc_best", "partition/hellinger")


def tree():
    """A config as a nested mapping, with all that a report names."""
    config = {"targets": [0.5], "labels": {"data": "Digits", "model": "MLP", "gc": "GC-Fed"}}
    keys = {
        "participation.per_round": 0.25,
        "rounds": 4,
        "gc._target_": "gcfed.methods.centralization.GradientCentralization",
        "methods.mine._target_": "mine.Mine",
    }
    for key, value in (CONFIG | keys).items():
        *parents, leaf = key.split(".")
        node = config
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return config


class Recorded(dict):
    """A mapping that remembers the dotted keys which are asked of it."""

    def __init__(self, values, keys, prefix=""):
        super().__init__(values)
        self.keys_read = keys
        self.prefix = prefix

    def get(self, key, default=None):
        self.keys_read.add(f"{self.prefix}{key}")
        return self._recorded(key, super().get(key, default))

    def __getitem__(self, key):
        assert key in self
        return self.get(key)

    def items(self):
        """Not recorded: whoever reads all values takes any, as a text."""
        return [(key, self._recorded(key, value)) for key, value in super().items()]

    def _recorded(self, key, value):
        if isinstance(value, Mapping):
            return Recorded(value, self.keys_read, f"{self.prefix}{key}.")
        return value


def own_runs(logs):
    for seed in (1, 2, 3):
        for name in ("fedavg", "other"):
            config = tree() | {"seed": seed}
            config["tags"] = config["tags"] | {"algorithm": name}
            folder = logs / f"{name}_{seed}"
            write_run(folder, curve(0.5, 4, seed), **config)
            path = folder / "summary.json"
            more = {"partition/hellinger": 0.1, "partition/jensen_shannon": 0.1, "version": "1"}
            more |= {"partition/feature_distance": 0.1, "data": "abc", "result": "test/acc"}
            path.write_text(json.dumps(json.loads(path.read_text()) | more))


@pytest.fixture
def keys_read(tmp_path, monkeypatch):
    """The folder of runs, and the keys of their configs and summaries that a report reads."""
    logs = tmp_path / "logs"
    own_runs(logs)
    of_config = set()
    of_summary = set()

    def recorded(roots):
        for run in find_runs(roots):
            config = Recorded(run.config, of_config)
            yield replace(run, config=config, summary=Recorded(run.summary, of_summary))

    with monkeypatch.context() as patch:
        patch.setattr(build, "find_runs", recorded)
        write_report(logs, out=tmp_path / "out", measures=OF_THE_SUMMARY, figures=False)
    return logs, sorted(of_config), sorted(of_summary)


def kind(value):
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, int | float):
        return "number" if abs(value) < 1e300 else "no number"
    return type(value).__name__


def changed(values, key, value):
    """A copy with another value at a dotted key; None if it has no such key or the same kind."""
    first, _, rest = key.partition(".")
    if first not in values:
        return None
    if rest:
        inner = changed(values[first], rest, value)
        return None if inner is None else values | {first: inner}
    return None if kind(values[first]) == kind(value) else values | {first: value}


def test_a_value_of_another_type_is_named(keys_read, tmp_path, capsys):
    """At each key that the report reads, in a run of its own."""
    logs, of_config, of_summary = keys_read
    wanted = {"seed", "participation.num_clients", "labels.data", "methods.mine._target_"}
    assert wanted <= {*of_config}
    assert {"best_round", "result", "ended"} <= {*of_summary}
    config = yaml.safe_load((logs / "fedavg_1" / "config.yaml").read_text())
    summary = json.loads((logs / "fedavg_1" / "summary.json").read_text())
    names = []
    for key in of_config:
        for number, value in enumerate(VALUES):
            other = changed(config, key, value)
            if other is not None:
                names.append(f"config_{key}_{number}")
                shutil.copytree(logs / "fedavg_1", logs / names[-1])
                (logs / names[-1] / "config.yaml").write_text(yaml.safe_dump(other))
    for key in of_summary:
        for number, value in enumerate(VALUES):
            other = None if isinstance(value, date) else changed(summary, key, value)
            if other is not None:
                names.append(f"summary_{key.replace('/', '-')}_{number}")
                shutil.copytree(logs / "fedavg_1", logs / names[-1])
                (logs / names[-1] / "summary.json").write_text(json.dumps(other))
    assert len(names) > 250
    page = write_report(logs, out=tmp_path / "out", measures=OF_THE_SUMMARY, figures=False)
    printed = capsys.readouterr().out
    named = {*re.findall(r"([^/\s]+): its files cannot be read: ", printed)}
    lines = (page.parent / "tables" / "runs.csv").read_text().splitlines()
    assert sorted({*names} - named) == []
    assert len(lines) == 1 + 6, "a run with a wrong value is in the report"
