"""Runs as one DataFrame with a row per run, and readable names for what differs between them."""

import logging
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
from pandas import DataFrame, Series

from gcfed.folders.folder import STORAGE, TRIALS, Run, mixed_versions
from gcfed.folders.summary import rounds_in_words
from gcfed.participation.sampling import number_of_clients

log = logging.getLogger(__name__)

#: The columns that say which run it is. All others are dotted config keys in which runs differ, as
#: text ("" if a key is not set).
RUN_COLUMNS = ["run", "setting", "place", "method", "seed", "state", "repeated"]
#: Keys of the place: data, model, clients, attack, rounds. All other keys belong to the method.
_PLACE = (
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
#: Keys of the participation that belong to the method: how the server waits for clients.
_WAITS = (
    "participation.sampler._target_",
    "participation.sampler.concurrency",
    "participation.sampler.max_staleness",
    "participation.faults.extra",
)
#: Keys with a symbol or a name of their own.
SYMBOLS = {
    "gc.lam": "λ",
    "client.optimizer.lr": "η",
    "client.epochs": "epochs",
    "client.steps": "steps",
    "client.batch_size": "batch",
    "methods.proximal.mu": "μ",
    "methods.ssf.ratio": "r/d",
    "methods.fedsub.ratio": "r/d",
    "partition.alpha": "α",
    "participation.per_round": "clients a round",
    "participation.num_clients": "clients",
    "data.validation": "validation split",
    "eval_every": "tested every",
}
_LONG_NUMBER = re.compile(r"^\d*\.\d{6,}(e-\d+)?$")
#: Sections that a key's name leaves out.
_PLAIN = re.compile(
    r"^(methods|client\.optimizer|client|data\.dataset|data|participation|partition|model)\."
)


def frame_of(runs: Iterable[Run]) -> DataFrame:
    """A row per run whose config can be read, with the columns :data:`RUN_COLUMNS`.

    Runs with the same ``setting`` are repetitions: all keys that change results are equal, except
    the seed. Methods are compared within a ``place``: data, model, clients, partition, rounds. If a
    seed was run several times, only the run that ended last counts; ``repeated`` marks the others.
    Warns if the data of a place have changed between two runs, and if different versions of this
    project trained its runs.
    """
    runs = [run for run in runs if run.config]
    if not runs:
        return DataFrame(columns=RUN_COLUMNS)
    keys = DataFrame([_texts(run) for run in runs], dtype=object).fillna("")
    _complete_seeds(keys, runs)
    differing = sorted(keys.columns[keys.nunique() > 1], key=_importance)
    frame = DataFrame({"run": Series(runs, dtype=object)})
    frame["setting"] = keys.groupby([*keys], sort=False).ngroup()
    first = frame.groupby("setting")["run"].first()
    settings = keys[differing].groupby(frame["setting"]).first()
    frame = frame.join(_names(first, settings), on="setting")
    frame["seed"] = [run.seed for run in runs]
    frame["state"] = [run.state for run in runs]
    frame["repeated"] = _repeated(frame)
    _warn_of_changed_data(frame[~frame["repeated"]])
    _warn_of_versions(frame[~frame["repeated"]])
    # a foreign config may have keys with the names of our columns
    return frame.join(keys[differing].drop(columns=RUN_COLUMNS, errors="ignore"))


def _names(first: Series, settings: DataFrame) -> DataFrame:
    """The place and the method of each setting, with names that tell them apart.

    Args:
        first: a run of each setting.
        settings: the texts of the keys in which settings differ, a row for each setting.
    """
    places = [key for key in settings if key.startswith(_PLACE) and key not in _WAITS]
    place = _distinguished(first.map(_place), settings[places])
    of_methods = settings.drop(columns=places)
    method = first.map(_method)
    for _, same_place in method.groupby(place):
        method[same_place.index] = _distinguished(same_place, of_methods.loc[same_place.index])
    return DataFrame({"place": place, "method": method})


def _warn_of_changed_data(frame: DataFrame) -> None:
    """Warns if two runs of a place and a seed had other samples, labels or clients, or another
    ``model.start``, as after an edit of the files: their settings do not show it.
    """
    for place, same_place in frame.groupby("place", sort=False):
        for seed, same_seed in same_place.groupby("seed", sort=False):
            folders: dict[str, Path] = {}  # the checksum of the data → a run
            for run in same_seed["run"]:
                data = run.summary.get("data")
                if data is not None:
                    folders.setdefault(data, run.folder)
            if len(folders) > 1:
                one, other, *_ = folders.values()
                log.warning(
                    "%s: %s and %s of seed %s have other samples, labels or clients, or another"
                    " model.start, although their settings agree. Train again what has the old"
                    " files.",
                    place,
                    one,
                    other,
                    seed,
                )
                break


def _warn_of_versions(frame: DataFrame) -> None:
    for place, runs in frame.groupby("place", sort=False)["run"]:
        mixed = mixed_versions(runs)
        if mixed:
            log.warning("%s: %s.", place, mixed)


def _repeated(frame: DataFrame) -> Series:
    """Whether another run of the same setting and seed counts instead: the one that ended last."""
    ends = [(run.has_ended, _time_of_end(run)) for run in frame["run"]]
    order = sorted(frame.index, key=ends.__getitem__)
    repeated = frame.loc[order].duplicated(["setting", "seed"], keep="last")
    return repeated.reindex(frame.index)


def _time_of_end(run: Run) -> float:
    """Seconds since 1970, in whatever time zone the run ended; 0 without a time."""
    try:
        return datetime.fromisoformat(run.summary.get("ended") or "").timestamp()
    except ValueError:
        return 0.0


def _complete_seeds(keys: DataFrame, runs: Sequence[Run]) -> None:
    """Completes a seed that all repetitions share, such as ``data.seed=1``, where it equals the
    run's own seed.

    :func:`gcfed.folders.identity.leaves` leaves it out there, because a seed that follows the run's
    looks the same in a config. Runs without it belong to the runs that have it, unless one of them
    has a seed that no other run has: then they follow their own seeds.
    """
    for key in keys.columns[keys.columns.str.endswith(".seed")]:
        others = keys.columns.drop(key)
        for _, alike in keys.groupby([*others], sort=False):
            lacking = alike.index[alike[key] == ""]
            own = [_text(runs[i].get(key)) for i in lacking]
            if {*own} <= {*alike[key]}:
                keys.loc[lacking, key] = own


def search_of(run: Run) -> Path | None:
    """The folder of the search, if the run is a trial or one seed of a trial."""
    for folder in run.folder.parents[:2]:
        if (folder / TRIALS).exists() or (folder / STORAGE).exists():
            return folder
    return None


def varying(texts: DataFrame) -> DataFrame:
    """The keys in which these rows differ.

    If several keys always change together, only the first is kept. A key is left out if its value
    follows from the ``_target_`` in its section.
    """
    texts = texts.loc[:, texts.nunique() > 1]
    codes = DataFrame({key: pd.factorize(texts[key])[0] for key in texts}, index=texts.index)
    kept = texts.loc[:, ~codes.T.duplicated().to_numpy()]
    return kept.drop(columns=[key for key in kept if _follows_from_class(key, kept)])


def _follows_from_class(key: str, texts: DataFrame) -> bool:
    """Whether each class in the key's section has one value of the key."""
    target = f"{key.rpartition('.')[0]}._target_"
    if key == target or target not in texts:
        return False
    return int(texts.groupby(target)[key].nunique().max()) == 1


def symbol(key: str) -> str:
    """A readable name of a key: ``λ``, ``server lr``."""
    words = _PLAIN.sub("", key.removesuffix("._target_"))
    return SYMBOLS.get(key, re.sub("[._]+", " ", words).strip())


def described(key: str, text: str, whole: bool = False) -> str:
    """``η 0.1``, ``Adam``, ``momentum 0``; ``no λ`` if it is not set.

    Long texts are cut, unless ``whole``.
    """
    if not text:
        return f"no {symbol(key)}"
    if not whole:
        text = _LONG_NUMBER.sub(lambda number: f"{float(number[0]):.4g}", text)[:60]
    return text if key.endswith("_target_") else f"{symbol(key)} {text}"


def _distinguished(names: Series, texts: DataFrame) -> Series:
    """Adds to equal names the values in which they differ.

    A value that most of them have, or that is not set, is left out.
    """
    longer = names.copy()
    for _, equal in names.groupby(names):
        for key, values in varying(texts.loc[equal.index]).items():
            shares = values.value_counts(normalize=True)
            usual = shares.idxmax() if shares.max() > 0.5 else ""
            shortened = {described(str(key), text) for text in shares.index}
            is_ambiguous = len(shortened) < len(shares)
            for setting in equal.index[values != usual]:
                longer[setting] += f", {described(str(key), values[setting], whole=is_ambiguous)}"
    return longer


def _place(run: Run) -> str:
    """``CIFAR-10, CNN, 5 of 100 clients, Dirichlet 0.1, 800 rounds``."""
    partition = _text(run.get("partition._target_", ""))
    parameter = run.leaves.get("partition.alpha", run.leaves.get("partition.classes", ""))
    words = [
        _label(run, "data"),
        _label(run, "model"),
        _clients(run),
        f"{partition} {parameter}".strip(),
        rounds_in_words(run.planned),
    ]
    return ", ".join(words)


def _clients(run: Run) -> str:
    """``5 of 100 clients``, also for a share of 0.05; ``5% of all clients`` if the data have the
    clients.
    """
    key = "participation.per_round"
    per_round = run.get(key)
    num_clients = run.get("participation.num_clients")
    is_share = isinstance(per_round, float) and 0 < per_round < 1
    if is_share and num_clients:
        per_round = number_of_clients(per_round, num_clients, key)
    elif is_share:
        per_round = f"{100 * per_round:g}%"
    return f"{per_round} of {num_clients or 'all'} clients"


def _method(run: Run) -> str:
    """``FedProx + Local GC``.

    Ingredients of FedAvg go by their own names: ``GC-Fed``, ``FedAvg + MyMethod``.
    """
    algorithm = _label(run, "algorithm")
    names = [algorithm]
    if algorithm.lower() == "fedavg":
        for key, target in run.leaves.items():
            if re.fullmatch(r"methods\.[^.]+\._target_", key):
                names.append(_text(target))
    if run.get("gc._target_") is not None:
        if algorithm.lower() == "fedavg" and len(names) == 1:
            names = []
        names.append(_label(run, "gc"))
    return " + ".join(dict.fromkeys(names))


def _label(run: Run, kind: str) -> str:
    return str(run.get(f"labels.{kind}") or run.get(f"tags.{kind}", "?"))


def _texts(run: Run) -> dict[str, str]:
    values = run.leaves | {"rounds": run.planned, "eval_every": run.get("eval_every")}
    return {key: _text(value) for key, value in values.items() if key != "seed"}


def _text(value: Any) -> str:
    """A value as text: floats in short, our classes, torch's and a notebook's without their
    modules.
    """
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    text = str(value)
    if text.startswith(("gcfed.", "torch.", "__main__.")):
        return text.rpartition(".")[2]
    return text


def _importance(key: str) -> tuple[int, bool, int]:
    """A sort key: classes first, then keys with a symbol, then the others. Of each kind, those of
    the data come last, and short keys first.
    """
    kind = 2
    if key.endswith("_target_"):
        kind = 0
    elif key in SYMBOLS:
        kind = 1
    return kind, key.startswith("data."), len(key)
