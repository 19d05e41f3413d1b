"""Repetitions of a setting, a short name for each by what differs in it, and one measure over its seeds."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd

from gcfed.runs.folder import DIVERGED, Run
from gcfed.runs.identity import leaves
from gcfed.runs.measures import parse, value

SYMBOLS = {"gc.lam": "λ", "client.optimizer.lr": "η", "client.epochs": "epochs", "client.steps": "steps",
           "client.batch_size": "batch", "methods.proximal.mu": "μ", "methods.ssf.ratio": "r/d",
           "methods.fedsub.ratio": "r/d"}  # fmt: skip
#: Keys that say where and on what is trained; all others are the method's.
_FEDERATION = ("data.", "model.", "participation.", "partition.", "task.", "trainer.", "rounds", "eval_every")


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one setting and as many rounds, tested equally often: repetitions.

    Attributes:
        runs: one a seed, ascending.
        repeated: further runs of these seeds; the run that came to its end last counts.
        values: what the setting is: dotted key → value, with ``rounds`` and ``eval_every``.
        method: algorithm, gradient centralization, and what else differs from the federation's runs of the same name.
        federation: data, model, participation, partition and rounds, and what else tells two of them apart.
    """

    runs: tuple[Run, ...]
    repeated: tuple[Run, ...]
    values: Mapping[str, Any]
    method: str = ""
    federation: str = ""

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
    members: dict[tuple[str, int, Any], list[Run]] = defaultdict(list)
    for run in runs:
        if run.config:
            members[run.setting, run.planned, run.get("eval_every")].append(run)
    groups = [_group(its) for its in members.values()]
    kinds = [group.federation for group in groups]
    further = _differing(groups, kinds, federation=True)
    groups = [replace(g, federation=", ".join([g.federation, *more])) for g, more in zip(groups, further, strict=True)]
    further = _differing(groups, [group.label for group in groups], federation=False)
    groups = [replace(g, method=", ".join([g.method, *more])) for g, more in zip(groups, further, strict=True)]
    order = list(dict.fromkeys(group.federation for group in groups))
    return sorted(groups, key=lambda group: order.index(group.federation))


def _group(runs: Sequence[Run]) -> Group:
    by_seed: dict[int, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run.has_ended, str(run.summary.get("ended", "")), run.folder)):
        by_seed[run.seed].append(run)
    values = leaves(runs[0].config) | {"rounds": runs[0].planned, "eval_every": runs[0].get("eval_every")}
    values.pop("seed", None)
    count = tuple(by_seed[seed][-1] for seed in sorted(by_seed))
    again = tuple(run for its in by_seed.values() for run in its[:-1])
    return Group(count, again, values, _method(runs[0]), _federation(runs[0]))


def _name(run: Run, kind: str) -> str:
    return str(run.get(f"labels.{kind}", run.get(f"tags.{kind}", "?")))


def _method(run: Run) -> str:
    """FedAvg, GC-Fed (which is FedAvg with gc=gcfed), FedProx + Local GC."""
    names = [_name(run, "algorithm"), _name(run, "gc")]
    if run.get("gc._target_") is None:
        return names[0]
    return names[1] if run.get("tags.algorithm") == "fedavg" else " + ".join(names)


def _federation(run: Run) -> str:
    """CIFAR-10, CNN, 5 of 100 clients, Dirichlet 0.1, 800 rounds."""
    partition = str(run.get("partition._target_", "")).rpartition(".")[2]
    parameter = run.get("partition.alpha", run.get("partition.classes", ""))
    clients = f"{run.get('participation.per_round')} of {run.get('participation.num_clients') or 'all'} clients"
    where = f"{partition} {parameter}".strip()
    return ", ".join([_name(run, "data"), _name(run, "model"), clients, where, f"{run.planned} rounds"])


def variants(settings: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Texts of the keys in which the settings differ, a row each; of keys that always change together one only.

    Classes come first, then what has a symbol: Adam with another η and β is Adam.
    """
    frame = pd.DataFrame([{key: _text(value) for key, value in values.items()} for values in settings]).fillna("")
    frame = frame[sorted(frame.columns[frame.nunique() > 1], key=_precedence)]
    codes = pd.DataFrame({key: pd.factorize(frame[key])[0] for key in frame}, index=frame.index)
    return frame.loc[:, ~codes.T.duplicated().to_numpy()]


def _precedence(key: str) -> tuple[bool, bool, bool, int]:
    """``partition.alpha`` rather than ``data.partitioner.alpha``."""
    return not key.endswith("_target_"), key not in SYMBOLS, key.startswith("data."), len(key)


def _differing(groups: Sequence[Group], kinds: Sequence[str], *, federation: bool) -> list[list[str]]:
    """For each group "key value" of the keys in which groups of its kind differ, but not what most of them have."""
    found: list[list[str]] = [[] for _ in groups]
    for kind in [kind for kind, count in Counter(kinds).items() if count > 1]:
        members = [i for i, other in enumerate(kinds) if other == kind]
        values = [groups[i].values.items() for i in members]
        frame = variants([{k: v for k, v in its if k.startswith(_FEDERATION) == federation} for its in values])
        for key in frame:
            shares = frame[key].value_counts(normalize=True)
            for i, text in zip(members, frame[key], strict=True):
                if shares[text] <= 0.5:
                    found[i].append(described(key, text))
    return found


def described(key: str, text: str) -> str:
    """``η 0.1``, ``Adam``, ``momentum 0``; ``no λ`` for what is not set."""
    if key.endswith("_target_"):
        return text or f"no {key.rpartition('.')[0]}"
    return f"{symbol(key)} {text}" if text else f"no {symbol(key)}"


def symbol(key: str) -> str:
    return SYMBOLS.get(key, key.removeprefix("methods.").removeprefix("client.optimizer."))


def _text(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return text.rpartition(".")[2] if text.startswith(("gcfed.", "torch.")) else text


@dataclass(frozen=True)
class Sample:
    """One measure over the seeds of a group, in the unit that it is shown in.

    Attributes:
        values: seed → number, of runs that came to their end and have one.
        bounds: seeds of runs that ended before they reached the target: all their rounds stand in ``values``, so that
            the mean is a lower bound.
        diverged: seeds of runs that diverged; they are in ``values`` where their number is finite.
        others: runs that are not in the mean: they failed, are not finished, or have no such number.
    """

    values: Mapping[int, float]
    bounds: tuple[int, ...]
    diverged: tuple[int, ...]
    others: tuple[Run, ...]

    @property
    def bound(self) -> bool:
        return bool(self.bounds)

    @cached_property
    def mean(self) -> float | None:
        return math.fsum(self.values.values()) / len(self.values) if self.values else None

    @cached_property
    def std(self) -> float | None:
        """The sample's; None for fewer than two runs, and of bounds, which do not scatter as what they bound."""
        if self.mean is None or len(self.values) < 2 or self.bounds:
            return None
        return math.sqrt(math.fsum((x - self.mean) ** 2 for x in self.values.values()) / (len(self.values) - 1))

    @property
    def record(self) -> dict[str, Any]:
        """What a CSV has of it."""
        seeds, values = " ".join(map(str, self.values)), " ".join(map(repr, self.values.values()))
        return {"mean": self.mean, "std": self.std, "bound": "yes" * self.bound, "seeds": seeds, "values": values}


def sample(group: Group, measure: str, factor: float = 1.0) -> Sample:
    """The measure over a group's seeds, times a factor; a target that a run did not reach has the run's rounds."""
    column = parse(measure).column if parse(measure).is_target else ""
    found = {run.seed: value(run, measure) for run in group.runs if run.has_ended}
    bounds = {run.seed: run for run in group.runs if found.get(run.seed, 0) is None and len(run.curve(column))}
    found |= {seed: float(run.rounds) for seed, run in bounds.items()}
    known = {seed: factor * number for seed, number in found.items() if number is not None}
    diverged = tuple(run.seed for run in group.runs if run.state == DIVERGED)
    return Sample(known, tuple(bounds), diverged, tuple(run for run in group.runs if run.seed not in known))
