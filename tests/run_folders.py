"""Writes run folders, and makes runs in memory, without training: a config, rows and an end."""

import json
import math
from pathlib import Path

import pandas as pd
import yaml
from conftest import composer
from omegaconf import OmegaConf

from gcfed.folders.folder import Run, read_run
from gcfed.folders.reading import read_metrics
from gcfed.folders.summary import summary_of

ROW = {
    "train/loss": 1.0,
    "train/clients": 5,
    "train/nonfinite_clients": 0,
    "comm/down_bytes": 5000,
    "comm/up_bytes": 5000,
    "time/train_s": 1.0,
    "time/round_s": 2.0,
}


def write_run(folder, rows, overrides=None, *, ended=True, failure=None, summary=None, **config):
    """Writes the folder of a run, reads it, and returns the run.

    ``rows`` extend :data:`ROW`. A cell with None is empty. ``overrides`` (one string) are composed
    to a config, and the keys of ``config`` are added. A run with ``ended`` has a summary.
    ``failure`` is the text of its failure.txt.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"round": i} | ROW | row for i, row in enumerate(rows, start=1)]
    known = {"seed": 1, "rounds": max(len(rows), 1), "targets": [0.5, 0.9]}
    if overrides is not None:
        words = [*overrides.split(), f"seed={config.get('seed', 1)}", "paths.output_dir=run"]
        known = OmegaConf.to_container(composer(words), resolve=True)
    config = known | config
    (folder / "config.yaml").write_text(
        yaml.dump(config, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))
    )
    (folder / "partition.npz").touch()
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [
        ",".join("" if row.get(name) is None else str(row[name]) for name in names) for row in rows
    ]
    (folder / "metrics.csv").write_text("\n".join([",".join(names), *lines, ""]) if rows else "")
    if failure is not None:
        (folder / "failure.txt").write_text(failure)
    elif ended and rows:
        summary = summary or summary_of(read_metrics(folder / "metrics.csv"), config["targets"])
        finite = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in summary.items()
        }
        (folder / "summary.json").write_text(json.dumps(finite))
    return read_run(folder)


def accuracies(*values, **columns):
    """Rows with these accuracies. None stands for a round without a test."""
    rows = [{} if acc is None else {"test/acc": acc, "test/loss": 2.5 - 2 * acc} for acc in values]
    return [
        row | {name: column[i] for name, column in columns.items()} for i, row in enumerate(rows)
    ]


def curve(level, rounds, seed=1):
    """Rows whose accuracy rises to ``level``, with other waves for each seed."""
    t = range(1, rounds + 1)
    return accuracies(
        *(level * (1 - math.exp(-5 * r / rounds)) + 0.01 * math.sin(r * seed) / r for r in t)
    )


CONFIG = {
    "seed": 1,
    "rounds": 30,
    "eval_every": 1,
    "partition._target_": "gcfed.data.partition.Dirichlet",
    "tags.data": "digits",
    "tags.model": "mlp",
    "tags.algorithm": "fedavg",
    "tags.gc": "none",
    "client.epochs": 5,
    "participation.num_clients": 20,
    "participation.per_round": 5,
    "partition.alpha": 0.1,
    "client.optimizer._target_": "torch.optim.SGD",
    "client.optimizer.lr": 0.01,
    "client.optimizer.momentum": 0.9,
}
GCFED = {"tags.gc": "gcfed", "gc._target_": "gcfed.methods.centralization.GradientCentralization"}
PLACE = "digits, mlp, 5 of 20 clients, Dirichlet 0.1"


def run_of(state="finished", summary=None, values=(0.5,), folder="/nowhere", **config):
    """A run in memory: :data:`CONFIG` with the dotted keys of ``config``, and a test after each
    round.
    """
    tree = {}
    for key, value in (CONFIG | config).items():
        node = tree
        *parents, leaf = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    table = pd.DataFrame(
        {"test/acc": values}, index=pd.RangeIndex(1, len(values) + 1, name="round")
    )
    return Run(Path(folder), tree, summary or {}, table, state, "")
