"""A paper's table beside our runs: each cell's overrides are composed, and runs of that setting are looked up."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import pandas as pd

from gcfed.report.groups import Group
from gcfed.report.tables import Minor, Table, in_bold
from gcfed.runs.identity import counts, setting
from gcfed.runs.measures import UNITS, Column, Sample, states
from gcfed.runs.reading import shipped
from gcfed.study.papers import Axis, PaperTable, choose
from gcfed.utils.compose import Composer

FULL = "full"
_HELD = ("client.", "data.", "model.", "participation.", "partition.")  # sections that every run has
_NUMBER = re.compile(r"-?\d+(\.\d*)?(e[+-]?\d+)?")
_KINDS = ("data", "model", "algorithm", "gc")


class Settings:
    """Settings and rounds that a cell's overrides ask for, composed only where one of the groups can be its runs."""

    def __init__(self, groups: Sequence[Group]) -> None:
        runs = [group.runs[0] for group in groups]
        self._precisions = sorted({run.get("precision") or "" for run in runs} - {""})
        self._values = cache(lambda key: [run.get(key) for run in runs])
        self._composer, self._asked = Composer(), cache(self._compose)

    def __call__(self, overrides: tuple[str, ...] | None, scale: tuple[str, ...] = ()) -> tuple[list[str], int]:
        """The cell's own setting first, then the same in the precisions of other runs.

        ([], 0) where it cannot be run, or no group has this data, model, algorithm and gc, and such numbers.
        """
        return ([], 0) if overrides is None else self._asked((*overrides, *scale))

    def _can_be(self, overrides: tuple[str, ...]) -> bool:
        chosen = dict(override.partition("=")[::2] for override in overrides)
        defaults = shipped(f"experiment/{chosen.get('experiment')}").get("defaults", [])
        files = {key: name for entry in defaults if isinstance(entry, dict) for key, name in entry.items()}
        chosen = {key.rpartition("/")[2]: name for key, name in files.items()} | chosen
        asked: dict[str, Any] = {f"tags.{kind}": chosen.get(f"tags.{kind}", chosen.get(kind)) for kind in _KINDS}
        asked = {key: name for key, name in asked.items() if name is not None}
        held = {key: text for key, text in chosen.items() if key.startswith(_HELD) and counts(key)}
        asked |= {key: float(text) for key, text in held.items() if _NUMBER.fullmatch(text)}
        return not asked or tuple(asked.values()) in zip(*map(self._values, asked), strict=True)

    def _compose(self, overrides: tuple[str, ...]) -> tuple[list[str], int]:
        if not self._can_be(overrides):
            return [], 0
        cfg = self._composer(overrides)
        found, others = [setting(cfg)], [precision for precision in self._precisions if precision != cfg.precision]
        for cfg.precision in others:
            found.append(setting(cfg))
        return found, cfg.rounds


def compare(paper: PaperTable, groups: Sequence[Group], settings: Settings, *, empty: bool = False) -> list[Table]:
    """The table beside the runs of each scale of its study that has any; with ``empty``, rows without runs too."""
    places = {cell: paper.command_overrides(*cell) for cell in product(paper.rows, paper.columns)}
    by_setting: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_setting[group.runs[0].setting].append(group)
    full, tables = {asked for overrides in places.values() for asked in settings(overrides)[0]}, []
    scales = shipped(f"study/{paper.name}").get("study", {}).get("scales") or {}
    for scale, part in ({name: part for name, part in scales.items() if part.get("overrides")} | {FULL: {}}).items():
        further = tuple(map(str, part.get("overrides") or ()))
        rows = choose("rows", part.get("rows"), [axis.label for axis in paper.rows])
        columns = choose("columns", part.get("columns"), [axis.label for axis in paper.columns])
        lines = []
        for (row, column), overrides in places.items():
            if row.label not in rows or column.label not in columns:
                continue
            asked, rounds = settings(overrides, further)
            known = [group for name in asked for group in by_setting[name]]
            if scale != FULL and full.intersection(asked):  # the full table has the paper's setting with other rounds
                known = [group for group in known if group.runs[0].planned == rounds]
            best = max(known, key=partial(_rank, rounds), default=None)
            lines.append({"table": paper.name, "scale": scale, **_cell(paper, row, column, asked, rounds, best)})
        cells = pd.DataFrame(lines, dtype=object)
        if scale != FULL:  # no run is of two scales
            for group in set(cells["group"].dropna()):
                by_setting[group.runs[0].setting].remove(group)
        if empty or cells["group"].notna().any():
            tables.append(_table(paper, cells, scale, further, empty=empty))
    return tables


def _rank(rounds: int, group: Group) -> tuple[float, ...]:
    """How much a group says of a cell of so many rounds: the greatest one is shown."""
    planned, every = group.runs[0].planned, group.runs[0].get("eval_every") or 1
    return group.ended > 0, planned == rounds, min(planned, rounds), group.ended, -every


def _cell(
    paper: PaperTable, row: Axis, column: Axis, asked: Sequence[str], rounds: int, group: Group | None
) -> dict[str, Any]:
    """What programs read of a cell, up to ``differs_in``; then what people read, and what the best and notes are of."""
    measure, unit, higher = (paper.of(name, row, column) for name in ("measure", "unit", "higher_is_better"))
    shown, printed = Column("", *UNITS[unit], higher, measure), paper.cells[row.label, column.label]
    wanted = measure is not None and paper.command_overrides(row, column) is not None and printed.is_result
    s, ours, theirs, gap, gap_text = Sample({}), "no run" if wanted else "–", printed.note or "–", None, ""
    run = group.runs[0] if group else None
    done = min([run.planned, *(r.rounds for r in group.runs if r.has_ended)]) if group and run else 0
    is_full = run is not None and done == rounds
    if group and run and measure:
        s = shown.of(group.runs)
        ours = shown.cell(group.runs, s, paper.seeds or 1)
        ours += f" ({done} of {rounds} rounds)" * (s.mean is not None and not is_full)
    if printed.mean is not None:
        theirs = shown.text(printed.mean) + ("" if printed.std is None else f" ({shown.text(printed.std)})")
        theirs += "+" if printed.note == "+" else f", {printed.note}" * bool(printed.note)
        if s.mean is not None and not s.bound and printed.note != "+":
            gap, scatter = s.mean - printed.mean, math.hypot(s.std or 0.0, printed.std or 0.0)
            gap_text = f"{'−' if gap < 0 else '+'}{shown.text(abs(gap))}"
            known = scatter and not printed.note  # what failed has no scatter
            gap_text += f" ({abs(gap) / scatter:.1f} σ)" if known else ""  # of both, or of the one that there is
    differs = []
    if run and run.setting != asked[0]:
        differs.append(f"precision {run.get('precision')}")
    for key, wish in paper.settings(row, column).items():
        if run and run.get(key) != wish:
            why = f": {paper.departures[key].rstrip('.')}" if key in paper.departures else ""
            differs.append(f"{key} {run.get(key)} (paper {wish}{why})")
    return {
        "row": row.label, "column": column.label, "unit": shown.unit,
        **s.record, "rounds": run.planned if run else None, "rounds_asked": rounds or None,
        "paper_mean": printed.mean, "paper_std": printed.std, "paper_note": printed.note,
        "difference": gap, "differs_in": "; ".join(differs),
        "group": group, "wanted": wanted, "differences": differs, "higher": higher,
        "ours": ours, "ours_rank": shown.rank(s) if is_full else None,
        "paper": theirs, "paper_rank": None if printed.note else printed.mean, "gap": gap_text,
    }  # fmt: skip


def _table(paper: PaperTable, cells: pd.DataFrame, scale: str, further: Sequence[str], *, empty: bool) -> Table:
    """Three lines a row: ours, the paper's and, where both have a number, the difference."""
    runs, wanted = cells[cells["group"].notna()], sum(cells["wanted"])
    if not empty:
        cells = cells[cells["row"].isin(runs["row"]) & cells["column"].isin(runs["column"])].copy()
    by = ["row" if paper.methods_in == "columns" else "column", "unit", "higher"]
    for who in ("ours", "paper"):
        cells[who] = in_bold(cells.assign(text=cells[who], rank=cells[f"{who}_rank"]), by)
    lines = []
    for row, part in cells.groupby("row", sort=False):
        lines += [[row, *part["ours"]], [Minor("paper"), *part["paper"]]]
        lines += [[Minor("difference"), *part["gap"]]] if any(part["gap"]) else []
    units = cells.groupby("column", sort=False)["unit"].agg(lambda labels: set(labels) - {"", "rounds"})
    header = [f"{column} ({labels.pop()})" if len(labels) == 1 else column for column, labels in units.items()]
    at, of_scale = ("", "") if scale == FULL else (f" scale={scale}", f" (scale={scale}: {' '.join(further)})")
    command = f"python src/train.py -m study={paper.name}{at}"
    done = f"{sum(runs['wanted'])} of {wanted} cells have runs. All of them: {command}"
    return Table(
        name=paper.name if scale == FULL else f"{paper.name}_{scale}",
        title=f"{paper.paper}, {paper.place}: {paper.title}{of_scale}",
        frame=pd.DataFrame(lines, columns=["", *header], dtype=object),
        records=cells[cells["wanted"].astype(bool) | cells["group"].notna()].loc[:, :"differs_in"],
        notes=[f"Source: {paper.source}. {paper.note}".strip(), *_notes(paper, runs), done],
    )


def _notes(paper: PaperTable, runs: pd.DataFrame) -> Iterator[str]:
    """In what our settings differ, and what the cells lack."""
    rows = runs.explode("differences").groupby("differences", sort=False)["row"].unique()
    differs = [text + f" [{', '.join(where)}]" * (len(where) < runs["row"].nunique()) for text, where in rows.items()]
    settings = f"Ours differs in {'; '.join(differs)}." if differs else "No difference in the settings listed here."
    unstated = f" Not stated: {paper.unstated.strip().rstrip('.')}; ours are the experiment's."
    yield settings + unstated * bool(paper.unstated)
    lost = [f"{c.row}, {c.column}: {text}" for c in runs.itertuples() if (text := states(c.group.runs))]
    if lost:
        yield f"In no mean: {'; '.join(lost)}."
