"""Repetitions of a setting, and one measure over their seeds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

import pandas as pd

from gcfed.report.names import described, differing, in_few_digits, option, variants
from gcfed.runs.folder import DIVERGED, Run
from gcfed.runs.measures import parse, total, value

#: Keys that say where, on what and against whom is trained; all others are the method's.
_FEDERATION = (
    "attack.",
    "data.",
    "model.",
    "participation.",
    "partition.",
    "task.",
    "trainer.",
    "rounds",
    "eval_every",
)


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one setting and as many rounds on the same data, tested equally often: repetitions."""

    runs: tuple[Run, ...]  # one a seed, ascending
    repeated: tuple[Run, ...]  # further runs of these seeds; the run that measured the most counts, of those the last
    methods: Mapping[str, str]  # algorithm and GC, then what else differs from the federation's runs of the same name
    places: Mapping[str, str]  # data, model, participation, partition, rounds, and what else tells two of them apart
    texts: Mapping[str, str]  # dotted key → value, of the keys in which any two groups differ

    @property
    def method(self) -> str:
        return ", ".join(self.methods.values())

    @property
    def federation(self) -> str:
        return ", ".join(self.places.values())

    @property
    def setting(self) -> str:
        return self.runs[0].setting

    @property
    def names(self) -> dict[str, Any]:
        """What a CSV calls it by."""
        return {"federation": self.federation, "method": self.method, "setting": self.setting}

    @property
    def planned(self) -> int:
        return self.runs[0].planned

    @property
    def has_ended(self) -> bool:
        return any(run.has_ended for run in self.runs)

    @property
    def label(self) -> str:
        return f"{self.method} ({self.federation})"


def grouped(runs: Iterable[Run]) -> list[Group]:
    """Groups by federation: first those that compare the most results, last those of a single setting.

    Runs whose config cannot be read are in none.
    """
    members: dict[tuple[str, int, Any, str], list[Run]] = defaultdict(list)
    readable = [run for run in runs if run.config]
    data: dict[str, set[str]] = defaultdict(set)  # checksums of a setting's data: its files may have changed
    for run in readable:
        data[run.setting] |= {run.summary.get("classes") or ""} - {""}
    for run in readable:
        classes = run.summary.get("classes") or min(data[run.setting], default="")
        members[run.setting, run.planned, run.get("eval_every"), classes].append(run)
    if not members:
        return []
    values = [_values(same[0], key[-1] if len(data[key[0]]) > 1 else "") for key, same in members.items()]
    texts = differing(values)
    groups = [_group(same, texts.loc[i].to_dict()) for i, same in enumerate(members.values())]
    for kind in ("places", "methods"):
        groups = _distinct(groups, texts, kind)
    places = list(by_federation(groups).values())
    return [group for place in sorted(places, key=compared, reverse=True) for group in place]


def by_federation(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """The groups of each federation, in the order of the first ones."""
    found: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        found[group.federation].append(group)
    return dict(found)


def compared(groups: Sequence[Group]) -> int:
    """How many results of a federation can be compared: methods × seeds; 0 where only one method has any."""
    results = [sum(run.has_ended for run in group.runs) for group in groups if group.has_ended]
    return sum(results) if len(results) > 1 else 0


def _values(run: Run, classes: str) -> dict[str, Any]:
    """What the setting is, by dotted key; where the configs have a name for a choice, that name."""
    values = run.leaves | {"rounds": run.planned, "eval_every": run.get("eval_every")}
    values |= {"data.classes": classes} if classes else {}
    values |= {key: option(run, key) for key in values if key.endswith("._target_")}
    values.pop("seed", None)
    return values


def _group(runs: Sequence[Run], texts: dict[str, str]) -> Group:
    ordered = sorted(runs, key=lambda run: (run.has_ended, len(run.get("metrics") or ()), _ended(run), run.folder))
    last = {run.seed: run for run in ordered}
    repeated = tuple(run for run in ordered if run is not last[run.seed])
    return Group(tuple(last[seed] for seed in sorted(last)), repeated, _method(runs[0]), _federation(runs[0]), texts)


def _ended(run: Run) -> float:
    """When, in seconds; runs of two places have two time zones."""
    text = run.summary.get("ended")
    return datetime.fromisoformat(text).timestamp() if text else -math.inf


def label_of(run: Run, kind: str) -> str:
    """What people call the run's ``algorithm``, ``gc``, ``data`` or ``model``."""
    return str(run.get(f"labels.{kind}", run.get(f"tags.{kind}", "?")))


def _method(run: Run) -> dict[str, str]:
    """FedAvg, GC-Fed (which is FedAvg with gc=gcfed), FedProx + Local GC."""
    algorithm, gc = label_of(run, "algorithm"), label_of(run, "gc")
    if run.get("gc._target_") is None:
        return {"algorithm": algorithm}
    return {"algorithm": gc if run.get("tags.algorithm") == "fedavg" else f"{algorithm} + {gc}"}


def _federation(run: Run) -> dict[str, str]:
    """CIFAR-10, CNN, 5 of 100 clients, Dirichlet 0.1, 800 rounds."""
    parameter = run.leaves.get("partition.alpha", run.leaves.get("partition.classes", ""))
    of = run.get("participation.num_clients") or "all"
    return {
        "data": label_of(run, "data"),
        "model": label_of(run, "model"),
        "participation": f"{run.get('participation.per_round')} of {of} clients",
        "partition": f"{option(run, 'partition._target_')} {parameter}".strip(),
        "rounds": f"{run.planned} rounds",
    }


def _distinct(groups: Sequence[Group], texts: pd.DataFrame, kind: str) -> list[Group]:
    """Adds to equal places, or to equal methods of one, the values that differ, but not those that most have."""
    equal = pd.Series([group.federation if kind == "places" else group.label for group in groups], dtype=object)
    names = [dict(getattr(group, kind)) for group in groups]
    own = texts[[key for key in texts if key.startswith(_FEDERATION) == (kind == "places")]]
    for members in (members for members in equal.groupby(equal).groups.values() if len(members) > 1):
        frame = variants(own.loc[members])
        for key in frame:
            shares = frame[key].value_counts(normalize=True)
            for i, text, short in zip(members, frame[key], in_few_digits(frame[key]), strict=True):
                names[i] |= {key: described(key, short)} if shares[text] <= 0.5 else {}
    return [replace(group, **{kind: name}) for group, name in zip(groups, names, strict=True)]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Sample:
    """One measure over the seeds of a group, in the unit that it is shown in."""

    values: Mapping[int, float]  # by seed, of runs that came to their end and have one
    bound: bool = False  # a run did not reach the target: its rounds stand in ``values``, the mean is a lower bound
    diverged: tuple[int, ...] = ()  # their seeds, also in ``values`` where the number is finite
    others: tuple[Run, ...] = ()  # not in the mean: they failed, are not finished, or have no such number

    @cached_property
    def mean(self) -> float | None:
        return fmean(self.values.values()) if self.values else None

    @cached_property
    def std(self) -> float | None:
        """The sample's; None for fewer than two runs, and of bounds."""
        return stdev(self.values.values()) if len(self.values) > 1 and not self.bound else None

    def over(self, seeds: Iterable[int]) -> Sample:
        """Those of these seeds."""
        return replace(self, values={seed: self.values[seed] for seed in seeds if seed in self.values})

    @property
    def record(self) -> dict[str, Any]:
        """What a CSV has of it."""
        seeds, values = " ".join(map(str, self.values)), " ".join(map(repr, self.values.values()))
        return {"mean": self.mean, "std": self.std, "bound": "yes" * self.bound, "seeds": seeds, "values": values}


def sample(group: Group, measure: str, factor: float = 1.0) -> Sample:
    """The measure over a group's seeds, times a factor.

    A target that a run did not reach has what the run took in all, its rounds or bytes.
    """
    parts = parse(measure)
    target, cost = parts.column if parts.is_target else "", parts.column.rpartition("/")
    values, bound = {}, False
    for run in group.runs:
        number = value(run, measure) if run.has_ended else None
        if run.has_ended and number is None and len(run.curve(target)):
            number, bound = float(run.rounds), True
        elif run.has_ended and number is None and cost[2] in (run.summary.get(cost[0]) or ()):
            number, bound = total(run, cost[0]), True
        if number is not None:
            values[run.seed] = factor * number
    diverged = tuple(run.seed for run in group.runs if run.state == DIVERGED)
    return Sample(values, bound, diverged, tuple(run for run in group.runs if run.seed not in values))
