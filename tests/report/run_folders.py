"""Run folders as a run leaves them, in a moment: what the report reads, without a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gcfed.report.runs import Run, read_run
from gcfed.report.summary import summary_of
from gcfed.utils.settings import flat

CONFIG = {
    "seed": 1,
    "eval_every": 1,
    "precision": "32-true",
    "targets": [0.5, 0.9],
    "tags": {"data": "digits", "model": "mlp", "algorithm": "fedavg", "gc": "none"},
    "data": {"_target_": "gcfed.data.datamodule.FederatedDataModule", "num_classes": 10},
    "model": {"_target_": "gcfed.models.mlp.MLP", "hidden": [64]},
    "participation": {"num_clients": 20, "per_round": 5},
    "partition": {"_target_": "gcfed.data.partition.Dirichlet", "alpha": 0.1, "min_size": 1},
    "client": {
        "_target_": "gcfed.federated.solver.LocalSolver",
        "epochs": 5,
        "batch_size": 50,
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5},
    },
    "server": {"_target_": "torch.optim.SGD", "lr": 1.0},
    "aggregator": {"_target_": "gcfed.federated.aggregate.MeanAggregator", "weighting": "uniform"},
    "methods": {},
    "gc": {"_target_": None, "boundary": None},
    "quantization": {"_target_": None},
}
ROW = {
    "train/loss": 1.0, "train/clients": 5, "train/nonfinite_clients": 0, "comm/down_bytes": 5000, "comm/up_bytes": 5000,
    "time/train_s": 1.0, "time/round_s": 2.0,
}  # fmt: skip


def write_run(
    folder: Path,
    *,
    config: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    overrides: Sequence[str] = (),
    summary: bool | Mapping[str, Any] = True,
    failure: str | None = None,
) -> Run:
    """Writes ``config.yaml``, ``overrides.yaml``, ``metrics.csv`` and what follows; returns the run as it is read back.

    Args:
        config: dotted or nested keys over :data:`CONFIG`; ``rounds`` is the last row's unless it is given.
        rows: of ``metrics.csv``, over :data:`ROW`; ``round`` is the row's place unless it is given. NaN, None and ""
            are empty cells, as where a round was not tested. No rows, no file.
        overrides: of the command line.
        summary: True writes what a run computes from its rows; a mapping is put over that; False: a run that has not
            come to its end.
        failure: the text of ``failure.txt``; then there is no summary.
    """
    folder.mkdir(parents=True, exist_ok=True)
    full: list[dict[str, Any]] = [ROW | {"round": i} | dict(row) for i, row in enumerate(rows, start=1)]
    tree: dict[str, Any] = json.loads(json.dumps(CONFIG)) | {"rounds": full[-1]["round"] if full else 1}
    for key, value in flat(config).items():
        node = tree
        *parents, leaf = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    (folder / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
    if full:
        names = list(dict.fromkeys(name for row in full for name in row))
        lines = [",".join(_cell(row.get(name)) for name in names) for row in full]
        (folder / "metrics.csv").write_text("\n".join([",".join(names), *lines]) + "\n")
    if failure is not None:
        (folder / "failure.txt").write_text(failure)
    elif summary is not False and full:
        known = [{k: v for k, v in row.items() if _cell(v)} for row in full]
        result = summary_of(known, tree["targets"]) | (dict(summary) if isinstance(summary, Mapping) else {})
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in result.items()}
        (folder / "summary.json").write_text(json.dumps(plain))
    return read_run(folder)


def rows_of(accuracies: Sequence[float], **columns: Sequence[float]) -> list[dict[str, Any]]:
    """Rows of a run that was tested after every round; further columns by their names, of the same length."""
    rows: list[dict[str, Any]] = [{"test/acc": acc, "test/loss": 2.5 - 2 * acc} for acc in accuracies]
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return rows


def _cell(value: Any) -> str:
    return "" if value is None or value == "" or value != value else str(value)
