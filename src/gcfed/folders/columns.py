"""What is known of a column of ``metrics.csv`` by its name: which value is better, its title, its
unit, and the numbers that ``summary.json`` has of it.

The parts of a run name the columns that they write (``writes``, ``numbers``, ``Task.columns``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable
from fnmatch import fnmatchcase
from typing import Literal

Better = Literal["higher", "lower", "neither"]

#: Which value is better → patterns of the columns that this project writes, and of no others.
#: ``neither``: they describe a run and rank none.
DIRECTIONS: dict[Better, tuple[str, ...]] = {
    "higher": (
        "test/acc",
        "test/acc_smooth10",
        "test/acc_ema",
        "test/acc_best",
        "val/acc",
        "acc_diff/mean",
        "acc_diff/min",
        "drift/cosine",
        "cka/*",
        "gap/cosine",
        "personal/*_acc",
        "personal/*_worst10",
        "classes/*_acc",
        "clients/acc_*",
    ),
    "lower": (
        "train/loss",
        "train/nonfinite_clients",
        "train/refused_steps",
        "train/dropped_clients",
        "train/stragglers",
        "test/loss",
        "test/perplexity",
        "test/rmse",
        "test/relative_error",
        "test/loss_best",
        "test/perplexity_best",
        "test/rmse_best",
        "test/relative_error_best",
        "val/loss",
        "val/perplexity",
        "val/rmse",
        "acc_diff/std",
        "comm/*_bytes",
        "time/*_s",
        "clock/seconds",
        "client_seconds",
        "late/mean",
        "late/max",
        "late/lost",
        "privacy/epsilon_*",
        "drift/divergence",
        "gap/l2",
        "gap/relative",
        "angle/server",
        "angle/above_90",
        "angle/update",
        "forgetting/before",
        "forgetting/after",
        "forgetting/own",
        "forgetting/others",
        "fedgc/sgc_failed",
        "personal/*_std",
        "clients/loss_*",
    ),
    "neither": (
        "round",
        "rounds",
        "best_round",
        "train/clients",
        "train/hostile_clients",
        "train/samples",
        "train/steps",
        "partition/*",
        "clip_update/max_norm",
        "clip_update/clipped",
        "drift/client_norm",
        "drift/update_norm",
        "drift/relative",
        "gc/rho/*",
        "gc/share_*",
        # what is better depends on who attacks
        "leakage/*",
        "fedgc/cgc_layers",
        "fedgc/sgc_active",
    ),
}
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
#: Names of columns.
TITLES = {
    "test/acc": "test accuracy",
    "test/rmse": "RMSE",
    "test/relative_error": "relative error",
    "test/loss": "test loss",
    "test/perplexity": "perplexity",
    "val/acc": "validation accuracy",
    "personal/global_acc": "accuracy of the global model at clients",
    "personal/local_acc": "accuracy of clients' own models",
    "comm/down_bytes": "sent to clients",
    "comm/up_bytes": "sent by clients",
}
# These columns are shares from 0 to 1, which people read in percent.
_ACCURACY = re.compile(r"(^|[/_])acc(_|$)|^personal/\w+_(worst10|std)$")
#: Columns of the global model's test; a run is judged by the first that it has.
GLOBAL_TESTS = ("test/acc", "test/relative_error", "test/rmse", "test/loss")
#: ``summary.json`` has a number under the name of a column: that of all rounds.
OF_ALL_ROUNDS = {
    "comm/down_bytes": "total",
    "comm/up_bytes": "total",
    "time/round_s": "median",
    "train/nonfinite_clients": "total",
}
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
    for direction, patterns in DIRECTIONS.items():
        if matches(column, patterns):
            return direction
    return None


def project_columns() -> list[str]:
    """The columns and numbers that this project writes, some as patterns."""
    return [pattern for patterns in DIRECTIONS.values() for pattern in patterns]


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
