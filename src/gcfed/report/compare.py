"""A paper's table beside our runs: each cell's overrides are composed, and runs of that setting are looked up."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pandas as pd
import yaml

from gcfed.report.groups import Group, Sample, sample
from gcfed.report.tables import UNITS, Minor, Table, Unit, in_bold, mean_text, states
from gcfed.runs.identity import counts, setting
from gcfed.runs.reading import Loader
from gcfed.study.papers import Axis, Cell, PaperTable, choose
from gcfed.utils.compose import CONFIGS, Composer

FULL = "full"
_HELD = ("client.", "data.", "model.", "participation.", "partition.")  # sections that every run has
_NUMBER = re.compile(r"-?\d+(\.\d*)?(e[+-]?\d+)?")
_KINDS = ("data", "model", "algorithm", "gc")


class Settings:
    """Settings and rounds that a cell's overrides ask for, composed only where one of the groups can be its runs."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._composer = Composer()
        self._runs = [group.runs[0] for group in groups]
        self._precisions = sorted({run.get("precision") or "" for run in self._runs} - {""})
        self._kinds = {tuple(run.get(f"tags.{kind}") for kind in _KINDS) for run in self._runs}
        self._values: dict[str, set[Any]] = {}
        self._known: dict[tuple[str, ...], tuple[list[str], int]] = {}

    def __call__(self, overrides: tuple[str, ...] | None, scale: tuple[str, ...] = ()) -> tuple[list[str], int]:
        """The cell's own setting first, then the same in the precisions of other runs.

        ([], 0) where it cannot be run, or no group has this data, model, algorithm and gc, and such numbers.
        """
        if overrides is None:
            return [], 0
        overrides = (*overrides, *scale)
        if overrides not in self._known:
            self._known[overrides] = self._compose(overrides) if self._can_be(overrides) else ([], 0)
        return self._known[overrides]

    def _can_be(self, overrides: tuple[str, ...]) -> bool:
        chosen = dict(override.partition("=")[::2] for override in overrides)
        chosen = _choices(chosen.get("experiment", "")) | chosen
        asked = [chosen.get(f"tags.{kind}", chosen.get(kind)) for kind in _KINDS]
        if not any(all(a in (None, b) for a, b in zip(asked, kinds, strict=True)) for kinds in self._kinds):
            return False
        numbers = {
            key: float(text) for key, text in chosen.items() if key.startswith(_HELD) and _NUMBER.fullmatch(text)
        }
        for key in numbers.keys() - self._values.keys():
            self._values[key] = {run.get(key) for run in self._runs if isinstance(run.get(key), int | float)}
        return all(number in self._values[key] for key, number in numbers.items() if counts(key))

    def _compose(self, overrides: tuple[str, ...]) -> tuple[list[str], int]:
        cfg = self._composer(overrides)
        found, own = [setting(cfg)], cfg.precision
        for precision in self._precisions:
            if precision != own:
                cfg.precision = precision
                found.append(setting(cfg))
        return found, cfg.rounds


@cache
def _choices(experiment: str) -> dict[str, str]:
    """The config files that an experiment chooses, by group."""
    defaults = _read(f"experiment/{experiment}").get("defaults", [])
    return {k.rpartition("/")[2]: v for entry in defaults if isinstance(entry, dict) for k, v in entry.items()}


def _scales(name: str) -> dict[str, dict[str, Any]]:
    """The scales that have overrides, of the study that makes a table's runs; the full one last."""
    scales = _read(f"study/{name}").get("study", {}).get("scales") or {}
    return {label: part for label, part in scales.items() if part.get("overrides")} | {FULL: {}}


def _read(name: str) -> dict[str, Any]:
    path = CONFIGS / f"{name}.yaml"
    return yaml.load(path.read_text(encoding="utf-8"), Loader) if path.is_file() else {}


def compare(paper: PaperTable, groups: Sequence[Group], settings: Settings, *, empty: bool = False) -> list[Table]:
    """The table beside the runs of each scale of its study that has any; with ``empty``, rows without runs too."""
    places = {(row, column): paper.command_overrides(row, column) for row in paper.rows for column in paper.columns}
    by_setting: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_setting[group.setting].append(group)
    full, tables = {asked for overrides in places.values() for asked in settings(overrides)[0]}, []
    for scale, part in _scales(paper.name).items():
        further = tuple(map(str, part.get("overrides") or ()))
        chosen = {"rows": {axis.label for axis in paper.rows}, "columns": {axis.label for axis in paper.columns}}
        chosen |= {key: choose(key, part[key], sorted(labels)) for key, labels in chosen.items() if part.get(key)}
        lines = []
        for place, overrides in places.items():
            if place[0].label not in chosen["rows"] or place[1].label not in chosen["columns"]:
                continue
            asked, rounds = settings(overrides, further)
            known = [group for name in asked for group in by_setting[name]]
            if scale != FULL and full.intersection(asked):  # the full table has the paper's setting with other rounds
                known = [group for group in known if group.planned == rounds]
            ended = [sum(run.has_ended for run in group.runs) for group in known]
            ranks = [(n > 0, g.planned == rounds, min(g.planned, rounds), n) for g, n in zip(known, ended, strict=True)]
            best = known[ranks.index(max(ranks))] if known else None
            lines.append({"table": paper.name, "scale": scale, **_cell(paper, *place, asked, rounds, best)})
        cells = pd.DataFrame(lines, dtype=object)
        if scale != FULL:  # no run is of two scales
            for group in set(cells["group"].dropna()):
                by_setting[group.setting].remove(group)
        if empty or cells["group"].notna().any():
            tables.append(_table(paper, cells, scale, further, empty=empty))
    return tables


def _cell(
    paper: PaperTable, row: Axis, column: Axis, asked: Sequence[str], rounds: int, group: Group | None
) -> dict[str, Any]:
    """What programs read of a cell, up to ``differs_in``; then what people read, and what the best and notes are of."""
    unit, measure = UNITS[paper.of("unit", row, column)], paper.of("measure", row, column)
    printed = paper.cells[row.label, column.label]
    wanted = measure is not None and paper.command_overrides(row, column) is not None and printed.is_result
    s = sample(group, measure, unit.factor) if group and measure else Sample({})
    is_full = group is not None and group.planned == rounds
    text = mean_text(s, unit, paper.seeds or 1) if group and measure else "no run" if wanted else "–"
    text += f" ({group.planned} of {rounds} rounds)" if group and s.mean is not None and not is_full else ""
    difference = None
    if s.mean is not None and not s.bound and printed.mean is not None and printed.note != "+":
        difference = s.mean - printed.mean
    differs = []
    if group and group.setting != asked[0]:
        differs.append(f"precision {group.runs[0].get('precision')}")
    for key, theirs in paper.settings(row, column).items() if group else ():
        if (ours := group.runs[0].get(key)) != theirs:  # type: ignore[union-attr]
            why = f": {paper.departures[key].rstrip('.')}" if key in paper.departures else ""
            differs.append(f"{key} {ours} (paper {theirs}{why})")
    return {
        "row": row.label, "column": column.label, "unit": unit.label,
        **s.record, "rounds": group.planned if group else None, "rounds_asked": rounds or None,
        "paper_mean": printed.mean, "paper_std": printed.std, "paper_note": printed.note,
        "difference": difference, "differs_in": "; ".join(differs),
        "group": group, "is_full": is_full, "wanted": wanted,
        "differences": differs, "higher": paper.of("higher_is_better", row, column),
        "ours_text": text, "ours_rank": unit.rank(s) if is_full else None,
        "paper_text": _printed(printed, unit), "paper_rank": None if printed.note else printed.mean,
        "difference_text": _difference(difference, math.hypot(s.std or 0.0, printed.std or 0.0), unit),
    }  # fmt: skip


def _printed(cell: Cell, unit: Unit) -> str:
    if cell.mean is None:
        return cell.note or "–"
    text = unit.text(cell.mean) + ("" if cell.std is None else f" ({unit.text(cell.std)})")
    return f"{text}+" if cell.note == "+" else f"{text}, {cell.note}" if cell.note else text


def _difference(number: float | None, scatter: float, unit: Unit) -> str:
    """``+1.44 (0.5 σ)``: σ are standard deviations, √(s² + s²) of both, or of the one that there is."""
    if number is None:
        return ""
    deviations = f" ({abs(number) / scatter:.1f} σ)" if scatter else ""
    return f"{'−' if number < 0 else '+'}{unit.text(abs(number))}{deviations}"


def _table(paper: PaperTable, cells: pd.DataFrame, scale: str, further: Sequence[str], *, empty: bool) -> Table:
    """Three lines a row: ours, the paper's and, where both have a number, the difference."""
    wanted, line = sum(cells["wanted"]), "row" if paper.methods_in == "columns" else "column"
    if not empty:
        runs = cells[cells["group"].notna()]
        cells = cells[cells["row"].isin(runs["row"]) & cells["column"].isin(runs["column"])].copy()
    for who in ("ours", "paper"):
        texts = cells.assign(text=cells[f"{who}_text"], rank=cells[f"{who}_rank"])
        cells[f"{who}_text"] = in_bold(texts, [line, "unit", "higher"])
    lines = []
    for row, part in cells.groupby("row", sort=False):
        lines += [[row, *part["ours_text"]], [Minor("paper"), *part["paper_text"]]]
        lines += [[Minor("difference"), *part["difference_text"]]] if any(part["difference_text"]) else []
    units = cells.groupby("column", sort=False)["unit"].agg(lambda labels: set(labels) - {"", "rounds"})
    header = [f"{column} ({labels.pop()})" if len(labels) == 1 else column for column, labels in units.items()]
    of_scale = "" if scale == FULL else f" (scale={scale}: {' '.join(further)})"
    return Table(
        name=paper.name if scale == FULL else f"{paper.name}_{scale}",
        title=f"{paper.paper}, {paper.place}: {paper.title}{of_scale}",
        frame=pd.DataFrame(lines, columns=["", *header], dtype=object),
        records=cells[cells["wanted"].astype(bool) | cells["group"].notna()].loc[:, :"differs_in"],
        notes=tuple(_notes(paper, cells[cells["group"].notna()], scale, wanted)),
    )


def _notes(paper: PaperTable, cells: pd.DataFrame, scale: str, wanted: int) -> Iterator[str]:
    """Source; in what our settings differ; what the cells lack, and the command that makes it."""
    yield f"Source: {paper.source}. {paper.note}".strip()
    rows = cells.explode("differences").groupby("differences", sort=False)["row"].unique()
    differs = [text + f" [{', '.join(where)}]" * (len(where) < cells["row"].nunique()) for text, where in rows.items()]
    settings = f"Ours differs in {'; '.join(differs)}." if differs else "No difference in the settings listed here."
    unstated = f" Not stated: {paper.unstated.strip().rstrip('.')}; ours are the experiment's."
    yield settings + unstated * bool(paper.unstated)
    lost = [f"{c.row}, {c.column}: {text}" for c in cells.itertuples() if (text := states(c.group.runs))]
    if lost:
        yield f"In no mean: {'; '.join(lost)}."
    study = f"python src/train.py -m study={paper.name}{'' if scale == FULL else f' scale={scale}'}"
    yield f"{sum(cells['wanted'])} of {wanted} cells have runs. All of them: {study}"
