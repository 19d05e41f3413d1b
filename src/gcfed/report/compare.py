"""A paper's table beside our runs: each cell's overrides are composed, and runs of that setting are looked up."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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
_KINDS = ("data", "model", "algorithm", "gc")


class Settings:
    """Setting and rounds that a cell's overrides ask for, composed only where one of the groups can be its runs."""

    def __init__(self, groups: Sequence[Group]) -> None:
        folders = {path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*") if path.is_dir()}
        self._composer = Composer(_load, folders)
        self._found: dict[tuple[str, ...], tuple[str, int]] = {}
        self._known = {tuple(group.runs[0].get(f"tags.{kind}") for kind in _KINDS) for group in groups}

    def __call__(self, overrides: tuple[str, ...]) -> tuple[str, int] | None:
        """None where no group has this data, model, algorithm and gc."""
        chosen = dict(override.partition("=")[::2] for override in overrides)
        chosen = _choices(chosen.get("experiment", "")) | chosen
        asked = [chosen.get(kind) for kind in _KINDS]
        if not any(all(a in (None, b) for a, b in zip(asked, known, strict=True)) for known in self._known):
            return None
        if overrides not in self._found:
            cfg = self._composer(overrides)
            self._found[overrides] = setting(cfg), cfg.rounds
        return self._found[overrides]


def _load(overrides: list[str]) -> DictConfig:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", overrides=overrides)


@cache
def _choices(experiment: str) -> dict[str, str]:
    """The config files that an experiment chooses, by group."""
    path = CONFIGS / "experiment" / f"{experiment}.yaml"
    defaults = yaml.load(path.read_text(encoding="utf-8"), Loader)["defaults"] if path.is_file() else []
    return {k.rpartition("/")[2]: v for entry in defaults if isinstance(entry, dict) for k, v in entry.items()}


@dataclass(frozen=True)
class Entry:
    """One cell: the paper's number and ours, in ``unit``.

    Attributes:
        runnable: by us.
        rounds: that the cell asks for.
        group: the cell's runs, and ``ours`` what they have; None where there is no run.
        differences: of its setting from what the paper's file lists.
    """

    paper: Cell
    unit: Unit
    higher_is_better: bool | None
    runnable: bool
    rounds: int
    group: Group | None
    ours: Sample | None
    differences: tuple[str, ...]

    @property
    def is_full(self) -> bool:
        return self.group is not None and self.group.planned == self.rounds

    @property
    def difference(self) -> float | None:
        """Ours − the paper's; None where either has no number or a bound."""
        known = self.ours and self.ours.mean is not None and not self.ours.bound and self.paper.note != "+"
        return self.ours.mean - self.paper.mean if known and self.paper.mean is not None else None  # type: ignore


Entries = dict[tuple[str, str], Entry]
_Cell = tuple[str, float | None]  # its text, and its number where it can be the best of its line


def compare(paper: PaperTable, groups: Sequence[Group], settings: Settings, *, empty: bool = False) -> list[Table]:
    """The table beside the runs of each scale of its study that has any; with ``empty``, rows without runs too."""
    by_setting: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_setting[group.setting].append(group)
    full, tables = {asked[0] for asked in _asked(paper, (), settings).values()}, []
    for scale, further in _scales(paper.name).items():
        entries: dict[tuple[Axis, Axis], Entry] = {}
        for place, (wanted, rounds) in _asked(paper, further, settings).items():
            found = by_setting[wanted]
            if scale != FULL and wanted in full:  # the paper's own setting with other rounds is of its full table
                found = [group for group in found if group.planned == rounds]
            best = max(found, key=lambda g: (g.has_ended, min(g.planned, rounds), len(g.runs)), default=None)
            entries[place] = _entry(paper, *place, rounds, best)
        if scale != FULL:  # no run is of two scales
            for entry in entries.values():
                if entry.group in (its := by_setting[entry.group.setting if entry.group else ""]):
                    its.remove(entry.group)
        if empty or any(entry.group for entry in entries.values()):
            tables.append(_table(paper, entries, scale, empty=empty))
    return tables


def _scales(name: str) -> dict[str, tuple[str, ...]]:
    """Each scale's overrides, of the study that makes a table's runs, where it has any; the full one last."""
    path = CONFIGS / "study" / f"{name}.yaml"
    scales = yaml.load(path.read_text(encoding="utf-8"), Loader)["study"].get("scales") if path.is_file() else None
    changed = {label: tuple(map(str, scale.get("overrides") or ())) for label, scale in (scales or {}).items()}
    return {label: overrides for label, overrides in changed.items() if overrides} | {FULL: ()}


def _asked(paper: PaperTable, further: tuple[str, ...], settings: Settings) -> dict[tuple[Axis, Axis], tuple[str, int]]:
    """Setting and rounds of the cells by row and column; ("", 0) where there can be no run."""
    commands = {(r, c): paper.command_overrides(r, c) for r in paper.rows for c in paper.columns}
    return {place: (o is not None and settings((*o, *further))) or ("", 0) for place, o in commands.items()}


def _entry(paper: PaperTable, row: Axis, column: Axis, rounds: int, group: Group | None) -> Entry:
    unit, measure = UNITS[paper.unit_of(row, column)], paper.measure_of(row, column)
    differences = []
    for key, theirs in paper.settings(row, column).items() if group else ():
        if (ours := group.runs[0].get(key)) != theirs:  # type: ignore[union-attr]
            why = f": {paper.departures[key].rstrip('.')}" if key in paper.departures else ""
            differences.append(f"{key} {ours} (paper {theirs}{why})")
    return Entry(
        paper=paper.cells[row.label, column.label],
        unit=unit,
        higher_is_better=paper.higher_is_better_of(row, column),
        runnable=measure is not None and paper.command_overrides(row, column) is not None,
        rounds=rounds,
        group=group,
        ours=sample(group, measure, unit.factor) if group and measure else None,
        differences=tuple(differences),
    )


def _table(paper: PaperTable, entries: Mapping[tuple[Axis, Axis], Entry], scale: str, *, empty: bool) -> Table:
    rows = [r.label for r in paper.rows if empty or any(e.group for (row, _), e in entries.items() if row is r)]
    columns = [c.label for c in paper.columns if empty or any(e.group for (_, col), e in entries.items() if col is c)]
    at = {(r.label, c.label): e for (r, c), e in entries.items() if r.label in rows and c.label in columns}
    units = {c: {at[r, c].unit.label for r in rows} - {"", "rounds"} for c in columns}
    ours = _marked(at, paper, rows, columns, lambda entry: _ours(entry, paper.seeds or 1))
    theirs = _marked(at, paper, rows, columns, _theirs)
    lines: list[list[str]] = []
    for r in rows:
        lines.append([r, *(ours[r, c] for c in columns)])
        lines.append([Minor("paper"), *(theirs[r, c] for c in columns)])
        if any(at[r, c].difference is not None for c in columns):
            lines.append([Minor("difference"), *(_difference(at[r, c]) for c in columns)])
    header = [f"{c} ({units[c].pop()})" if len(units[c]) == 1 else c for c in columns]
    of_scale = "" if scale == FULL else f", scale={scale}"
    return Table(
        name=paper.name if scale == FULL else f"{paper.name}_{scale}",
        title=f"{paper.paper}, Table {paper.table}: {paper.title}{of_scale}",
        frame=pd.DataFrame(lines, columns=["", *header]),
        records=pd.DataFrame([_record(paper, scale, *place, e) for place, e in at.items() if e.runnable]),
        notes=tuple(_notes(paper, at, scale, sum(e.runnable and e.paper != Cell() for e in entries.values()))),
    )


def _ours(entry: Entry, seeds: int) -> _Cell:
    """A number can be the best if it is of all rounds and no bound."""
    if entry.ours is None or entry.group is None:
        return ("no run" if entry.runnable else "–"), None
    text, mean = mean_text(entry.ours, entry.unit, seeds), entry.ours.mean
    if mean is None or entry.is_full:
        return text, None if mean is None or entry.ours.bound else float(entry.unit.text(mean))
    return f"{text} ({entry.group.planned} of {entry.rounds} rounds)", None


def _theirs(entry: Entry) -> _Cell:
    mean, std, note = entry.paper.mean, entry.paper.std, entry.paper.note
    if mean is None:
        return note or "–", None
    text = f"{entry.unit.text(mean)}{'' if std is None else f' ({entry.unit.text(std)})'}"
    return (f"{text}+" if note == "+" else f"{text}, {note}" if note else text), None if note else mean


def _marked(
    at: Entries,
    paper: PaperTable,
    rows: list[str],
    columns: list[str],
    cell: Callable[[Entry], _Cell],
) -> dict[tuple[str, str], str]:
    """The cells' texts, the best method in bold where all of its line measure the same."""
    lines = [[(r, c) for r in rows] for c in columns]
    if paper.methods_in == "columns":
        lines = [[(r, c) for c in columns] for r in rows]
    found: dict[tuple[str, str], str] = {}
    for line in lines:
        kinds = {(at[place].unit, at[place].higher_is_better) for place in line}
        texts, numbers = zip(*(cell(at[place]) for place in line), strict=True)
        found |= zip(line, mark_best(texts, numbers, kinds.pop()[1] if len(kinds) == 1 else None), strict=True)
    return found


def _difference(entry: Entry) -> str:
    """``+1.44 (0.5 σ)``: σ are standard deviations, √(s² + s²) of both, or of the one that there is."""
    if entry.difference is None or entry.ours is None:
        return ""
    scatter = math.hypot(entry.ours.std or 0.0, entry.paper.std or 0.0)
    deviations = f" ({abs(entry.difference) / scatter:.1f} σ)" if scatter else ""
    return f"{'−' if entry.difference < 0 else '+'}{entry.unit.text(abs(entry.difference))}{deviations}"


def _record(paper: PaperTable, scale: str, row: str, column: str, entry: Entry) -> dict[str, Any]:
    ours = entry.ours.record if entry.ours else dict.fromkeys(("mean", "std", "bound", "seeds", "values"))
    rounds = {"rounds": entry.group.planned if entry.group else None, "rounds_asked": entry.rounds or None}
    theirs = {"paper_mean": entry.paper.mean, "paper_std": entry.paper.std, "paper_note": entry.paper.note}
    place = {"table": paper.name, "scale": scale, "row": row, "column": column, "unit": entry.unit.label}
    return place | ours | rounds | theirs | {"difference": entry.difference, "differs_in": "; ".join(entry.differences)}


def _notes(paper: PaperTable, at: Entries, scale: str, cells: int) -> Iterator[str]:
    """Source; in what our settings differ; what the cells lack, and the command that makes it; the order of methods."""
    yield f"Source: {paper.source}. {paper.note}".strip()
    found = {place: (entry, entry.group) for place, entry in at.items() if entry.group}
    rows: dict[str, dict[str, None]] = defaultdict(dict)
    for (row, _), (entry, _) in found.items():
        for difference in entry.differences:
            rows[difference][row] = None
    everywhere = {row for row, _ in found}
    told = [d + f" [{', '.join(its)}]" * (its.keys() != everywhere) for d, its in rows.items()]
    differs = f"Ours differs in {'; '.join(told)}." if told else "No difference in the settings listed here."
    unstated = f" Not stated: {paper.unstated.strip().rstrip('.')}; ours are the experiment's."
    yield differs + unstated * bool(paper.unstated)
    lost = [f"{', '.join(place)}: {text}" for place, (_, group) in found.items() if (text := states(group.runs))]
    if lost:
        yield f"In no mean: {'; '.join(lost)}."
    wanted = {"fewer seeds than the paper's": sum(len(g.runs) < (paper.seeds or 1) for _, g in found.values())}
    wanted |= {"other rounds": sum(not entry.is_full for entry, _ in found.values())}
    few = "".join(f", {count} with {what}" for what, count in wanted.items() if count)
    study = f"python src/train.py -m study={paper.name}{'' if scale == FULL else f' scale={scale}'}"
    yield f"{len(found)} of {cells} cells have runs{few}. All of them: {study}"
    orders = []
    for label in dict.fromkeys(place[paper.methods_in == "rows"] for place in found):
        line = [e for place, (e, _) in found.items() if label in place and e.is_full and not e.paper.note]
        pairs = [(e.difference + e.paper.mean, e.paper.mean) for e in line if e.difference is not None and e.paper.mean]
        if len(pairs) > 2:
            orders.append(f"{label}: {pd.DataFrame(pairs).rank().corr().iloc[0, 1]:.2f} of {len(pairs)}")
    if orders:
        yield f"Order of the methods, Spearman's ρ with the paper's: {'; '.join(orders)}."
