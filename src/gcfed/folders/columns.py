"""What is known of a column of ``metrics.csv`` by its name: which value is better, its title, its
unit, the numbers that ``summary.json`` has of it, and what makes a run write it.

The parts of a run name the columns that they write (``writes``, ``numbers``, ``Task.columns``).
"""

import re
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal

import yaml

from gcfed.utils.files import YamlLoader

Better = Literal["higher", "lower", "neither"]


@dataclass(frozen=True)
class Column:
    """What is known of the columns with a name, or of a number that only ``summary.json`` has."""

    name: str  # or a pattern
    better: Better  # neither: it describes a run and ranks none
    title: str = ""  # in headings and figures; "": the name
    over_rounds: str = ""  # the statistic of all rounds that summary.json has; "": the last value
    remedy: str = ""  # what to set, so that a run writes it; "": unknown, or metrics=<first part>


#: The columns that this project writes, and no others. The first one that matches a name counts.
_FILE = Path(__file__).with_name("columns.yaml")
COLUMNS = [Column(**known) for known in yaml.load(_FILE.read_text("utf-8"), YamlLoader)]
# In other columns, such as those of torchmetrics, these words mean that less is better, and else
# the second ones that more is better.
_LOWER = re.compile(
    "loss|error|rmse|mse|mae|mape|nll|entropy|brier|calibration|hinge|perplexity|distance"
    "|divergence|deviance|epsilon|bytes|seconds|time/|comm/|_std",
    re.IGNORECASE,
)
_HIGHER = re.compile(
    "acc|auc|auroc|precision|recall|f1|f_?beta|score|r2|iou|jaccard|dice|kappa|corr|cosine"
    "|similarity|specificity|sensitivity|predictive_?value|match|explained|signal|psnr|bleu|rouge",
    re.IGNORECASE,
)
# These columns are shares from 0 to 1, which people read in percent.
_ACCURACY = re.compile(r"(^|[/_])acc(_|$)|^personal/\w+_(worst10|std)$")
#: Columns of the global model's test; a run is judged by the first that it has.
GLOBAL_TESTS = ("test/acc", "test/relative_error", "test/rmse", "test/loss")
#: ``summary.json`` has a number under the name of a column: that of all rounds.
SUMMARY_STATISTICS = {known.name: known.over_rounds for known in COLUMNS if known.over_rounds}
#: The columns of a test of which less is better.
ERRORS = ("test/loss", "test/perplexity", "test/rmse", "test/relative_error")


def better(column: str) -> Better:
    """Which value of a column is better; the higher one if its name does not say so."""
    return named_better(column) or "higher"


def named_better(column: str) -> Better | None:
    """Which value of a column is better, by its name; None if the name does not say so."""
    known = known_better(column)
    if known is not None:
        return known
    if _LOWER.search(column):
        return "lower"
    return "higher" if _HIGHER.search(column) else None


def known_better(column: str) -> Better | None:
    """Which value is better; None for a column that is not this project's."""
    known = column_of(column)
    return None if known is None else known.better


@cache
def column_of(name: str) -> Column | None:
    """What is known of a column; None if it is not this project's."""
    for known in COLUMNS:
        if fnmatchcase(name, known.name):
            return known
    return None


def title_of(column: str) -> str:
    """The name of a column in headings and figures."""
    known = column_of(column)
    return known.title if known is not None and known.title else column


def is_accuracy(column: str) -> bool:
    """Whether a column has accuracies from 0 to 1, which are shown in percent."""
    return bool(_ACCURACY.search(column))


def global_test(columns: Container[str]) -> str:
    """The column of the global model's test by which a run with these columns is judged."""
    return next((column for column in GLOBAL_TESTS if column in columns), GLOBAL_TESTS[-1])


def numbers_of(columns: Collection[str]) -> list[str]:
    """The numbers that only the summary of a run with these columns has, some as patterns."""
    numbers = ["rounds", "client_seconds", "partition/*"]
    if "test/acc" in columns:
        numbers += ["test/acc_best", "best_round", "acc_diff/*"]
    return numbers + [f"{name}_best" for name in ERRORS if name in columns]


def is_summary_number(name: str) -> bool:
    """Whether ``summary.json`` alone has this number, so that no column has its name."""
    return matches(name, numbers_of(("test/acc", *ERRORS)))


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
