"""Writes our numbers beside the paper's, as Markdown and CSV in the table's folder."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from gcfed.runs.folder import DIVERGED, Run, read_run
from gcfed.utils.files import replacing
from reproductions.tables import Axis, Part, Table

UNITS = {  # the unit in a column's name, the factor of our numbers, and their format
    "percent": ("%", 100.0, ".2f"),
    "points": ("%", 100.0, ".3g"),
    "rounds": ("", 1.0, ".0f"),
    "seconds": ("s", 1.0, ".3g"),
    "1e-3": ("10⁻³", 1e3, ".3f"),
    "none": ("", 1.0, ".4g"),
}
FORMS = [
    # of all or the last rounds
    re.compile(r"(?P<how>max|min|mean|last):(?P<column>[^\[\]]+)(?:\[(?P<number>\d+)\])?"),
    # to a target
    re.compile(
        r"(?P<how>rounds):(?P<column>[^\[\]]+?)(?:\[(?P<window>\d+)\])?>=(?P<number>[\d.]+)"
    ),
    re.compile(r"(?P<column>[^:@]+)(?P<how>@)(?P<number>\d+)"),  # the last test up to a round
    re.compile(r"(?P<column>[^:@]+)(?P<how>)(?P<number>)"),  # a number of summary.json
]


def measured(run: Run, measure: str) -> float | None:
    """A measure of a run, in its own unit.

    Infinite: it did not reach the target. None: there is no finite number.
    """
    match = next(filter(None, (form.fullmatch(measure) for form in FORMS)), None)
    if match is None:
        forms = (
            "max:test/acc (min:, mean:, last:), mean:test/acc[10], rounds:test/acc>=0.8,"
            " test/acc@500"
        )
        raise ValueError(f"measure={measure} must be {forms} or a number of summary.json.")
    how, name, number = match["how"], match["column"], float(match["number"] or math.inf)
    curve = run.metrics[name].dropna() if name in run.metrics else pd.Series(dtype=float)
    if not how:
        found = run.summary.get(name)
        return float(found) if isinstance(found, int | float) and math.isfinite(found) else None
    if how == "rounds":
        if match["window"] and len(curve):  # the mean of the tests in the last so many rounds
            rounds = range(1, curve.index[-1] + 1)
            curve = (
                curve.reindex(rounds)
                .rolling(int(match["window"]), min_periods=1)
                .mean()[curve.index]
            )
        reached = curve.index[curve >= number]
        return float(reached[0]) if len(reached) else math.inf if len(curve) else None
    if how == "@":
        curve = curve[curve.index <= number] if run.rounds >= number else curve[:0]
    else:
        curve = curve[curve.index > run.rounds - number]
    value = (
        (curve.iloc[-1] if how in ("@", "last") else getattr(curve, how)())
        if len(curve)
        else math.nan
    )
    return float(value) if math.isfinite(value) else None


def compared(table: Table, row: Axis, column: Axis, works: Sequence[Any]) -> dict[str, Any]:
    """A cell: our mean over the finished runs, the printed number, and their difference, as numbers
    and as text.
    """
    measure, (unit, factor, digits) = (
        table.of("measure", row, column),
        UNITS[table.of("unit", row, column)],
    )
    runs = [read_run(work.folder) for work in works if work.state == "finished"]
    values = {
        run.seed: (factor * x, run)
        for run in runs
        if measure and (x := measured(run, measure)) is not None
    }
    bound = any(math.isinf(value) for value, _ in values.values())  # a run did not reach the target
    numbers = [min(value, run.rounds) if bound else value for value, run in values.values()]
    mean, std = (
        fmean(numbers) if numbers else None,
        stdev(numbers) if len(numbers) > 1 and not bound else None,
    )
    printed, gap, difference = table.cell(row, column), "", None
    theirs = printed.note or "–"
    if printed.mean is not None:
        theirs = f"{printed.mean:{digits}}" + (
            f" ({printed.std:{digits}})" if printed.std is not None else ""
        )
        theirs += "+" if printed.note == "+" else f", {printed.note}" * bool(printed.note)
        if mean is not None and not bound and printed.note != "+":
            difference, scatter = mean - printed.mean, math.hypot(std or 0.0, printed.std or 0.0)
            gap = f"{difference:+{digits}}" + (
                f" ({abs(difference) / scatter:.1f} σ)" if scatter else ""
            )
    diverged = any(run.state == DIVERGED for run in runs)
    ours = ("diverged" if diverged else "–") if runs else "no run"
    if mean is not None:
        ours = (
            f"{mean:{digits}}{'+' * bound}"
            + (f" ({std:{digits}})" if std is not None else "")
            + " †" * diverged
        )
        ours += f" [{len(numbers)} of {len(works)}]" * (len(numbers) < len(works))
    return {
        "row": row.label,
        "column": f"{column.label} ({unit})" if unit else column.label,
        "ours": ours,
        "paper": theirs,
        "difference": gap,
        "mean": mean,
        "std": std,
        "seeds": " ".join(map(str, values)),
        "values": " ".join(map(str, numbers)),
        "bound": bound,
        "paper_mean": printed.mean,
        "paper_std": printed.std,
        "folder": str(works[0].folder),
    }


def write_comparison(
    table: Table,
    scale: str,
    found: Mapping[tuple[str, str], Sequence[Any]],
    root: Path,
    command: str,
) -> str:
    """Writes ``comparison.md`` and ``comparison.csv``; returns the first.

    ``found`` has the works of each cell.
    """
    records, differs = [], dict[str, dict[str, None]]()
    for row, column in ((row, column) for row in table.rows for column in table.columns):
        if works := found.get((row.label, column.label)):
            records.append(compared(table, row, column, works))
            for key, wish in table.settings(row, column).items():
                if (have := OmegaConf.select(works[0].cfg, key)) != wish:
                    why = (
                        f": {table.departures[key].rstrip('.')}" if key in table.departures else ""
                    )
                    differs.setdefault(f"{key} {have} (paper {wish}{why})", {})[row.label] = None
    cells = pd.DataFrame(records)
    kinds = (
        {"ours": "", "paper": "*paper*", "difference": "*difference*"}
        if table.cells
        else {"ours": ""}
    )
    columns, lines = [*dict.fromkeys(cells["column"])], []
    for row, own in cells.set_index("column").groupby("row", sort=False):
        shown = {
            kind: own[kind].reindex(columns, fill_value="–") for kind in kinds if own[kind].any()
        }
        lines += [[kinds[kind] or row, *texts] for kind, texts in shown.items()]
    said = [
        f"{text} [{', '.join(of)}]" if len(of) < cells["row"].nunique() else text
        for text, of in differs.items()
    ]
    notes = [
        f"Source: {table.source}. {table.note}" * bool(table.source),
        f"Ours differs in {'; '.join(said)}." * bool(said),
        f"Not stated: {table.unstated.strip().rstrip('.')}; ours are the experiment's."
        * bool(table.unstated),
        (
            "Mean (sample standard deviation) over seeds; [n of m]: of n seeds; †: a run diverged;"
            " +: a lower bound."
        ),
        f"Made by: {command}",
    ]
    markdown = pd.DataFrame(lines, columns=["", *columns]).to_markdown(
        index=False, disable_numparse=True
    )
    place = f"Table {table.table}" if table.table.isalnum() else table.table or table.name
    less = " ".join([f"scale={scale}", *table.scales.get(scale, Part()).overrides])
    title = f"## {', '.join(filter(None, [table.paper, place, table.title]))} ({less})"
    text = "\n\n".join([title, markdown, *filter(None, notes)]) + "\n"
    for suffix, content in (("md", text), ("csv", cells.to_csv(index=False))):
        with replacing(root / f"comparison.{suffix}") as temporary:
            temporary.write_text(content, encoding="utf-8")
    return text
