"""What is known of a column of ``metrics.csv`` by its name: which value is better, its title, its
unit, the numbers that ``summary.json`` has of it, and what makes a run write it.

The parts of a run name the columns that they write (``writes``, ``numbers``, ``Task.columns``).
"""

import re
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal

Better = Literal["higher", "lower", "neither"]


@dataclass(frozen=True)
class Column:
    """What is known of the columns with a name, or of a number that only ``summary.json`` has."""

    name: str  # or a pattern
    better: Better  # neither: it describes a run and ranks none
    title: str = ""  # in headings and figures; "": the name
    over_rounds: str = ""  # the statistic of all rounds that summary.json has; "": the last value
    remedy: str = ""  # what to set, so that a run writes it; "": unknown, or metrics=<first part>


# Remedies of several columns.
_VALIDATION = "set data.validation=0.1"
_PERSONAL = "set metrics=personal data.client_test=0.2"
_SMOOTHING = "leave ~callbacks.smoothing out"
_BUFFERED = "set participation=buffered"
_CLIPPING = "add methods.clip_update (docs/methods.md)"
_FEDGC = "set algorithm=fedgc"
#: The columns that this project writes, and no others. The first one that matches a name counts.
COLUMNS = (
    Column("round", "neither"),
    Column("rounds", "neither"),
    Column("best_round", "neither"),
    Column("train/loss", "lower"),
    Column("train/nonfinite_clients", "lower", over_rounds="total"),
    Column("train/refused_steps", "lower"),
    Column("train/dropped_clients", "lower", remedy="set participation.faults.dropout=0.1"),
    Column("train/stragglers", "lower", remedy="set participation.faults.stragglers=0.5"),
    Column("train/clients", "neither"),
    Column("train/hostile_clients", "neither", remedy="set attack=sign_flip"),
    Column("train/samples", "neither"),
    Column("train/steps", "neither"),
    Column("test/acc", "higher", title="test accuracy"),
    Column("test/acc_smooth10", "higher", remedy=_SMOOTHING),
    Column("test/acc_ema", "higher", remedy=_SMOOTHING),
    Column("test/acc_best", "higher"),
    Column("test/loss", "lower", title="test loss"),
    Column("test/perplexity", "lower", title="perplexity"),
    Column("test/rmse", "lower", title="RMSE"),
    Column(
        "test/relative_error", "lower", title="relative error", remedy="set metrics=relative_error"
    ),
    Column("test/loss_best", "lower"),
    Column("test/perplexity_best", "lower"),
    Column("test/rmse_best", "lower"),
    Column("test/relative_error_best", "lower"),
    Column("acc_diff/mean", "higher"),
    Column("acc_diff/min", "higher"),
    Column("acc_diff/std", "lower"),
    Column("val/acc", "higher", title="validation accuracy", remedy=_VALIDATION),
    Column("val/loss", "lower", remedy=_VALIDATION),
    Column("val/perplexity", "lower", remedy=_VALIDATION),
    Column("val/rmse", "lower", remedy=_VALIDATION),
    Column(
        "personal/global_acc",
        "higher",
        title="accuracy of the global model at clients",
        remedy=_PERSONAL,
    ),
    Column(
        "personal/local_acc", "higher", title="accuracy of clients' own models", remedy=_PERSONAL
    ),
    Column("personal/*_acc", "higher", remedy=_PERSONAL),
    Column("personal/*_worst10", "higher", remedy=_PERSONAL),
    Column("personal/*_std", "lower", remedy=_PERSONAL),
    Column("clients/acc_*", "higher"),
    Column("clients/loss_*", "lower"),
    Column("classes/*_acc", "higher"),
    Column("comm/down_bytes", "lower", title="sent to clients", over_rounds="total"),
    Column("comm/up_bytes", "lower", title="sent by clients", over_rounds="total"),
    Column("comm/*_bytes", "lower"),
    Column("time/round_s", "lower", over_rounds="median"),
    Column("time/*_s", "lower"),
    Column("client_seconds", "lower"),
    Column("clock/seconds", "lower", remedy="set participation.clock.step=0.01"),
    Column("late/mean", "lower", remedy=_BUFFERED),
    Column("late/max", "lower", remedy=_BUFFERED),
    Column("late/lost", "lower", remedy=_BUFFERED),
    Column("partition/*", "neither"),
    Column(
        "privacy/epsilon_*", "lower", remedy="set privacy=client_dp privacy.noise_multiplier=1.0"
    ),
    Column("clip_update/max_norm", "neither", remedy=_CLIPPING),
    Column("clip_update/clipped", "neither", remedy=_CLIPPING),
    Column("drift/cosine", "higher"),
    Column("drift/divergence", "lower"),
    Column("drift/client_norm", "neither"),
    Column("drift/update_norm", "neither"),
    Column("drift/relative", "neither"),
    Column("angle/server", "lower"),
    Column("angle/above_90", "lower"),
    Column("angle/update", "lower"),
    Column("gap/cosine", "higher"),
    Column("gap/l2", "lower"),
    Column("gap/relative", "lower"),
    Column("cka/*", "higher"),
    Column("forgetting/before", "lower"),
    Column("forgetting/after", "lower"),
    Column("forgetting/own", "lower"),
    Column("forgetting/others", "lower"),
    Column("gc/rho/*", "neither", remedy="set metrics=coherence"),
    Column("gc/share_*", "neither", remedy="set metrics=gc_share"),
    Column("fedgc/sgc_failed", "lower", remedy=_FEDGC),
    Column("fedgc/cgc_layers", "neither", remedy=_FEDGC),
    Column("fedgc/sgc_active", "neither", remedy=_FEDGC),
    # what is better depends on who attacks
    Column("leakage/*", "neither"),
)
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
