"""Repetitions of a setting, a short name for each by what differs in it, and one measure over its seeds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from gcfed.runs.folder import DIVERGED, Run
from gcfed.runs.measures import parse, total, value
from gcfed.runs.reading import LABEL

SYMBOLS = {"gc.lam": "λ", "client.optimizer.lr": "η", "client.epochs": "epochs", "client.steps": "steps",
           "client.batch_size": "batch", "methods.proximal.mu": "μ", "methods.ssf.ratio": "r/d",
           "methods.fedsub.ratio": "r/d"}  # fmt: skip
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
    values: Mapping[str, Any]  # what the setting is: dotted key → value, with ``rounds`` and ``eval_every``
    methods: tuple[str, ...]  # algorithm and GC, then what else differs from the federation's runs of the same name
    places: tuple[str, ...]  # data, model, participation, partition and rounds, and what else tells two of them apart

    @property
    def method(self) -> str:
        return ", ".join(self.methods)

    @property
    def federation(self) -> str:
        return ", ".join(self.places)

    @property
    def setting(self) -> str:
        return self.runs[0].setting

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
    """Groups by federation, in the order of their first runs; runs whose config cannot be read are in none."""
    members: dict[tuple[str, int, Any, str], list[Run]] = defaultdict(list)
    readable = [run for run in runs if run.config]
    data: dict[str, set[str]] = defaultdict(set)  # checksums of a setting's data: its files may have changed
    for run in readable:
        data[run.setting] |= {run.summary.get("classes") or ""} - {""}
    for run in readable:
        classes = run.summary.get("classes") or min(data[run.setting], default="")
        members[run.setting, run.planned, run.get("eval_every"), classes].append(run)
    groups = [_group(runs, key[-1] if len(data[key[0]]) > 1 else "") for key, runs in members.items()]
    groups = _distinct(_distinct(groups, "places"), "methods")
    order = list(dict.fromkeys(group.federation for group in groups))
    return sorted(groups, key=lambda group: order.index(group.federation))


def _group(runs: Sequence[Run], classes: str) -> Group:
    ordered = sorted(runs, key=lambda run: (run.has_ended, len(run.get("metrics") or ()), _ended(run), run.folder))
    last = {run.seed: run for run in ordered}
    values = runs[0].leaves | {"rounds": runs[0].planned, "eval_every": runs[0].get("eval_every")}
    values |= {"data.classes": classes} if classes else {}
    values.pop("seed", None)
    repeated = tuple(run for run in ordered if run is not last[run.seed])
    return Group(tuple(last[seed] for seed in sorted(last)), repeated, values, _method(runs[0]), _federation(runs[0]))


def _ended(run: Run) -> float:
    """When, in seconds; runs of two places have two time zones."""
    text = run.summary.get("ended")
    return datetime.fromisoformat(text).timestamp() if text else -math.inf


def label_of(run: Run, kind: str) -> str:
    """What people call the run's ``algorithm``, ``gc``, ``data`` or ``model``."""
    return str(run.get(f"labels.{kind}", run.get(f"tags.{kind}", "?")))


def _method(run: Run) -> tuple[str]:
    """FedAvg, GC-Fed (which is FedAvg with gc=gcfed), FedProx + Local GC."""
    names = [label_of(run, "algorithm"), label_of(run, "gc")]
    if run.get("gc._target_") is None:
        return (names[0],)
    return (names[1] if run.get("tags.algorithm") == "fedavg" else " + ".join(names),)


def _federation(run: Run) -> tuple[str, ...]:
    """CIFAR-10, CNN, 5 of 100 clients, Dirichlet 0.1, 800 rounds."""
    partition = str(run.get("partition._target_", "")).rpartition(".")[2]
    parameter = run.get("partition.alpha", run.get("partition.classes", ""))
    clients = f"{run.get('participation.per_round')} of {run.get('participation.num_clients') or 'all'} clients"
    where = f"{partition} {parameter}".strip()
    return label_of(run, "data"), label_of(run, "model"), clients, where, f"{run.planned} rounds"


def _distinct(groups: Sequence[Group], name: str) -> list[Group]:
    """Adds to equal federations, or to equal methods of one, the values that differ, but not those that most have."""
    equal = pd.Series([group.federation if name == "places" else group.label for group in groups], dtype=object)
    names = [getattr(group, name) for group in groups]
    for members in (members for members in equal.groupby(equal).groups.values() if len(members) > 1):
        frame = variants([
            {k: v for k, v in groups[i].values.items() if k.startswith(_FEDERATION) == (name == "places")}
            for i in members
        ])  # fmt: skip
        for key in frame:
            shares = frame[key].value_counts(normalize=True)
            for i, text, short in zip(members, frame[key], _short(frame[key]), strict=True):
                names[i] += (described(key, short),) if shares[text] <= 0.5 else ()
    return [replace(group, **{name: parts}) for group, parts in zip(groups, names, strict=True)]


def variants(settings: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Of the keys that :func:`differing` has and that always change together one only.

    Classes come first, then what has a symbol: Adam with another η and β is Adam.
    """
    frame = differing(settings)
    codes = pd.DataFrame({key: pd.factorize(frame[key])[0] for key in frame}, index=frame.index)
    return frame.loc[:, ~codes.T.duplicated().to_numpy()]


def differing(settings: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Texts of the keys in which the settings differ, a row each."""
    first = settings[0]
    keys = {key for values in settings for key in first.keys() | values.keys() if first.get(key) != values.get(key)}
    rows = [{key: _text(values[key]) if key in values else "" for key in keys} for values in settings]
    frame = pd.DataFrame(rows, dtype=object)
    return frame[sorted(frame.columns[frame.nunique() > 1], key=_precedence)]


def _precedence(key: str) -> tuple[bool, bool, bool, int]:
    """``partition.alpha`` rather than ``data.partitioner.alpha``."""
    return not key.endswith("_target_"), key not in SYMBOLS, key.startswith("data."), len(key)


def described(key: str, text: str) -> str:
    """``η 0.1``, ``Adam``, ``momentum 0``; ``no λ`` for what is not set."""
    text = text if len(text) <= LABEL else f"{text[:LABEL]}…"
    if key.endswith("_target_"):
        return text or f"no {key.rpartition('.')[0]}"
    return f"{symbol(key)} {text}" if text else f"no {symbol(key)}"


def symbol(key: str) -> str:
    return SYMBOLS.get(key, key.removeprefix("methods.").removeprefix("client.optimizer."))


def _short(texts: pd.Series) -> pd.Series:
    """Long numbers, as a search draws them, with three digits, or as many as tell them apart."""
    for digits in range(3, 17):
        short = texts.str.replace(r"^\d*\.\d{6,}$", lambda number: f"{float(number[0]):.{digits}g}", regex=True)  # noqa: B023
        if short.nunique() == texts.nunique():
            return short
    return texts


def _text(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return text.rpartition(".")[2] if text.startswith(("gcfed.", "torch.")) else text


@dataclass(frozen=True)
class Sample:
    """One measure over the seeds of a group, in the unit that it is shown in."""

    values: Mapping[int, float]  # by seed, of runs that came to their end and have one
    mean: float | None = None
    std: float | None = None  # the sample's; None for fewer than two runs, and of bounds
    bound: bool = False  # a run did not reach the target: its rounds stand in ``values``, the mean is a lower bound
    diverged: tuple[int, ...] = ()  # their seeds, also in ``values`` where the number is finite
    others: tuple[Run, ...] = ()  # not in the mean: they failed, are not finished, or have no such number

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
    return Sample(
        values,
        mean=fmean(values.values()) if values else None,
        std=stdev(values.values()) if len(values) > 1 and not bound else None,
        bound=bound,
        diverged=tuple(run.seed for run in group.runs if run.state == DIVERGED),
        others=tuple(run for run in group.runs if run.seed not in values),
    )


class Paired(NamedTuple):
    """How far a sample is above another one, seed by seed."""

    difference: float  # mean over the common seeds, in the unit of the samples
    p: float  # two-sided: of all choices of the differences' signs, the share whose mean is as far from 0
    pairs: int

    def __str__(self) -> str:
        return f"{self.difference:+.3g}, p = {self.p:.2g} ({self.pairs})"


def paired(first: Sample, second: Sample) -> Paired | None:
    """The exact permutation test over common seeds; None for fewer than two of them, more than 16, or a bound."""
    seeds = sorted(first.values.keys() & second.values.keys())
    if not 2 <= (n := len(seeds)) <= 16 or first.bound or second.bound:
        return None
    differences = np.array([first.values[seed] - second.values[seed] for seed in seeds])
    signs = 1 - 2 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)  # all +1 first
    means = np.abs(signs @ differences) / n
    return Paired(float(differences.mean()), float((means >= means[0] * (1 - 1e-9)).mean()), n)
