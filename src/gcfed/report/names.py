"""What people call a setting: by what differs in it, in words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pandas as pd
import yaml

from gcfed.runs.folder import Run
from gcfed.runs.reading import LABEL, Loader
from gcfed.utils.resolvers import CONFIGS

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
_PROPER = {"iid": "IID", "dirichlet": "Dirichlet"}


def option(run: Run, key: str) -> str:
    """What the configs call the choice at a ``…._target_``: ``sign flip``; else the name of the class."""
    group, target = key.partition("._target_")[0], str(run.get(key, ""))
    own = run.get(group)
    files = _files(group).get(target, ()) if group in _OPTIONS else ()
    if not files or not isinstance(own, Mapping):
        name = target.rpartition(".")[2]
        return re.sub("(?<=[a-z])(?=[A-Z])", " ", name).lower() if target.startswith("gcfed.") else name
    words = max(files, key=lambda name: sum(own.get(k) == value for k, value in files[name].items()))
    return re.sub(r"^\w+", lambda word: _PROPER.get(word[0], word[0]), words.replace("_", " "))


@cache
def _files(group: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The files of a group of ``configs`` by the class that they choose, and what they set."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted((CONFIGS / group).glob("*.yaml")):
        node = yaml.load(path.read_text(encoding="utf-8"), Loader)
        found.setdefault(str(node.get("_target_")), {})[path.stem] = node
    return found


def differing(settings: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Texts of the keys in which the settings differ, a row each.

    Classes come first, then what has a symbol: Adam with another η and β is Adam.
    """
    first = settings[0]
    keys = {key for values in settings for key in first.keys() | values.keys() if first.get(key) != values.get(key)}
    rows = [{key: _text(values[key]) if key in values else "" for key in keys} for values in settings]
    frame = pd.DataFrame(rows, index=range(len(rows)), dtype=object)
    return frame[sorted(frame.columns[frame.nunique() > 1], key=_precedence)]


def variants(texts: pd.DataFrame) -> pd.DataFrame:
    """The columns of :func:`differing` in which these rows differ; of those that always change together one only, and
    none that a class brings with it."""
    texts = texts.loc[:, texts.nunique() > 1]
    codes = pd.DataFrame({key: pd.factorize(texts[key])[0] for key in texts}, index=texts.index)
    kept = texts.loc[:, ~codes.T.duplicated().to_numpy()]
    classes = {key: f"{key.rpartition('.')[0]}._target_" for key in kept}
    brought = [k for k, c in classes.items() if k != c and c in kept and kept.groupby(c)[k].nunique().max() == 1]
    return kept.drop(columns=brought)


def _precedence(key: str) -> tuple[bool, bool, bool, int]:
    """``partition.alpha`` rather than ``data.partitioner.alpha``."""
    return not key.endswith("_target_"), key not in SYMBOLS, key.startswith("data."), len(key)


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
        short = texts.str.replace(r"^\d*\.\d{6,}$", lambda number: f"{float(number[0]):.{digits}g}", regex=True)  # noqa: B023
        if short.nunique() == texts.nunique():
            return short
    return texts


def _text(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return text.rpartition(".")[2] if text.startswith(("gcfed.", "torch.")) else text
