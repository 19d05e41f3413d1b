"""Writes the numbers of the pages' tables that have stored data:
``python reproductions/results/printed.py``. ``figures.py`` does so before it draws.

A comment ``<!-- data: <name> -->`` above a table names its function in ``TABLES``. Rows and cells
without stored runs stay as they are written.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from gcfed.folders.measures import first_round, smooth  # noqa: E402
from reproductions.results import (  # noqa: E402
    borderlines,
    filled_batches,
    group_norm,
    late_updates,
    nearly_uniform,
    repeated,
    small_tables,
)
from reproductions.results.cells import (  # noqa: E402
    ACCURACY,
    Cells,
    Runs,
    last,
    listed,
    number,
    signed,
    up_to,
)
from reproductions.stored import StoredRun, chosen, stored_runs  # noqa: E402

HERE = Path(__file__).parent

PAPER = {"GC-Fed": 72.44, "FedAvg": 66.44}  # Table 5, CIFAR-10, 5/100, α 0.1
CLIPPED = "client.clip_norm=10"
TARGETS = (50, 60, 70)  # percent
GC = {"GC-Fed": "gc=gcfed", "Global GC": "gc=global", "FedAvg": "gc=none"}


def rounds_to(run: StoredRun, target: float, window: int = 10) -> str:
    """The first round whose mean of the tests in so many rounds is at the target."""
    curve = 100 * run.curve(ACCURACY)
    # the stored numbers have four decimals
    found = first_round(smooth(curve, window).round(6), target)
    return f"not in {curve.index[-1]}" if found is None else str(found)


def of_table5(runs: Runs, method: str, seed: int, clipped: bool) -> StoredRun:
    found = chosen(runs, GC[method], f"seed={seed}")
    (run,) = [run for run in found if (CLIPPED in run.overrides) == clipped]
    return run


def unclipped(runs: Runs) -> dict[str, StoredRun]:
    """Table 5's runs without clipping by the label of their row; seed 1 has no stored data."""
    found = {}
    for method in PAPER:
        for seed in (2, 3):
            found[f"{method}, seed {seed}"] = of_table5(runs, method, seed, clipped=False)
    return found


def clipped(runs: Runs) -> dict[str, StoredRun]:
    """Seed 1 of Table 5's clipped runs by the label of their row."""
    return {f"{method}, clipped at 10": of_table5(runs, method, 1, clipped=True) for method in GC}


def three_seeds(runs: Runs) -> Cells:
    cells: Cells = {}
    for label, run in unclipped(runs).items():
        end = round(last(run, 10), 2)
        above = end - PAPER[label.partition(",")[0]]
        targets = [rounds_to(run, target) for target in TARGETS]
        cells[label,] = [number(end), None, signed(above), number(last(run, 50)), *targets]
    return cells


def by_round(found: Mapping[str, StoredRun], *ends: int) -> Cells:
    cells: Cells = {}
    for label, run in found.items():
        cells[label,] = [number(up_to(run, end), 1) for end in ends]
    return cells


def three_seeds_by_round(runs: Runs) -> Cells:
    return by_round(unclipped(runs), 100, 200, 400, 600)


def ten_tests(runs: Runs) -> Cells:
    cells: Cells = {}
    for label, run in unclipped(runs).items():
        best = run.curve(ACCURACY)
        means = [rounds_to(run, 60, window) for window in (10, 50)]
        cells[label,] = [number(100 * best.max()), str(best.idxmax()), *means]
    return cells


def clipped_seed_1(runs: Runs) -> Cells:
    cells: Cells = {}
    for label, run in clipped(runs).items():
        targets = [rounds_to(run, target) for target in TARGETS]
        cells[label,] = [number(last(run, 10)), *targets, None, None]
    return cells


def clipped_by_round(runs: Runs) -> Cells:
    return by_round(clipped(runs), 100, 200, 400, 600, 800)


class Ends(NamedTuple):
    """A clipped method's means of the last 10 and 50 rounds, each for seeds 1, 2 and 3."""

    ten: list[float]
    fifty: list[float]

    def less(self, other: "Ends") -> "Ends":
        ten = [a - b for a, b in zip(self.ten, other.ten, strict=True)]
        fifty = [a - b for a, b in zip(self.fifty, other.fifty, strict=True)]
        return Ends(ten, fifty)

    def row(self) -> list[str | None]:
        cells: list[str | None] = []
        for ten, fifty in zip(self.ten, self.fifty, strict=True):
            cells += [number(ten), number(fifty)]
        return [*cells, number(fmean(self.ten)), number(fmean(self.fifty))]


def clipped_ends(runs: Runs, method: str) -> Ends:
    own = [of_table5(runs, method, seed, clipped=True) for seed in (1, 2, 3)]
    ten = [round(last(run, 10), 2) for run in own]
    return Ends(ten, [round(last(run, 50), 2) for run in own])


def clipped_seeds(runs: Runs) -> Cells:
    gcfed = clipped_ends(runs, "GC-Fed")
    server = clipped_ends(runs, "Global GC")
    fedavg = clipped_ends(runs, "FedAvg")
    # seed 1 without clipping has no stored data
    without: list[str | None] = [None, None]
    added: list[str | None] = [None, None]
    for seed in (2, 3):
        run = of_table5(runs, "GC-Fed", seed, clipped=False)
        ten = round(last(run, 10), 2)
        fifty = round(last(run, 50), 2)
        without += [number(ten), number(fifty)]
        added += [number(gcfed.ten[seed - 1] - ten), number(gcfed.fifty[seed - 1] - fifty)]
    return {
        ("GC-Fed, clipped at 10",): gcfed.row(),
        ("GC-Fed",): [*without, None, None],
        ("clipping adds",): [*added, None, None],
        ("Global GC, clipped at 10",): server.row(),
        ("GC-Fed above Global GC, both clipped",): gcfed.less(server).row(),
        ("FedAvg, clipped at 10",): fedavg.row(),
        ("GC-Fed's gain, both clipped",): gcfed.less(fedavg).row(),
    }


def clipped_rounds(runs: Runs) -> Cells:
    cells: Cells = {}
    for target in TARGETS:
        for method in GC:
            own = [of_table5(runs, method, seed, clipped=True) for seed in (1, 2, 3)]
            row = [rounds_to(run, target) for run in own]
            if any(text.isdecimal() for text in row):
                cells[f"{target} %: {method}, clipped",] = [*row]
        others = [of_table5(runs, "GC-Fed", seed, clipped=False) for seed in (2, 3)]
        cells[f"{target} %: GC-Fed",] = [None, *(rounds_to(run, target) for run in others)]
    return cells


def agreement(runs: Runs) -> Cells:
    """ρ of each layer in the first and last 20 rounds, means over the seeds."""
    cells: Cells = {}
    for method, gc in (("FedAvg", "gc=none"), ("Global GC", "gc=global")):
        for alpha in ("0.1", "1"):
            own = chosen(runs, gc, f"partition.alpha={alpha}")
            cells[method, alpha] = [rho(own, 1, 20), rho(own, 81, 100)]
    return cells


def rho(runs: Sequence[StoredRun], first: int, end: int) -> str:
    means = []
    for layer in ("fc1", "fc2", "fc3"):
        column = f"gc/rho/{layer}.weight"
        means.append(fmean(run.curve(column).loc[first:end].mean() for run in runs))
    return listed(means, 2)


def vgg11(runs: Runs) -> Cells:
    """GC-Fed and FedAvg on 50 classes of TinyImageNet: the last ten rounds, and the best test."""
    cells: Cells = {}
    for method in ("GC-Fed", "FedAvg"):
        (run,) = chosen(runs, GC[method], "seed=1")
        end = int(run.metrics.index[-1])
        ends = [number(up_to(run, at, 10), 1) for at in range(10, end, 10)]
        loss = run.curve("train/loss")
        cells[method,] = [
            *ends,
            number(last(run, 10), 1),
            number(loss[loss.index > end - 10].mean()),
        ]
    return cells


#: The methods whose runs on the digits are stored.
DIGITS = ("FedACG", "FedAdam", "FedAvg", "FedAvgM", "FedDyn", "SCAFFOLD")


def digits(runs: Runs) -> Cells:
    """The last ten tests of 100 rounds, one in five rounds, by seed."""
    cells: Cells = {}
    for label in DIGITS:
        row = []
        for gc in ("gc=none", "gc=gcfed"):
            own = chosen(runs, f"algorithm={label.lower()}", gc)
            row.append(listed([last(run, 50) for run in own], 2))
        cells[label,] = [*row]
    return cells


#: (page, name of the table) → the function that makes its cells from the page's stored runs.
TABLES: dict[tuple[str, str], Callable[[Runs], Cells]] = {
    ("gcfed-lambda", "by round"): borderlines.by_round,
    ("gcfed-table8", "100 rounds"): filled_batches.hundred_rounds,
    ("gcfed-lambda", "predictions"): borderlines.predictions,
    ("gcfed-table4", "by round"): nearly_uniform.by_round,
    ("gcfed-table4", "predictions"): nearly_uniform.predictions,
    ("gcfed-table5", "three seeds"): three_seeds,
    ("gcfed-table5", "three seeds by round"): three_seeds_by_round,
    ("gcfed-table5", "ten tests"): ten_tests,
    ("gcfed-table5", "clipped seed 1"): clipped_seed_1,
    ("gcfed-table5", "clipped by round"): clipped_by_round,
    ("gcfed-table5", "clipped seeds"): clipped_seeds,
    ("gcfed-table5", "clipped rounds"): clipped_rounds,
    ("coherence", "agreement"): agreement,
    ("every-method", "digits"): digits,
    ("resnet18-groupnorm", "by round"): group_norm.by_round,
    ("resnet18-groupnorm", "predictions"): group_norm.predictions,
    ("late-updates", "equal uploads"): late_updates.at_equal_uploads,
    ("late-updates", "equal time"): late_updates.at_equal_time,
    ("late-updates", "comparisons"): late_updates.comparisons,
    ("late-updates", "comparisons in time"): late_updates.comparisons_in_time,
    ("late-updates", "predictions"): late_updates.predictions,
    ("late-updates", "shares"): late_updates.shares,
    ("late-updates", "lateness"): late_updates.lateness,
    ("late-updates", "search"): late_updates.search,
    ("tinyimagenet-vgg11", "by round"): vgg11,
    ("constant-direction", "all rows again"): repeated.directions,
    ("constant-direction", "predictions again"): repeated.direction_predictions,
    ("feddpc", "five methods"): repeated.feddpc,
    ("feddpc", "search"): repeated.feddpc_search,
    ("figures", "distances"): repeated.distances,
    ("figures", "divergence"): repeated.divergence,
    ("figures", "leakage"): repeated.leakage,
    ("figures", "rates"): repeated.rates,
    ("ssf", "whole space"): repeated.whole_space,
    ("ssf", "subspaces"): repeated.subspaces,
    ("robust", "rules"): repeated.robust,
    ("gc-warmup", "digits"): repeated.warmup_digits,
    ("gc-warmup", "MNIST"): repeated.warmup_mnist,
    ("small-tables", "last tests"): small_tables.accuracies,
    ("small-tables", "best tests"): small_tables.best_tests,
    ("small-tables", "changes"): small_tables.changes,
    ("small-tables", "costs"): small_tables.costs,
}


def rewritten(page: str, text: str) -> str:
    """A page's text with the numbers of its stored runs.

    Raises ValueError if a table or one of its rows is missing.
    """
    runs = stored_runs(page)
    for owner, name in TABLES:
        if owner == page:
            text = _with_cells(text, f"{page}.md", name, TABLES[owner, name](runs))
    return text


def _with_cells(text: str, page: str, name: str, cells: Cells) -> str:
    found = re.search(rf"<!-- data: {re.escape(name)} -->\n\n((?:\|.*\n)+)", text)
    if found is None:
        raise ValueError(f"{page} has no table below <!-- data: {name} -->.")
    lines = found[1].splitlines(keepends=True)
    missing = {*cells}
    for i, line in enumerate(lines):
        old = [cell.strip() for cell in line.strip().strip("|").split("|")]
        for head in _heads(old):
            if head in cells:
                missing.discard(head)
                lines[i] = _line(head, old[len(head) :], cells[head])
    if missing:
        raise ValueError(f"{page}, table {name}: there is no row {sorted(missing)[0]}.")
    return text[: found.start(1)] + "".join(lines) + text[found.end(1) :]


def _heads(cells: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The first cell, and the first two."""
    yield tuple(cells[:1])
    yield tuple(cells[:2])


def _line(head: tuple[str, ...], old: Sequence[str], new: Sequence[str | None]) -> str:
    """A row of a table. A bold cell stays bold."""
    cells = [*head]
    for before, after in zip(old, new, strict=True):
        if after is None or before.strip("*") == after:
            cells.append(before)
        else:
            cells.append(f"**{after}**" if before.startswith("**") else after)
    return f"| {' | '.join(cells)} |\n"


def update() -> None:
    """Writes all pages with stored data."""
    for page in sorted({page for page, _ in TABLES}):
        path = HERE / f"{page}.md"
        path.write_text(rewritten(page, path.read_text()))


if __name__ == "__main__":
    update()
