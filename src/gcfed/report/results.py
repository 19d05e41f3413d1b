"""Tables of any runs: methods by measures, and every run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

import pandas as pd

from gcfed.report.groups import Group
from gcfed.report.names import SYMBOLS, described
from gcfed.report.tables import MEASURES, Table, describe, in_bold, mean_text, states
from gcfed.report.verdict import Verdict
from gcfed.runs.folder import STATES, Run
from gcfed.runs.measures import value

#: Of each run: measure and form.
_RUN = {
    "final": ("last:test/acc", "{:.2%}"), "best": ("max:test/acc", "{:.2%}"),
    "error": ("last:test/relative_error", "{:.3g}"), "seconds": ("sum:time/round_s", "{:.0f}"),
}  # fmt: skip
NOTE = (
    "Mean (sample standard deviation) over seeds, the best in bold. [n of m]: of n seeds, where there should be m; †: "
    "a run diverged, and is in the mean unless its value is not finite; +: a run that did not reach the target counts "
    "with all its rounds or bytes, so that the mean is a lower bound."
)
EQUAL = (
    " Methods are ranked over equal seeds, their differences taken seed by seed, with a 95 % interval (Student's t) "
    "that knows nothing of the other methods."
)


def usual(groups: Sequence[Group]) -> list[str]:
    """The measures that are shown unless others are asked for: with rounds and bytes to each target that a run set
    itself and one of them reached."""
    runs = [run for group in groups for run in group.runs if run.has_ended]
    asked = sorted({float(target) for run in runs for target in run.get("targets") or ()})
    reached = [t for t in asked if any(value(run, f"rounds:test/acc>={t:g}") is not None for run in runs)]
    return [*MEASURES, *(f"{cost}{t:g}" for cost in ("rounds:test/acc>=", "bytes_to_target/") for t in reached)]


def measured(
    groups: Sequence[Group], measures: Iterable[str], name: str, title: str, verdict: Verdict | None = None
) -> Table | None:
    """A row a group, a column a measure; None where no run has any. Each federation's best is in bold.

    With a verdict over the seeds that it is of, and with the differences in its measure.
    """
    lines, columns = [], {measure: describe(measure) for measure in measures}
    for column, (i, group) in product(columns.values(), enumerate(groups)):
        s = verdict.equal(i, column.of(group)) if verdict else column.of(group)
        rank = column.unit.rank(s) if verdict is None or i < verdict.ranked else None
        about = {**group.names, "measure": column.measure, "unit": column.unit.label, **s.record}
        about |= verdict.record(i) if verdict and column.measure == verdict.column.measure else {}
        lines.append(about | {"group": i, "sample": s, "n": len(s.values), "rank": rank, "higher": column.higher})
    long = pd.DataFrame(lines, dtype=object)
    long = long[long.groupby("measure")["mean"].transform("count") > 0] if lines else long
    if long.empty:
        return None
    long["most"] = long.groupby(["measure", "federation"])["n"].transform("max")
    first = long["measure"].iloc[0]  # in whose column alone it stands why a run has no number
    long["text"] = [
        mean_text(line.sample, columns[line.measure].unit, line.most)
        if line.measure == first or groups[line.group].has_ended
        else "–"
        for line in long.itertuples()
    ]
    long["text"] = in_bold(long, ["measure", "federation"])
    texts: dict[str, Sequence[str]] = {"federation": [], "method": [group.method for group in groups]}
    for measure, part in long.groupby("measure", sort=False):
        texts[columns[measure].heading] = [*part["text"]]
        texts |= verdict.texts() if verdict and measure == verdict.column.measure else {}
    places, notes = pd.Series([group.federation for group in groups]), [NOTE + EQUAL * bool(verdict)]
    if places.nunique() > 1:
        texts["federation"] = [*places.mask(places == places.shift(), "")]
    else:
        del texts["federation"]
        told = [key for key in SYMBOLS if key.startswith(("client.", "gc.", "methods."))]  # and not by the federation
        values = {key: {str(group.runs[0].leaves.get(key, "")) for group in groups} for key in told}
        common = [described(key, *texts) for key, texts in values.items() if len(texts) == 1 and any(texts)]
        notes[0] += f" All: {', '.join(common)}." * bool(common)
    if lost := [f"{group.label}: {text}" for group in groups if (text := states(group.runs))]:
        notes.append(f"In no mean: {'; '.join(lost)}.")
    if again := [f"{group.method}, seed {run.seed}: {run.folder.name}" for group in groups for run in group.repeated]:
        notes.append(
            f"Further runs of a seed; the one that measured the most counts, of equals the last: {'; '.join(again)}."
        )
    records = long[long["mean"].notna()].drop(columns=["group", "sample", "n", "rank", "higher", "most", "text"])
    return Table(name, title, pd.DataFrame(texts, dtype=object), records, tuple(notes))


def all_runs(runs: Sequence[Run], groups: Sequence[Group], places: Mapping[Run, str]) -> Table:
    """Every run with its place, those that did not end well first."""
    names = {run: group for group in groups for run in (*group.runs, *group.repeated)}
    lines = []
    for run in sorted(runs, key=lambda run: -STATES.index(run.state)):
        method, federation = (names[run].method, names[run].federation) if run in names else ("?", "?")
        about = {"state": run.state, "method": method, "federation": federation, "seed": run.seed}
        about |= {"rounds": f"{run.rounds} of {run.planned}"}
        numbers = {name: value(run, measure) for name, (measure, _) in _RUN.items()}
        lines.append({**about, **numbers, "folder": places[run], "note": run.note})
    records = pd.DataFrame(lines, dtype=object)
    frame = records.copy()
    for name, (_, form) in _RUN.items():
        frame[name] = ["–" if number is None else form.format(number) for number in records[name]]
    frame = frame.loc[:, (frame != "–").any()].astype(str)
    return Table("runs", "All runs", frame, records, ("Seconds are those of all rounds together.",))
