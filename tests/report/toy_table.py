"""A small paper's table and runs of it."""

from __future__ import annotations

from run_folders import rows_of, write_run

from gcfed.report.compare import compare
from gcfed.report.groups import grouped
from gcfed.report.papers import load
from gcfed.report.runs import find_runs

TOY = """
paper: Toy
table: "3"
title: Accuracy
source: Toy (2024), Table 3
unit: percent
higher_is_better: true
seeds: 3
deviation: std
measure: "mean:test/acc[2]"
note: A note of the table.
common_match: {tags.data: digits}
setting: {rounds: 4, client.optimizer.lr: 0.01}
columns:
  - {label: "α 0.1", overrides: [data=digits, model=mlp, partition.alpha=0.1], match: {partition.alpha: 0.1}}
  - {label: "α 1", overrides: [data=digits, model=mlp, partition.alpha=1], match: {partition.alpha: 1}}
  - {label: "rounds to 50 %", overrides: [data=digits, model=mlp, partition.alpha=0.1], match: {partition.alpha: 0.1},
     measure: "rounds:test/acc>=0.5", unit: rounds, higher_is_better: false}
rows:
  - {label: FedAvg, overrides: [algorithm=fedavg, gc=none], match: {tags.algorithm: fedavg, tags.gc: none}}
  - {label: FedProx, overrides: [algorithm=fedprox, gc=none], match: {tags.algorithm: fedprox, tags.gc: none},
     setting: {methods.proximal.mu: 0.1}}
  - {label: GC-Fed, overrides: [gc=gcfed], match: {tags.algorithm: fedavg, tags.gc: gcfed}}
  - {label: Lost, overrides: null, note: There is no code of it.}
cells:
  FedAvg: [[50.00, 3.00], 60.00, 3]
  FedProx: [[52.00, 4.00], {mean: 10.00, note: failed}, {mean: 4, note: "+"}]
  GC-Fed: [[58.00, 1.00], 70.00, 2]
  Lost: [40.00, N/A, null]
"""


class Runs:
    """Writes runs of the toy table and compares them."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "toy_table3.yaml").write_text(TOY)

    def add(self, name, accuracies, *, algorithm="fedavg", gc="none", seed=1, alpha=0.1, overrides=(), rows=None, **kw):
        config = {"tags.algorithm": algorithm, "tags.gc": gc, "seed": seed, "partition.alpha": alpha}
        config |= {"rounds": 4} | kw.pop("config", {})
        overrides = [f"algorithm={algorithm}", f"gc={gc}", f"partition.alpha={alpha}", *overrides, f"seed={seed}"]
        rows = rows or rows_of(accuracies)
        return write_run(self.folder / "runs" / name, config=config, rows=rows, overrides=overrides, **kw)

    def compared(self):
        (self.folder / "runs").mkdir(exist_ok=True)
        return compare(load(self.folder / "toy_table3.yaml"), grouped(find_runs([self.folder / "runs"])))

    def cell(self, row, column="α 0.1"):
        return next(e for e in self.compared().entries if (e.row, e.column) == (row, column))


def text_of(table, row, column):
    """Texts of ours, the paper's and the difference."""
    i = next(i for i, line in enumerate(table.rows) if line.cells[0].text == row)
    lines = [table.rows[i], *(line for line in table.rows[i + 1 : i + 3] if line.minor)]
    return [line.cells[1 + column].text for line in lines]
