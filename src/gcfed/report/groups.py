"""Repetitions of a setting, and what people call it: by what differs in it, in words."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from gcfed.runs.folder import Run
from gcfed.runs.reading import LABEL, shipped
from gcfed.utils.resolvers import CONFIGS

#: Keys that say where, on what and against whom is trained; all others are the method's.
_FEDERATION = (
    "attack.", "data.", "model.", "participation.", "partition.", "task.", "trainer.", "rounds", "eval_every",
)  # fmt: skip
#: Keys of local training, which is no method's.
_TRAINING = ("client.", "precision")
#: Keys that have another name than their last words.
SYMBOLS = {
    "gc.lam": "λ", "client.optimizer.lr": "η", "client.epochs": "epochs", "client.steps": "steps",
    "client.batch_size": "batch", "methods.proximal.mu": "μ", "methods.ssf.ratio": "r/d", "methods.fedsub.ratio": "r/d",
    "partition.alpha": "α", "participation.per_round": "clients a round", "participation.num_clients": "clients",
    "data.validation": "validation split", "data.classes": "samples", "eval_every": "tested every",
}  # fmt: skip
#: Sections that go without saying.
_PLAIN = re.compile(r"^(methods|client\.optimizer|client|data\.dataset|data|participation|partition|model)\.")
#: Groups whose files name what their class is for; the labels of the others stand in a run's config.
_OPTIONS = ("aggregator", "attack", "partition", "quantization")
_METHOD = re.compile(r"methods\.[^.]+\._target_")
_PROPER = {"iid": "IID", "dirichlet": "Dirichlet"}
_NEVER = "0001-01-01T00:00+00:00"


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one setting and as many rounds on the same data, tested equally often: repetitions."""

    runs: tuple[Run, ...]  # one a seed, ascending
    repeated: tuple[Run, ...]  # further runs of these seeds; the run that measured the most counts, of those the last
    methods: dict[str, str]  # algorithm and GC, then what else differs from the federation's runs of the same name
    places: dict[str, str]  # data, model, participation, partition, rounds, and what else tells two of them apart
    texts: dict[str, str]  # dotted key → value, of the keys in which any two groups differ

    @property
    def method(self) -> str:
        return ", ".join(self.methods.values())

    @property
    def federation(self) -> str:
        return ", ".join(self.places.values())

    @property
    def ended(self) -> int:
        """How many of its runs came to their end."""
        return sum(run.has_ended for run in self.runs)


def grouped(runs: Iterable[Run]) -> list[Group]:
    """Groups by federation: first those that compare the most results, last those of a single setting.

    Runs whose config cannot be read are in none.
    """
    readable = [run for run in runs if run.config]
    data: dict[str, set[str]] = defaultdict(set)  # checksums of a setting's data: its files may have changed
    for run in readable:
        data[run.setting] |= {run.summary.get("classes") or ""} - {""}
    members: dict[tuple[str, int, Any, str], list[Run]] = defaultdict(list)
    for run in readable:
        known = data[run.setting]
        classes = (run.summary.get("classes") or min(known)) if len(known) > 1 else ""
        members[run.setting, run.planned, run.get("eval_every"), classes].append(run)
    groups, settings = [], []
    for (_, planned, every, classes), same in members.items():
        ordered = sorted(same, key=_weight)
        last = {run.seed: run for run in ordered}
        again = tuple(run for run in ordered if run is not last[run.seed])
        groups.append(Group(tuple(last[seed] for seed in sorted(last)), again, *_names(same[0]), {}))
        values = same[0].leaves | {"rounds": planned, "eval_every": every, "data.classes": classes, "seed": None}
        settings.append(values | {key: option(same[0], key) for key in values if key.endswith("._target_")})
    texts = _differing(settings)
    for group, row in zip(groups, texts.to_dict("records"), strict=True):
        group.texts.update(row)
    of_place = [key for key in texts if key.startswith(_FEDERATION)]
    _tell_apart([group.federation for group in groups], [group.places for group in groups], texts[of_place])
    labels = [(group.federation, group.method) for group in groups]
    _tell_apart(labels, [group.methods for group in groups], texts.drop(columns=of_place))
    federations = by_federation(groups).values()
    return [group for members in sorted(federations, key=compared, reverse=True) for group in members]


def _weight(run: Run) -> tuple[bool, int, float, Path]:
    """Of runs of one seed the last one in this order counts: what ended, then what measured the most, then the newest.

    When is in seconds: runs of two places have two time zones.
    """
    ended = datetime.fromisoformat(run.summary.get("ended") or _NEVER).timestamp()
    return run.has_ended, len(run.get("metrics") or ()), ended, run.folder


def by_federation(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """The groups of each federation, in the order of the first ones."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.federation, []).append(group)
    return found


def compared(groups: Sequence[Group]) -> int:
    """How many results of a federation can be compared: methods × seeds; 0 where only one method has any."""
    results = [group.ended for group in groups if group.ended]
    return sum(results) if len(results) > 1 else 0


def label_of(run: Run, kind: str) -> str:
    """What people call the run's ``algorithm``, ``gc``, ``data`` or ``model``.

    That is its tag where the label was left as a config of ours has it. A method that was added to an algorithm of ours
    is named with it: SCAFFOLD + FedNTD.
    """
    tag, ours = run.get(f"tags.{kind}", "?"), _labels(kind)
    label = run.get(f"labels.{kind}", tag)
    if label not in ours.values():
        return str(label)
    if tag not in ours:
        return str(tag)
    known = {part["_target_"] for part in shipped(f"{kind}/{tag}").get("methods", {}).values()}
    targets = [str(value) for key, value in run.leaves.items() if kind == "algorithm" and _METHOD.fullmatch(key)]
    return " + ".join([label, *(target.rpartition(".")[2] for target in targets if target not in known)])


def is_fedavg(run: Run) -> bool:
    """Without any method but GC."""
    return label_of(run, "algorithm").lower() == "fedavg"


def _names(run: Run) -> tuple[dict[str, str], dict[str, str]]:
    """FedAvg, GC-Fed (which is FedAvg with gc=gcfed), FedProx + Local GC; CIFAR-10, CNN, 5 of 100 clients, …."""
    algorithm, gc = label_of(run, "algorithm"), label_of(run, "gc")
    if run.get("gc._target_") is not None:
        algorithm = gc if is_fedavg(run) else f"{algorithm} + {gc}"
    parameter = run.leaves.get("partition.alpha", run.leaves.get("partition.classes", ""))
    of = run.get("participation.num_clients") or "all"
    return {"algorithm": algorithm}, {
        "data": label_of(run, "data"),
        "model": label_of(run, "model"),
        "participation": f"{run.get('participation.per_round')} of {of} clients",
        "partition": f"{option(run, 'partition._target_')} {parameter}".strip(),
        "rounds": f"{run.planned} rounds",
    }


def _tell_apart(labels: Sequence[Any], names: Sequence[dict[str, str]], texts: pd.DataFrame) -> None:
    """Adds to names of equal labels the values that differ, but not those that most have."""
    equal = pd.Series(labels, dtype=object)
    for members in (indices for indices in equal.groupby(equal).groups.values() if len(indices) > 1):
        frame = variants(texts.loc[members])
        for key in frame:
            shares = frame[key].value_counts(normalize=True)
            for i, text, short in zip(members, frame[key], in_few_digits(frame[key]), strict=True):
                names[i].update({key: described(key, short)} if shares[text] <= 0.5 else {})


def unlike(groups: Sequence[Group]) -> list[str]:
    """In what of local training these differ, where no name says it: ``η 0.01, but 0.1 (FedAvg)``."""
    texts = pd.DataFrame([group.texts for group in groups], dtype=object).fillna("")
    texts = texts.loc[:, texts.nunique() > 1]
    told = {key for group in groups for key in group.methods}
    told |= {key for key in texts if f"{key.rpartition('.')[0]}._target_" in {*texts} - {key}}  # a class brings these
    said = []
    for key in (key for key in texts if key.startswith(_TRAINING) and key not in told):
        values = in_few_digits(texts[key]).replace("", "none")
        usual, *others = values.value_counts().index
        who = {text: ", ".join(groups[i].method for i in values.index[values == text]) for text in others}
        said.append(f"{symbol(key)} {usual}, but {', '.join(f'{text} ({names})' for text, names in who.items())}")
    return said


def option(run: Run, key: str) -> str:
    """What the configs call the choice at a ``…._target_``: ``sign flip``; else the name of the class."""
    group, target = key.removesuffix("._target_"), str(run.get(key, ""))
    files = {name: shipped(f"{group}/{name}") for name in _options(group)} if group in _OPTIONS else {}
    fit = {name: node for name, node in files.items() if str(node.get("_target_")) == target}
    if not fit:
        name = target.rpartition(".")[2] if target.startswith(("gcfed.", "torch.")) else target  # of two a.Net, b.Net
        return re.sub("(?<=[a-z])(?=[A-Z])", " ", name).lower() if target.startswith("gcfed.") else name
    own = run.get(group)
    words = max(fit, key=lambda name: sum(own.get(k) == value for k, value in fit[name].items()))
    return re.sub(r"^\w+", lambda word: _PROPER.get(word[0], word[0]), words.replace("_", " "))


@cache
def _labels(kind: str) -> dict[str, str]:
    """What our configs call each choice of a group, by its tag."""
    return {name: label for name in _options(kind) if (label := shipped(f"{kind}/{name}").get("labels", {}).get(kind))}


@cache
def _options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def _differing(settings: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Texts of the keys in which the settings differ, a row each.

    Classes come first, then what has a symbol: Adam with another η and β is Adam; ``partition.alpha`` rather than
    ``data.partitioner.alpha``.
    """

    def order(key: str) -> tuple[bool, bool, bool, int]:
        return not key.endswith("_target_"), key not in SYMBOLS, key.startswith("data."), len(key)

    rows = [{key: _text(value) for key, value in values.items()} for values in settings]
    frame = pd.DataFrame(rows, dtype=object).fillna("")
    return frame[sorted(frame.columns[frame.nunique() > 1], key=order)]


def variants(texts: pd.DataFrame) -> pd.DataFrame:
    """The columns in which these rows differ; of those that always change together one only, and none that a class
    brings with it."""
    texts = texts.loc[:, texts.nunique() > 1]
    codes = pd.DataFrame({key: pd.factorize(texts[key])[0] for key in texts}, index=texts.index)
    kept = texts.loc[:, ~codes.T.duplicated().to_numpy()]
    classes = {key: f"{key.rpartition('.')[0]}._target_" for key in kept}
    brought = [k for k, c in classes.items() if k != c and c in kept and kept.groupby(c)[k].nunique().max() == 1]
    return kept.drop(columns=brought)


def described(key: str, text: str) -> str:
    """``η 0.1``, ``Adam``, ``momentum 0``; ``no λ`` for what is not set."""
    text = text if len(text) <= LABEL else f"{text[:LABEL]}…"
    if not text:
        return f"no {symbol(key)}"
    return text if key.endswith("_target_") else f"{symbol(key)} {text}"


def symbol(key: str) -> str:
    """``λ``; ``server lr``: the key without what goes without saying."""
    words = _PLAIN.sub("", key.removesuffix("._target_"))
    return SYMBOLS.get(key, re.sub("[._]+", " ", words).strip())


def in_few_digits(texts: pd.Series) -> pd.Series:
    """Long numbers, as a search draws them, with three digits, or as many as tell them apart."""
    for digits in range(3, 17):
        short = texts.str.replace(r"^\d*\.\d{6,}(e-\d+)?$", lambda number: f"{float(number[0]):.{digits}g}", regex=True)  # noqa: B023
        if short.nunique() == texts.nunique():
            return short
    return texts


def _text(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return text.rpartition(".")[2] if text.startswith(("gcfed.", "torch.")) else text
