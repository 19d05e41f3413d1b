"""One measure over the seeds of one setting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from gcfed.report.measures import parse, value
from gcfed.report.runs import DIVERGED, FAILED, FINISHED, UNFINISHED, Run
from gcfed.report.units import Unit

ENDED = (FINISHED, DIVERGED)
MARK = "†"  # a run diverged
AGAIN = "Further runs of one seed (the last one to end counts)"
BOUND = "+: a run that did not reach the target counts with all its rounds, so that the mean is a lower bound."


class Repeat(NamedTuple):
    """A further run of a seed; ``difference``: its value − that of the run that counts, None where either has none."""

    run: Run
    difference: float | None


@dataclass(frozen=True)
class Sample:
    """Runs that differ by seed only, and what a measure says of them.

    Attributes:
        runs: those that count, one a seed, ascending: finished or diverged, with a value.
        values: theirs, times the unit's factor.
        at_least: some run ended before it reached the target: its number of rounds stands for it, a lower bound.
        without: finished or diverged runs that have no such value.
        uncounted: failed or unfinished runs of seeds that no other run ended.
        repeated: further runs of seeds that count already.
    """

    runs: tuple[Run, ...]
    values: tuple[float, ...]
    at_least: bool
    without: tuple[Run, ...]
    uncounted: tuple[Run, ...]
    repeated: tuple[Repeat, ...]

    @cached_property
    def mean(self) -> float | None:
        return math.fsum(self.values) / len(self.values) if self.values else None

    @cached_property
    def std(self) -> float | None:
        """The sample's; None for fewer than two runs, and of bounds, which do not scatter as what they bound."""
        if self.mean is None or len(self.values) < 2 or self.at_least:
            return None
        return math.sqrt(math.fsum((x - self.mean) ** 2 for x in self.values) / (len(self.values) - 1))

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)

    @property
    def diverged(self) -> tuple[Run, ...]:
        return tuple(run for run in (*self.runs, *self.without) if run.state == DIVERGED)


def sample(runs: Iterable[Run], measure: str, factor: float = 1.0) -> Sample:
    """The runs of one setting by seed: of several with one seed that which came to its end last counts."""
    by_seed: dict[int, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.state in ENDED, _ended(run), run.folder), reverse=True):
        by_seed.setdefault(run.seed, []).append(run)
    firsts = [by_seed[seed][0] for seed in sorted(by_seed)]
    found = {run.folder: value(run, measure) for run in firsts if run.state in ENDED}
    bounded = [run for run in firsts if parse(measure).is_target and _missed(run, measure, found)]
    found |= {run.folder: float(run.rounds) for run in bounded}
    known = [run for run in firsts if found.get(run.folder) is not None]
    return Sample(
        runs=tuple(known),
        values=tuple(factor * number for run in known if (number := found[run.folder]) is not None),
        at_least=bool(bounded),
        without=tuple(run for run in firsts if run.folder in found and found[run.folder] is None),
        uncounted=tuple(run for run in firsts if run.folder not in found),
        repeated=tuple(
            Repeat(run, _difference(value(run, measure), found.get(first.folder), factor))
            for first, *others in (by_seed[seed] for seed in sorted(by_seed))
            for run in others
        ),
    )


def _missed(run: Run, measure: str, found: Mapping[Path, float | None]) -> bool:
    """Whether the run was tested as the target asks, to its end, and did not reach it."""
    return run.folder in found and found[run.folder] is None and len(run.curve(parse(measure).column)[0]) > 0


def _difference(theirs: float | None, counts: float | None, factor: float) -> float | None:
    return None if theirs is None or counts is None else factor * (theirs - counts)


def _ended(run: Run) -> float:
    """When the run ended, in seconds: as it says itself, for a copy of a folder is younger than what is in it."""
    try:
        return datetime.fromisoformat(run.summary["ended"]).timestamp()
    except (KeyError, TypeError, ValueError):
        path = run.folder / "summary.json"
        return path.stat().st_mtime if path.is_file() else 0.0


def mean_std(sample: Sample, unit: Unit, *, wanted: int | None = None) -> str:
    """``61.20 (0.80)``; ``[2]`` where it is of 2 seeds and more were wanted, ``+`` for a bound, † for diverged runs."""
    assert sample.mean is not None
    std = "" if sample.std is None else f" ({unit.text(sample.std)})"
    count = "" if wanted in (None, len(sample.runs)) else f" [{len(sample.runs)}]"
    return (
        f"{unit.text(sample.mean)}{'+' if sample.at_least else ''}{std}{count}{f' {MARK}' if sample.diverged else ''}"
    )


def numbers(sample: Sample | None) -> dict[str, Any]:
    """What a CSV has of it."""
    runs = sample.runs if sample else ()
    uncounted = sample.uncounted if sample else ()
    return {
        "mean": sample and sample.mean,
        "std": sample and sample.std,
        "at_least": "yes" if sample and sample.at_least else "",
        "n": len(runs),
        "seeds": " ".join(str(run.seed) for run in runs),
        "values": " ".join(map(repr, sample.values if sample else ())),
        "diverged": len(sample.diverged) if sample else 0,
        "failed": sum(run.state == FAILED for run in uncounted),
        "unfinished": sum(run.state == UNFINISHED for run in uncounted),
    }
