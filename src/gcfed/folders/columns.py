"""The columns of ``metrics.csv`` and the numbers of ``summary.json``, and where less is better."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Literal

Better = Literal["higher", "lower", "neither"]

#: Columns by pattern → which value is better. ``neither``: it describes a run and ranks none.
COLUMNS: dict[str, Better] = {
    "round": "neither",
    "train/loss": "lower",
    "train/clients": "neither",
    "train/nonfinite_clients": "lower",
    "train/refused_steps": "lower",
    "train/dropped_clients": "lower",
    "train/stragglers": "lower",
    "train/hostile_clients": "neither",
    "train/samples": "neither",
    "train/steps": "neither",
    "test/acc": "higher",
    "test/acc_smooth10": "higher",
    "test/acc_ema": "higher",
    "test/loss": "lower",
    "test/perplexity": "lower",
    "test/rmse": "lower",
    "test/relative_error": "lower",
    "val/acc": "higher",
    "val/loss": "lower",
    "val/perplexity": "lower",
    "val/rmse": "lower",
    "comm/down_bytes": "lower",
    "comm/up_bytes": "lower",
    "time/train_s": "lower",
    "time/round_s": "lower",
    "clock/seconds": "lower",
    "late/mean": "lower",
    "late/max": "lower",
    "late/lost": "lower",
    "privacy/epsilon_rdp": "lower",
    "privacy/epsilon_prv": "lower",
    "clip_update/max_norm": "neither",
    "clip_update/clipped": "neither",
    "drift/client_norm": "neither",
    "drift/relative": "neither",
    "drift/update_norm": "neither",
    "drift/divergence": "lower",
    "drift/cosine": "higher",
    "cka/*": "higher",
    "gap/l2": "lower",
    "gap/relative": "lower",
    "gap/cosine": "higher",
    "gc/rho/*": "neither",
    "gc/share_*/*": "neither",
    "angle/server": "lower",
    "angle/above_90": "lower",
    "angle/update": "lower",
    "forgetting/before": "lower",
    "forgetting/after": "lower",
    "forgetting/own": "lower",
    "forgetting/others": "lower",
    # what is better depends on who attacks
    "leakage/*": "neither",
    "fedgc/cgc_layers": "neither",
    "fedgc/sgc_active": "neither",
    "fedgc/sgc_failed": "lower",
    "personal/*_acc": "higher",
    "personal/*_worst10": "higher",
    "personal/*_std": "lower",
    "classes/*_acc": "higher",
    "clients/acc_*": "higher",
    "clients/loss_*": "lower",
}
#: Numbers that only ``summary.json`` has.
SUMMARY_NUMBERS: dict[str, Better] = {
    "rounds": "neither",
    "best_round": "neither",
    "test/acc_best": "higher",
    "test/loss_best": "lower",
    "test/perplexity_best": "lower",
    "test/rmse_best": "lower",
    "test/relative_error_best": "lower",
    "acc_diff/mean": "higher",
    "acc_diff/std": "lower",
    "acc_diff/min": "higher",
    "client_seconds": "lower",
    "partition/*": "neither",
}
# In other columns, such as those of torchmetrics, these words mean that less is better.
_LOWER = re.compile(
    "loss|error|rmse|mse|mae|perplexity|distance|divergence|deviance|epsilon|bytes|seconds|time/"
    "|comm/|_std",
    re.IGNORECASE,
)


def better(column: str) -> Better:
    """Which value of a column is better. Of an unknown column it is the higher one, unless its name
    says otherwise.
    """
    known = known_better(column)
    if known is not None:
        return known
    return "lower" if _LOWER.search(column) else "higher"


def is_summary_number(name: str) -> bool:
    """Whether ``summary.json`` alone has this number, so that no column has its name."""
    return any(fnmatchcase(name, pattern) for pattern in SUMMARY_NUMBERS)


def known_better(column: str) -> Better | None:
    """Which value is better; None for a column that is not this project's."""
    for pattern, direction in (COLUMNS | SUMMARY_NUMBERS).items():
        if fnmatchcase(column, pattern):
            return direction
    return None
