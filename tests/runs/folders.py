"""A run folder in a moment, without a run."""

import json
import math

import yaml

from gcfed.runs.folder import read_run
from gcfed.runs.metrics_csv import read_metrics
from gcfed.runs.summary import summary_of

ROW = {"train/clients": 5, "train/nonfinite_clients": 0, "comm/down_bytes": 5000, "comm/up_bytes": 5000,
       "time/train_s": 1.0, "time/round_s": 2.0}  # fmt: skip


def write_run(folder, rows, *, ended=True, failure=None, **config):
    """``rows`` go over :data:`ROW`; a cell that is None is empty. A run that has ended has its summary."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"round": i} | ROW | row for i, row in enumerate(rows, start=1)]
    config = {"seed": 1, "rounds": max(len(rows), 1)} | config
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "partition.npz").touch()
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join("" if row.get(name) is None else str(row[name]) for name in names) for row in rows]
    (folder / "metrics.csv").write_text("\n".join([",".join(names), *lines, ""]) if rows else "")
    if failure is not None:
        (folder / "failure.txt").write_text(failure)
    elif ended and rows:
        summary = summary_of(read_metrics(folder / "metrics.csv"), [0.5, 0.9])
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in summary.items()}
        (folder / "summary.json").write_text(json.dumps(finite))
    return read_run(folder)


def accuracies(*values, **columns):
    """Rows of tests; None where a round was not tested."""
    rows = [{} if acc is None else {"test/acc": acc, "test/loss": 2.5 - 2 * acc} for acc in values]
    return [row | {name: column[i] for name, column in columns.items()} for i, row in enumerate(rows)]
