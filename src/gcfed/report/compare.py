"""A paper's table beside our runs: each cell's overrides are composed, and runs of that setting are looked up."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pandas as pd
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from gcfed.report.groups import Group, Sample, sample
from gcfed.report.papers import Axis, Cell, PaperTable
from gcfed.report.tables import UNITS, Minor, Table, Unit, mark_best, mean_text, states
from gcfed.runs.folder import Loader
from gcfed.runs.identity import setting
from gcfed.utils.compose import Composer
from gcfed.utils.resolvers import ROOT

CONFIGS = ROOT / "configs"
FULL = "full"


@dataclass(frozen=True)
class Entry:
    """One cell: the paper's number and ours. ``group`` None: there is no run, and ``ours`` is None too."""

    row: str
    column: str
    paper: Cell
    unit: Unit
    higher_is_better: bool | None
    runnable: bool  # by us
    rounds: int  # that the cell asks for; 0 where no config of it was composed
    group: Group | None
    ours: Sample | None
    differences: tuple[str, ...]  # from the settings that the paper's file lists

    @property
    def difference(self) -> float | None:
        """Ours − the paper's; None where either has none or is a bound."""
        if self.ours is None or self.ours.mean is None or self.ours.bound or self.paper.mean is None:
            return None
        return None if self.paper.note == "+" else self.ours.mean - self.paper.mean

    @property
    def is_full(self) -> bool:
        return self.group is not None and self.group.planned == self.rounds


class Settings:
    """Composes the settings of a table's cells, as far as any of the groups can be one.

    Args:
        groups: those that will be looked up.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        folders = {path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*") if path.is_dir()}
        self._composer = Composer(_load, folders)
        self._found: dict[tuple[str, ...], tuple[str, int]] = {}
        self._known = {tuple(group.runs[0].get(f"tags.{kind}") for kind in _KINDS) for group in groups}

    def __call__(self, overrides: tuple[str, ...]) -> tuple[str, int] | None:
        """Setting and rounds; None where no group has this data, model, algorithm and gc, without composing."""
        chosen = dict(override.partition("=")[::2] for override in overrides)
        chosen = _choices(chosen.get("experiment", "")) | chosen
        asked = [chosen.get(kind) for kind in _KINDS]
        if not any(all(a in (None, b) for a, b in zip(asked, known, strict=True)) for known in self._known):
            return None
        if overrides not in self._found:
            cfg = self._composer(overrides)
            self._found[overrides] = setting(cfg), cfg.rounds
        return self._found[overrides]


_KINDS = ("data", "model", "algorithm", "gc")


@cache
def _choices(experiment: str) -> dict[str, str]:
    """The config files that an experiment chooses, by group."""
    path = CONFIGS / "experiment" / f"{experiment}.yaml"
    defaults = yaml.load(path.read_text(encoding="utf-8"), Loader)["defaults"] if path.is_file() else []
    return {k.rpartition("/")[2]: v for entry in defaults if isinstance(entry, dict) for k, v in entry.items()}


def _load(overrides: list[str]) -> DictConfig:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", overrides=overrides)


def scales_of(name: str) -> dict[str, tuple[str, ...]]:
    """The overrides of each scale of the study that makes a table's runs; the full one has none."""
    path = CONFIGS / "study" / f"{name}.yaml"
    scales = yaml.load(path.read_text(encoding="utf-8"), Loader)["study"].get("scales") if path.is_file() else None
    found = {label: tuple(map(str, scale.get("overrides") or ())) for label, scale in (scales or {}).items()}
    return {label: overrides for label, overrides in found.items() if overrides} | {FULL: ()}


def compare(paper: PaperTable, groups: Sequence[Group], settings: Settings, *, empty: bool = False) -> list[Table]:
    """The table beside the runs of each scale of its study that has any; with ``empty`` rows without runs too."""
    by_setting: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_setting[group.setting].append(group)
    taken: set[int] = set()
    tables = []
    full = {setting for setting, _ in _settings(paper, (), settings).values()}
    for scale, further in scales_of(paper.name).items():
        asked = _settings(paper, further, settings)
        entries = []
        for row in paper.rows:
            for column in paper.columns:
                wanted, rounds = asked.get((row.label, column.label), ("", 0))
                found = [group for group in by_setting[wanted] if id(group) not in taken]
                if scale != FULL and wanted in full:  # other rounds of the paper's setting are its own table's
                    found = [group for group in found if group.planned == rounds]
                best = max(found, key=lambda g: (g.has_ended, min(g.planned, rounds), len(g.runs)), default=None)
                entries.append(_entry(paper, row, column, rounds, best))
        taken |= {id(entry.group) for entry in entries if entry.group}
        if empty or any(entry.group for entry in entries):
            tables.append(_table(paper, entries, scale, further, empty=empty))
    return tables


def _settings(
    paper: PaperTable, further: tuple[str, ...], settings: Settings
) -> dict[tuple[str, str], tuple[str, int]]:
    """Setting and rounds of the cells that may have runs."""
    found = {}
    for row in paper.rows:
        for column in paper.columns:
            overrides = paper.command_overrides(row, column)
            if overrides is not None and paper.measure_of(row, column):
                if asked := settings((*overrides, *further)):
                    found[row.label, column.label] = asked
    return found


def _entry(paper: PaperTable, row: Axis, column: Axis, rounds: int, group: Group | None) -> Entry:
    unit, measure = UNITS[paper.unit_of(row, column)], paper.measure_of(row, column) or ""
    differences = ()
    if group:
        differences = tuple(_differences(paper, paper.settings(row, column), group))
    return Entry(
        row.label, column.label, paper.cells[row.label, column.label], unit, paper.higher_is_better_of(row, column),
        paper.command_overrides(row, column) is not None and bool(measure), rounds, group,
        sample(group, measure, unit.factor) if group else None, differences,
    )  # fmt: skip


def _differences(paper: PaperTable, theirs: dict[str, Any], group: Group) -> Iterator[str]:
    for key, wanted in theirs.items():
        if (ours := group.runs[0].get(key)) != wanted:
            why = f": {paper.departures[key].rstrip('.')}" if key in paper.departures else ""
            yield f"{key} {ours} (paper {wanted}{why})"


def _table(paper: PaperTable, entries: list[Entry], scale: str, further: tuple[str, ...], *, empty: bool) -> Table:
    rows, columns = _labels(paper.rows, entries, "row", empty), _labels(paper.columns, entries, "column", empty)
    at = {(e.row, e.column): e for e in entries if e.row in rows and e.column in columns}
    units = {c: {at[r, c].unit.label for r in rows} for c in columns}
    header = {c: f"{c} ({min(units[c])})" if len(units[c]) == 1 and units[c].isdisjoint(("", "rounds")) else c
              for c in columns}  # fmt: skip
    ours = _marked(at, rows, columns, paper, partial(_ours, seeds=paper.seeds or 1))
    theirs = _marked(at, rows, columns, paper, _theirs)
    lines = []
    for r in rows:
        lines.append([r, *(ours[r, c] for c in columns)])
        lines.append([Minor("paper"), *(theirs[r, c] for c in columns)])
        if any(at[r, c].difference is not None for c in columns):
            lines.append([Minor("difference"), *(_difference(at[r, c]) for c in columns)])
    scaled = "" if scale == FULL else f", scale={scale}"
    return Table(
        name=paper.name if scale == FULL else f"{paper.name}_{scale}",
        title=f"{paper.paper}, Table {paper.table}: {paper.title}{scaled}",
        frame=pd.DataFrame(lines, columns=["", *header.values()]),
        records=pd.DataFrame([_record(paper, scale, e) for e in at.values() if e.group or e.runnable]),
        notes=tuple(_notes(paper, list(at.values()), scale, further)),
    )


def _labels(axes: Sequence[Axis], entries: Sequence[Entry], kind: str, empty: bool) -> list[str]:
    return [axis.label for axis in axes if empty or any(e.group and getattr(e, kind) == axis.label for e in entries)]


def _ours(entry: Entry, seeds: int) -> tuple[str, float | None]:
    """The cell's text, and its number where it has a rank: at all rounds, and not a bound."""
    if entry.ours is None or entry.group is None:
        return ("no run" if entry.runnable else "–"), None
    text = mean_text(entry.ours, entry.unit, seeds)
    if entry.ours.mean is None:
        return text, None
    if not entry.is_full:
        return f"{text} ({entry.group.planned} of {entry.rounds} rounds)", None
    return text, None if entry.ours.bound else float(entry.unit.text(entry.ours.mean))


def _theirs(entry: Entry) -> tuple[str, float | None]:
    mean, std, note = entry.paper.mean, entry.paper.std, entry.paper.note
    if mean is None:
        return note or "–", None
    text = f"{entry.unit.text(mean)}{'' if std is None else f' ({entry.unit.text(std)})'}"
    return (f"{text}+" if note == "+" else f"{text}, {note}" if note else text), None if note else mean


def _marked(
    at: dict[tuple[str, str], Entry], rows: list[str], columns: list[str], paper: PaperTable, cell: Any
) -> dict[tuple[str, str], str]:
    """The cells' texts, the best method in bold where they all measure the same."""
    lines = [[(r, c) for r in rows] for c in columns]
    if paper.methods_in == "columns":
        lines = [[(r, c) for c in columns] for r in rows]
    found: dict[tuple[str, str], str] = {}
    for line in lines:
        kinds = {(at[place].unit, at[place].higher_is_better) for place in line}
        texts, numbers = zip(*(cell(at[place]) for place in line), strict=True)
        found |= dict(zip(line, mark_best(texts, numbers, kinds.pop()[1] if len(kinds) == 1 else None), strict=True))
    return found


def _difference(entry: Entry) -> str:
    """``+1.44 (0.5 σ)``: σ are standard deviations, √(s² + s²) of both, or of the one that there is."""
    if entry.difference is None or entry.ours is None:
        return ""
    scatter = math.hypot(entry.ours.std or 0.0, entry.paper.std or 0.0)
    deviations = f" ({abs(entry.difference) / scatter:.1f} σ)" if scatter else ""
    return f"{'−' if entry.difference < 0 else '+'}{entry.unit.text(abs(entry.difference))}{deviations}"


def _record(paper: PaperTable, scale: str, entry: Entry) -> dict[str, Any]:
    empty = dict.fromkeys(("mean", "std", "bound", "seeds", "values"))
    return {
        "table": paper.name, "scale": scale, "row": entry.row, "column": entry.column, "unit": entry.unit.label,
        **(entry.ours.record if entry.ours else empty), "rounds": entry.group.planned if entry.group else None,
        "rounds_asked": entry.rounds or None, "paper_mean": entry.paper.mean, "paper_std": entry.paper.std,
        "paper_note": entry.paper.note, "difference": entry.difference, "differs_in": "; ".join(entry.differences),
    }  # fmt: skip


def _notes(paper: PaperTable, entries: list[Entry], scale: str, further: tuple[str, ...]) -> Iterator[str]:
    yield f"Source: {paper.source}. {paper.note}".strip()
    found = [entry for entry in entries if entry.group]
    told: dict[str, set[str]] = defaultdict(set)
    for entry in found:
        for difference in entry.differences:
            told[difference].add(entry.row)
    differences = [f"{d} [{', '.join(sorted(its))}]" for d, its in told.items() if len(its) < len({e.row for e in found})]
    differences = [d for d, its in told.items() if len(its) == len({e.row for e in found})] + differences
    listed = f"Ours differs in {'; '.join(differences)}." if differences else "No difference in the settings listed here."
    unstated = f" The paper does not state {paper.unstated.strip().rstrip('.')}; ours are the experiment's."
    yield listed + unstated * bool(paper.unstated)
    lost = [f"{e.row}, {e.column}: {text}" for e in found if e.group and (text := states(e.group.runs))]
    if lost:
        yield f"In no mean: {'; '.join(lost)}."
    few = sum(e.group is not None and len(e.group.runs) < (paper.seeds or 1) for e in found)
    gaps = sum(e.runnable and not e.group and e.paper.mean is not None for e in entries)
    short = sum(not e.is_full for e in found)
    lacks = {"without a run": gaps, "with fewer seeds than the paper's": few, "with other rounds": short}
    if any(lacks.values()):
        told = ", ".join(f"{count} {what}" for what, count in lacks.items() if count)
        study = f"study={paper.name}{'' if scale == FULL else f' scale={scale}'}"
        known = (CONFIGS / "study" / f"{paper.name}.yaml").is_file()
        yield f"Cells of the rows and columns above: {told}." + f" To fill them: python src/train.py -m {study}" * known
    yield from _order(paper, entries)


def _order(paper: PaperTable, entries: list[Entry]) -> Iterator[str]:
    """Spearman's ρ between our order and the paper's, where three methods or more can be compared."""
    along = "column" if paper.methods_in == "rows" else "row"
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for entry in entries:
        if entry.is_full and entry.difference is not None and entry.ours is not None and not entry.paper.note:
            lines[getattr(entry, along)].append((entry.ours.mean or 0.0, entry.paper.mean or 0.0))
    ranks = {label: pd.DataFrame(pairs).rank().corr().iloc[0, 1] for label, pairs in lines.items() if len(pairs) > 2}
    if ranks:
        told = "; ".join(f"{label}: {rho:.2f} of {len(lines[label])}" for label, rho in ranks.items())
        yield f"Order of the methods, Spearman's ρ with the paper's: {told}."
