"""Tables of any runs, without a paper: measures by method and federation, and the list of all runs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gcfed.report.groups import Group, federation_of
from gcfed.report.measures import FORMS, measured, parse, value
from gcfed.report.runs import DIVERGED, FAILED, FINISHED, UNFINISHED, Run
from gcfed.report.sample import AGAIN, BOUND, ENDED, MARK, Sample, mean_std, numbers, sample
from gcfed.report.tables import Cell, Row, Table, marked
from gcfed.report.units import unit

#: measure → (title, unit, whether more is better)
MEASURES: Mapping[str, tuple[str, str, bool | None]] = {
    "mean:test/acc[10]": ("Test accuracy, mean over the last 10 rounds", "percent", True),
    "max:test/acc": ("Best test accuracy", "percent", True),
    "last:test/acc": ("Test accuracy at the end", "percent", True),
    "last:test/relative_error": ("Relative error at the end", "none", False),
    "last:test/loss": ("Test loss at the end", "none", False),
    "sum:comm/down_bytes": ("Sent to the clients", "GB", False),
    "sum:comm/up_bytes": ("Sent by the clients", "GB", False),
    "time/round_s": ("Median time of a round", "seconds", False),
}
_TROUBLE = (FAILED, DIVERGED, UNFINISHED, FINISHED)


@dataclass(frozen=True)
class _Measure:
    measure: str
    title: str
    unit: str
    higher_is_better: bool | None


def by_measure(
    groups: Sequence[Group],
    measures: Sequence[str] | None = None,
    shown: Callable[[Run], str] = lambda run: run.folder.name,
) -> list[Table]:
    """A table a measure, methods by federations; of one federation a single table, methods by measures.

    Args:
        measures: as :func:`gcfed.report.measures.value` reads them; None: :data:`MEASURES` and the rounds to each of
            the runs' targets that one of them reached. What no run has is left out.
        shown: gives a run's folder as a reader may see it.

    Raises:
        ValueError: a measure is not understood.
    """
    chosen = list(_standard(groups)) if measures is None else [_described(measure) for measure in measures]
    samples = {m.measure: [sample(g.runs, m.measure, unit(m.unit).factor) for g in groups] for m in chosen}
    known = [m for m in chosen if any(s.values for s in samples[m.measure])]
    federations = list(dict.fromkeys(group.federation for group in groups))
    if not known:
        return []
    if len(federations) == 1:
        tables = [_of_one_federation(groups, known, samples)]
    else:
        tables = [_of_one_measure(groups, m, samples[m.measure]) for m in known]
    again = _again(groups, samples[known[0].measure], shown)
    return [replace(table, notes=(*table.notes, *again)) for table in tables]


def unmeasured(runs: Iterable[Run], measures: Iterable[str]) -> tuple[str, ...]:
    """Which of the measures no run has that came to its end, and why, in a sentence."""
    ended = [run for run in runs if run.state in ENDED]
    lost = [m for m in measures if not any(_has(run, m) for run in ended)]
    if not lost:
        return ()
    if not ended:
        return (f"measures={','.join(lost)}: no run has come to its end yet",)
    return (f"measures: no run has {', '.join(lost)}. {FORMS}",)


def _has(run: Run, measure: str) -> bool:
    """Whether a table has a number of the run: where a target was not reached, a bound."""
    parts = parse(measure)
    return value(run, measure) is not None or (parts.is_target and len(run.curve(parts.column)[0]) > 0)


def _standard(groups: Sequence[Group]) -> Iterator[_Measure]:
    runs = [run for group in groups for run in group.runs]
    has_accuracy = any("test/acc" in run.columns for run in runs)
    for measure in MEASURES:
        if measure != "last:test/loss" or not has_accuracy:
            yield _described(measure)
        if measure == "last:test/acc":
            targets = sorted({float(target) for run in runs for target in run.get("targets") or ()})
            yield from map(_described, (f"rounds:test/acc>={t:g}" for t in targets if any(_reached(runs, t))))


def _reached(runs: Sequence[Run], target: float) -> Iterator[bool]:
    return (value(run, f"rounds:test/acc>={target:g}") is not None for run in runs if run.state in ENDED)


def _described(measure: str) -> _Measure:
    if measure in MEASURES:
        return _Measure(measure, *MEASURES[measure])
    parts = parse(measure)
    if parts.is_target:
        by = "" if parts.column == "test/acc" else f" by {parts.column}"
        shown = f"{100 * parts.number:g} %" if "acc" in parts.column else f"{parts.number:g}"
        return _Measure(measure, f"Rounds to {shown}{by}", "rounds", False)
    column = re.sub(r"/[\d.]+$", "", parts.column)  # bytes_to_target/0.8 is one of bytes_to_target
    if column.startswith("acc_diff/"):
        name, higher = "percent", None  # of curves, neither good nor bad
    elif column.endswith(("_s", "_seconds", "seconds_to_target")):
        name, higher = "seconds", False
    else:
        kinds = {"bytes": ("GB", False), "acc": ("percent", True), "loss": ("none", False), "error": ("none", False)}
        name, higher = next((kind for part, kind in kinds.items() if part in column), ("none", None))
    return _Measure(measure, measure, name, higher)


def _title(measure: _Measure) -> str:
    label = unit(measure.unit).label
    return f"{measure.title} ({label})" if label and label != "rounds" else measure.title


def _of_one_federation(
    groups: Sequence[Group], measures: Sequence[_Measure], samples: Mapping[str, Sequence[Sample]]
) -> Table:
    columns = [_column(samples[m.measure], m) for m in measures]
    return Table(
        name="measures",
        title="All measures",
        header=("", *map(_title, measures)),
        rows=tuple(Row((Cell(group.method), *cells)) for group, *cells in zip(groups, *columns, strict=True)),
        notes=_legend([s for m in measures for s in samples[m.measure]]),
        records=tuple(r for m in measures for r in _records(groups, m, samples[m.measure])),
    )


def _of_one_measure(groups: Sequence[Group], measure: _Measure, samples: Sequence[Sample]) -> Table:
    methods = list(dict.fromkeys(group.method for group in groups))
    federations = list(dict.fromkeys(group.federation for group in groups))
    cells: dict[tuple[str, str], Cell] = {}
    for federation in federations:
        here = [(group, s) for group, s in zip(groups, samples, strict=True) if group.federation == federation]
        column = _column([s for _, s in here], measure)
        cells |= {(group.method, federation): cell for (group, _), cell in zip(here, column, strict=True)}
    return Table(
        name=_stem(measure.measure),
        title=_title(measure),
        header=("", *(federation or "the other" for federation in federations)),
        rows=tuple(
            Row((Cell(method), *(cells.get((method, federation), Cell("")) for federation in federations)))
            for method in methods
        ),
        notes=_legend(samples),
        records=tuple(_records(groups, measure, samples)),
    )


def _stem(measure: str) -> str:
    text = "".join(character if character.isalnum() or character == "." else "_" for character in measure)
    return "_".join(filter(None, text.split("_")))


def _column(samples: Sequence[Sample], measure: _Measure) -> list[Cell]:
    most, shown = max(len(s.runs) + len(s.without) for s in samples), unit(measure.unit)
    cells = [_cell(s, measure, most) for s in samples]
    values = [None if s.mean is None or s.at_least else float(shown.text(s.mean)) for s in samples]
    return marked(cells, values, measure.higher_is_better)


def _cell(s: Sample, measure: _Measure, most: int) -> Cell:
    shown = unit(measure.unit)
    runs = [f"seed {run.seed}: {shown.text(number)}" for run, number in zip(s.runs, s.values, strict=True)]
    troubled = [f"seed {run.seed}: {run.state} {run.note}" for run in (*s.diverged, *s.uncounted)]
    title = "; ".join([*_of_tests(s, measure), *runs, *troubled])
    if s.mean is not None:
        return Cell(mean_std(s, shown, wanted=most), title=title, state=DIVERGED if s.diverged else "")
    states = {run.state for run in (*s.without, *s.uncounted)}
    state = next((state for state in (DIVERGED, FAILED, UNFINISHED) if state in states), "")
    return Cell(state or "–", title=title, state=state)


def _of_tests(s: Sample, measure: _Measure) -> list[str]:
    """Of how many measurements a mean over the last rounds is: ten rounds are one test where every tenth is tested."""
    parts = parse(measure.measure)
    if not (s.runs and parts.how == "mean" and math.isfinite(parts.number)):
        return []
    counts = sorted({len(measured(run, parts)) for run in s.runs})
    return [f"mean of {' or '.join(map(str, counts))} test{'s' * (counts != [1])}"]


def _legend(samples: Sequence[Sample]) -> tuple[str, ...]:
    told = "Mean (sample standard deviation) over seeds; [n]: of n seeds, where others of the column have more."
    lost = len({run.folder for s in samples for run in s.uncounted})
    if any(s.diverged for s in samples):
        told += f" {MARK}: a run diverged; it is in the mean unless its value is not finite."
    if lost:
        told += (
            f" {lost} failed or unfinished run{'s are' if lost > 1 else ' is'} in no mean: see the table of all runs."
        )
    return (told, BOUND) if any(s.at_least for s in samples) else (told,)


def _again(groups: Sequence[Group], samples: Sequence[Sample], shown: Callable[[Run], str]) -> tuple[str, ...]:
    """Names the runs that count nowhere since another one has their seed."""
    named = [
        f"{group.label}, seed {run.seed}: {shown(run)} ({run.state})"
        for group, s in zip(groups, samples, strict=True)
        for run, _ in s.repeated
    ]
    return (f"{AGAIN}: {'; '.join(named)}.",) if named else ()


def _records(groups: Sequence[Group], measure: _Measure, samples: Sequence[Sample]) -> Iterator[dict[str, object]]:
    for group, s in zip(groups, samples, strict=True):
        base = {"measure": measure.measure, "method": group.method, "federation": group.federation}
        yield {**base, "unit": unit(measure.unit).label, **numbers(s)}


def all_runs(runs: Sequence[Run], groups: Sequence[Group], shown: Callable[[Run], str]) -> Table:
    """Every run, those that did not end well first. ``shown`` gives a run's folder as a reader may see it."""
    of_run = {run.folder: group for group in groups for run in group.runs}
    ordered = sorted(runs, key=lambda run: _TROUBLE.index(run.state))
    names = {"final": "last:test/acc", "best": "max:test/acc"}
    if not any("test/acc" in run.columns for run in runs):
        names = {"final loss": "last:test/loss", "best loss": "min:test/loss"}
    percent = "final" in names
    records = []
    for run in ordered:
        group = of_run.get(run.folder)
        records.append(
            {
                "state": run.state,
                "method": group.method if group else "?",
                "federation": ", ".join(federation_of(group.setting)[:-1]) if group else "?",
                "seed": run.seed if group else None,
                "rounds": run.rounds,
                "planned": run.get("rounds"),
                **{name: value(run, measure) for name, measure in names.items()},
                "seconds": value(run, "sum:time/round_s"),
                "folder": shown(run),
                "note": run.note,
            }
        )
    rows = [
        Row(
            (
                Cell(str(r["state"]), state="" if r["state"] == FINISHED else str(r["state"])),
                *(Cell(_text(r[key])) for key in ("method", "federation", "seed")),
                Cell(f"{r['rounds']} of {_text(r['planned'])}"),
                *(Cell(_text(r[name], ".2%" if percent else ".4g")) for name in names),
                *(Cell(_text(r[key], ".0f")) for key in ("seconds", "folder", "note")),
            )
        )
        for r in records
    ]
    counts = ", ".join(f"{sum(run.state == state for run in runs)} {state}" for state in reversed(_TROUBLE))
    return Table(
        name="runs",
        title="All runs",
        header=("state", "method", "federation", "seed", "rounds", *names, "seconds", "folder", "note"),
        rows=tuple(rows),
        notes=(f"{len(runs)} runs: {counts}. Seconds are those of all rounds together.",),
        records=tuple(records),
    )


def _text(item: object, digits: str = "") -> str:
    return "–" if item is None else f"{item:{digits}}" if isinstance(item, float) else str(item)
